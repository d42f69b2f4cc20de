"""Options: what cannot work is refused by name, and a launch can set each from the environment."""

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from mcore_ckpt import LoadOptions, OptionError, SaveOptions
from mcore_ckpt.commands.cli import main
from mcore_ckpt.core.options import tell_unknown_variables, unknown_variables
from tests.support.kept_log import kept_log

pytestmark = pytest.mark.quick

# One text for each field that can be set from the environment, and what it means.
SAVE_VARIABLES: dict[str, tuple[str, Any]] = {
    "on_existing": ("error", "error"),
    "writer": ("fork", "fork"),
    "thread_count": ("7", 7),
    "staging_budget_bytes": ("2097152", 2097152),
    "when_busy": ("skip", "skip"),
    "on_failure": ("warn", "warn"),
    "write_deadline_s": ("12.5", 12.5),
    "keep_last": ("4", 4),
    "keep_optimizer_last": ("2", 2),
    "drain_to": ("s3://bucket/run", "s3://bucket/run"),
    "export_to": ("s3://bucket/models", "s3://bucket/models"),
    "compare_replicas": ("raise", "raise"),
    "trace_path": ("/tmp/traces", "/tmp/traces"),
}
LOAD_VARIABLES: dict[str, tuple[str, Any]] = {
    "drain_to": ("/far/run", "/far/run"),
    "local_tier": ("/near/run", "/near/run"),
    "on_dtype_mismatch": ("raise", "raise"),
    "allowed_classes": ("numpy.dtype, collections.deque", ("numpy.dtype", "collections.deque")),
    "on_damaged": ("go_back", "go_back"),
    "certify": ("raise", "raise"),
    "page_cache": ("on", "on"),
}
# What cannot be without another field is tried in a test of its own.
TOGETHER = {"keep_every", "export_config"}


def test_every_field_has_a_variable() -> None:
    assert {f.name for f in fields(SaveOptions)} == {*SAVE_VARIABLES, *TOGETHER}
    assert {f.name for f in fields(LoadOptions)} == {*LOAD_VARIABLES}


@pytest.mark.parametrize(
    ("options", "name", "text", "value"),
    [
        (cls, name, *pair)
        for cls, table in ((SaveOptions, SAVE_VARIABLES), (LoadOptions, LOAD_VARIABLES))
        for name, pair in table.items()
    ],
)
def test_a_variable_sets_its_field_and_nothing_else(options: Any, name: str, text: str, value: Any) -> None:
    found = options.from_environment({f"MCORE_CKPT_{name.upper()}": text, name.upper(): "ignored"})
    default = options()
    assert getattr(found, name) == value
    changed = {f.name for f in fields(options) if getattr(found, f.name) != getattr(default, f.name)}
    assert changed <= {name}


def test_an_argument_wins_over_the_environment() -> None:
    environment = {"MCORE_CKPT_THREAD_COUNT": "7", "MCORE_CKPT_KEEP_LAST": "no number", "MCORE_CKPT_KEEP_EVERY": "1000"}
    found = SaveOptions.from_environment(environment, thread_count=3, keep_last=4)
    assert (found.thread_count, found.keep_last, found.keep_every) == (3, 4, 1000)


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("THREAD_COUNT", "many", "MCORE_CKPT_THREAD_COUNT='many': expected a number"),
        ("WRITER", "threads", "^MCORE_CKPT_WRITER='threads': expected one of 'persistent', 'fork'"),
        ("KEEP_LAST", "0", "^MCORE_CKPT_KEEP_LAST=0: expected at least 1$"),
        ("STAGING_BUDGET_BYTES", "1M", r"^MCORE_CKPT_STAGING_BUDGET_BYTES=1000000: .* at least 1048576$"),
    ],
)
def test_a_bad_variable_is_named(variable: str, text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SaveOptions.from_environment({f"MCORE_CKPT_{variable}": text})


@pytest.mark.parametrize(
    ("options", "values", "message"),
    [
        (SaveOptions, {"on_existing": "keep"}, "on_existing='keep': expected one of 'replace', 'error'"),
        (SaveOptions, {"staging_budget_bytes": 1000}, "staging_budget_bytes=1000: expected at least 1048576"),
        (SaveOptions, {"write_deadline_s": math.nan}, "write_deadline_s=nan: expected at least"),
        (SaveOptions, {"write_deadline_s": math.inf}, "write_deadline_s=inf: expected at most .* None waits for ever"),
        (SaveOptions, {"drain_to": "ftp://host/run"}, "an object store \\(ftp\\) that mcore_ckpt does not know"),
        (SaveOptions, {"trace_path": "s3://bucket/traces"}, "trace_path=.*a path in a file system is needed here"),
        (SaveOptions, {"keep_every": 5}, "keep_every=5: without keep_last or keep_optimizer_last nothing is removed"),
        (SaveOptions, {"keep_optimizer_last": 0}, "keep_optimizer_last=0: expected at least 1"),
        (SaveOptions, {"keep_last": 1.5}, "keep_last=1.5: expected an int"),
        (SaveOptions, {"keep_every": True, "keep_last": 1}, "keep_every=True: expected an int"),
        (SaveOptions, {"thread_count": None}, "thread_count=None: expected an int"),
        (SaveOptions, {"write_deadline_s": "9"}, "write_deadline_s='9': expected a number"),
        (LoadOptions, {"page_cache": "yes"}, "page_cache='yes': expected one of 'auto', 'on'"),
        (LoadOptions, {"allowed_classes": "mine.*"}, "allowed_classes='mine\\.\\*': expected a tuple of names"),
    ],
)
def test_what_cannot_work_is_refused(options: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        options(**values)
    assert isinstance(caught.value, ValueError)


def test_a_misspelled_variable_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"MCORE_CKPT_WRITTER": "fork", "MCORE_CKPT_WRITER": "fork", "MCORE_CKPT_TEST_X": "1", "PATH": "/"}
    monkeypatch.setattr("os.environ", {**environment, "MCORE_CKPT_XYZZY": ""})
    assert unknown_variables() == {
        "MCORE_CKPT_WRITTER": "MCORE_CKPT_WRITER",
        "MCORE_CKPT_XYZZY": "",
    }


@pytest.mark.parametrize(
    "use",
    [SaveOptions.from_environment, LoadOptions.from_environment, lambda: main(["list", "nowhere"])],
    ids=["save", "load", "command"],
)
def test_whatever_reads_options_tells_of_a_misspelled_variable_once(
    use: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`install()` and DCP's writer and reader take their options so; a command may take none."""
    monkeypatch.setenv("MCORE_CKPT_WRITTER", "fork")
    tell_unknown_variables.cache_clear()
    with kept_log() as said:
        for _ in range(2):
            use()
    tell_unknown_variables.cache_clear()
    assert said == ["MCORE_CKPT_WRITTER sets no option of mcore_ckpt; MCORE_CKPT_WRITER would"]
