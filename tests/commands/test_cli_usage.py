"""The command from outside: what it imports, its exit codes, its errors."""

import argparse
import json
import logging
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock
from zipfile import ZipFile

import pytest
import torch

from mcore_ckpt.commands import cli
from mcore_ckpt.commands.cli import main, make_parser
from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.core.options import parse_size
from mcore_ckpt.launch import main as launch
from tests.support.command import document_of, output_of, refusal_of
from tests.support.kept_log import kept_log
from tests.support.model_like import reshard_killed, write_model
from tests.support.processes import in_child, printed_by

COMMANDS = "list inspect verify cat diff copy repair prune reshard export merge import doctor".split()
ROOT = Path(__file__).resolve().parents[2]


def parsed(*words: str) -> argparse.Namespace:
    """What the command takes a line for."""
    return make_parser(words[0]).parse_args(words)


def imported_by(arguments: list[str]) -> set[str]:
    """Which of the heavy packages a run of the command imports."""
    code = (
        "import sys\nfrom mcore_ckpt.commands.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        "print()\nprint(*{'torch', 'numpy', 'rich', 'megatron'} & set(sys.modules))"
    )
    return set(printed_by(code).splitlines()[-1].split())


@pytest.mark.parametrize("command", [[], ["reshard"]], ids=" ".join)
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    assert imported_by([*command, "--help"]) == set()


@pytest.mark.parametrize(
    "arguments",
    [["inspect", "--json", "--tensors"], ["verify"]],
    ids=" ".join,
)
def test_looking_and_verifying_need_no_torch(checkpoint: Path, arguments: list[str]) -> None:
    assert imported_by([arguments[0], str(checkpoint), *arguments[1:]]) <= {"numpy"}


def test_every_command_is_listed_and_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    listed = [line.split() for line in shown.split("options:")[0].splitlines()[4:] if line]
    assert [words[0] for words in listed if len(words) > 1] == [*COMMANDS, "launch"]
    assert [words[0] for words in listed if len(words) == 1] == ["look:", "change:", "convert:", "run:"]
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        shown = capsys.readouterr().out
        assert f"usage: mcore-ckpt {command}" in shown
        assert "exit codes:\n    0  " in shown
        examples = [line.strip() for line in shown.splitlines() if line.startswith(f"  mcore-ckpt {command} ")]
        assert len(examples) >= 2
        for example in examples:
            assert parsed(*shlex.split(example)[1:]).command == command


@pytest.mark.parametrize(
    ("given", "size_bytes"), [("5G", 5 * 1000**3), ("5GiB", 5 * 1024**3), ("1.5M", 1_500_000), (" 7 KiB ", 7168)]
)
def test_sizes_mean_what_they_say(given: str, size_bytes: int) -> None:
    assert parse_size(given) == size_bytes


@pytest.mark.parametrize("given", ["5i", "-1G", "nan"])
def test_a_size_that_is_none_is_refused(given: str) -> None:
    with pytest.raises(OptionError, match="expected a number such as 512M"):
        parse_size(given)


def test_a_mistake_of_ours_is_no_bad_usage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("mcore_ckpt.commands._look.run_list", mock.Mock(side_effect=RuntimeError("a mistake")))
    assert main(["list", "x"]) == 70
    assert "RuntimeError: a mistake (this should not happen" in capsys.readouterr().err


def test_launch_explains_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = [sys.executable, "-m", "mcore_ckpt.launch", "--help"]
    ended = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "usage: python -m mcore_ckpt.launch SCRIPT" in ended.stdout
    (tmp_path / "job.py").write_text("")

    def said() -> str:
        with kept_log(logging.INFO) as lines:
            assert launch([str(tmp_path / "job.py"), "--save", "run"]) == 0
        return "\n".join(lines)

    assert "saves are synchronous" in in_child(said)
    (tmp_path / "job.py").rename(tmp_path / "__main__.py")
    assert in_child(lambda: str(launch([str(tmp_path)]))) == "0"
    (tmp_path / "__main__.py").rename(tmp_path / "part.py")
    assert in_child(lambda: str(launch([str(tmp_path)]))) == "2"
    with ZipFile(tmp_path / "app.zip", "w") as app:
        app.writestr("__main__.py", "import sys; sys.path[0].index('app.zip'); __builtins__.len")
    assert in_child(lambda: str(launch([str(tmp_path / "app.zip")]))) == "0"
    (tmp_path / "part.py").write_text("import sys; assert sys.modules['__mp_main__'].__spec__.name == 'part'")
    monkeypatch.chdir(tmp_path)
    assert in_child(lambda: str([launch(["-m", name]) for name in ("part", "no.such", ".part")])) == "[0, 2, 2]"
    (tmp_path / "lacks").mkdir()
    (tmp_path / "lacks" / "__init__.py").write_text("import what_is_not_installed")
    with pytest.raises(AssertionError, match="No module named 'what_is_not_installed'"):
        in_child(lambda: launch(["-m", "lacks.part"]))


@pytest.mark.parametrize("arguments", [["nonsense"], ["inspect", "x", "--files", "--args"]], ids=" ".join)
def test_bad_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: mcore-ckpt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("lst run", "; did you mean list?\n"),
        ("reshard run new --dryrun --tpp=4", "mcore-ckpt reshard: .*; did you mean --dry-run, --tp?\n"),
        ("export run new --to safetensor", "mcore-ckpt export: .*; did you mean safetensors?\n"),
        ("copy run new \u202ethird", "mcore-ckpt copy: error: unrecognized arguments: \\u202ethird\n"),
    ],
    ids=["command", "options", "value", "nothing alike"],
)
def test_what_is_misspelt_gets_a_suggestion(arguments: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 2
    first, _, last = says.rpartition(".*")
    *_, said = capsys.readouterr().err.splitlines(keepends=True)
    assert said.startswith(first)
    assert said.endswith(last)


def test_list_names_what_an_interrupted_conversion_has_left(checkpoint: Path, tmp_path: Path) -> None:
    reshard_killed(checkpoint, tmp_path / "iter_0000007")
    said = "iter_0000007.partial: not complete: a conversion makes it, or has been interrupted"
    assert said in output_of("list", tmp_path)
    shutil.copytree(checkpoint, tmp_path / "iter_0000001")
    listed = document_of("list", tmp_path)
    assert listed["unfinished"] == ["iter_0000007.partial"]
    assert [found["name"] for found in listed["checkpoints"]] == ["iter_0000001"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "{gone}"],
        ["verify", "{gone}"],
        ["diff", "{gone}", "{gone}"],
        ["cat", "{gone}", "key"],
        ["export", "{gone}", "{new}"],
        ["import", "{gone}", "{new}"],
        ["reshard", "{gone}", "{new}", "--tp", "1", "--pp", "1"],
        ["list", "{gone}"],
        ["copy", "{gone}", "{gone}-copy"],
        ["prune", "{gone}", "--keep-last", "1"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_wrong_path_is_one_line_and_2(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.format(gone=tmp_path / "gone", new=tmp_path / "new") for word in arguments]
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert str(tmp_path / "gone") in captured.err
    assert "Traceback" not in captured.err
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        main(["inspect", str(tmp_path / "gone"), "--debug"])


def test_json_is_one_document(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["inspect", str(checkpoint)],
        ["inspect", str(checkpoint), "--tensors"],
        ["inspect", str(checkpoint), "--items"],
        ["inspect", str(checkpoint), "--files"],
        ["inspect", str(checkpoint), "--args"],
        ["verify", str(checkpoint)],
        ["diff", str(checkpoint), str(checkpoint)],
        ["cat", str(checkpoint), "output_layer.weight", "--stats"],
        ["cat", str(checkpoint), "rng_state/shard_0.0_1.2"],
        ["reshard", str(checkpoint), str(tmp_path / "r"), "--tp", "1", "--pp", "1", "--dry-run"],
        ["reshard", str(checkpoint), str(tmp_path / "r"), "--tp", "1", "--pp", "1"],
        ["export", str(checkpoint), str(tmp_path / "e")],
        ["import", str(tmp_path / "e"), str(tmp_path / "i")],
    ):
        assert main([*arguments, "--json"]) == 0, arguments
        captured = capsys.readouterr()
        assert captured.out.count("\n") == 1
        assert json.loads(captured.out)
        assert captured.err == ""


def test_a_reader_that_goes_away_changes_nothing(tmp_path: Path) -> None:
    write_model(tmp_path / "c")
    (tmp_path / "c" / "__0_0.distcp").unlink()  # which verify says by its exit code
    line = f"{sys.executable} -m mcore_ckpt verify {tmp_path / 'c'} | true; echo ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert (ended.stderr, ended.stdout) == ("", "1\n")


def test_without_standard_streams_the_exit_code_says_all(checkpoint: Path) -> None:
    line = f"{sys.executable} -m mcore_ckpt verify {checkpoint} <&- >&-"
    ended = subprocess.run(["bash", "-c", line], stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=120)
    assert (ended.stderr, ended.returncode) == ("", 0)


def test_scripts_reshard_is_the_command(checkpoint: Path, tmp_path: Path) -> None:
    script = ROOT / "scripts" / "reshard.py"
    command = [sys.executable, str(script), str(checkpoint), str(tmp_path / "r"), "--tp", "1", "--pp", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")  # no progress is drawn where output is piped
    assert (tmp_path / "r" / ".metadata").exists()


def test_keys_cannot_act_in_a_terminal(tmp_path: Path) -> None:
    evil, escaped = "\x1b[31mred\x9b2J\ud800\u202eder", "\\x1b[31mred\\x9b2J\\ud800\\u202eder"
    write_model(tmp_path / "c", tp=1, tensors={evil: torch.zeros(2)})
    shown = output_of("inspect", tmp_path / "c", "--tensors")
    assert escaped in shown
    assert "\x1b" not in shown
    assert "\x1b" not in refusal_of("cat", tmp_path / "c", "\x1b[0m")
    assert document_of("inspect", tmp_path / "c", "--tensors")["tensors"][0]["fqn"] == evil
    with kept_log() as said:
        logger_of("mcore_ckpt").warning(evil)
    assert said == [escaped]


def test_on_a_narrow_terminal_no_line_is_too_long_and_one_is_no_plural(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "run" / "iter_0000007", tp=1, tensors={"w": torch.zeros(2)})
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("7")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(cli, "is_terminal", lambda stream: True)
    monkeypatch.chdir(tmp_path)
    for words in ("list run", "inspect run", "inspect run --files", "inspect run --tensors", "cat run w", "verify run"):
        shown = output_of(*words.split())
        assert re.search(r"\b1 (tensors|chunks|files|objects|items|checkpoints|iterations|ranks)", shown) is None, shown
        if words.startswith(("list", "inspect run --")):
            rows = [line for line in shown.splitlines() if not line.startswith("run")]
            assert max(map(len, rows)) <= 60, shown
