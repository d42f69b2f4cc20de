"""What pages show can be typed as it stands, and is so: command lines, names, options, figures, pictures."""

import argparse
import contextlib
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

import mcore_ckpt
from benchmarks import tables
from benchmarks.calls import CALLS, OURS, SAVES, STOCK
from benchmarks.groups import Group, Interpreter, WorkFailedError
from examples import small_run
from mcore_ckpt import LoadOptions, SaveOptions
from mcore_ckpt.commands.cli import main, make_parser
from mcore_ckpt.tools.verify import verify_checkpoint
from scripts import pictures, promises
from tests.support.gloo_ranks import run_megatron_ranks
from tests.support.object_server import free_port

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.sh")]
)
# A line of its own, or a piece of code within a sentence.
COMMAND = re.compile(r"^(?: {4}|\$ )?(mcore-ckpt [a-z].*)$|`(mcore-ckpt [a-z][^`]*)`", re.MULTILINE)
# Options in brackets, alternatives, what is left out: of such a line only the names of options are checked.
SYNOPSIS = re.compile(r"^\[--?|^\[[A-Z]+\]$|^[a-z-]+\||^\|$|^\.\.\.\]?$")


def command_lines(page: str, *, within_sentences: bool) -> list[list[str]]:
    """The words of each `mcore-ckpt` command that a page shows, without its comment."""
    text = (ROOT / page).read_text().replace("\\\n", " ")
    if page == "CHANGELOG.md":
        text = text.split("\n## ")[1]
    found = COMMAND.findall(text)
    lines = [whole for whole, _ in found if whole]
    lines += [" ".join(part.split()) for _, part in found if part and within_sentences]
    return [shlex.split(line, comments=True) for line in lines]


def shown_options(command: str) -> set[str]:
    """The options that a command's `--help` names."""
    parser = make_parser(command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        (sub,) = (
            action.choices[command] for action in parser._actions if isinstance(action, argparse._SubParsersAction)
        )
        return set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", sub.format_help()))


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_pages_show_exist_with_their_options(page: str) -> None:
    commands = set(re.findall(r"^  (\w+) ", make_parser().format_help(), re.MULTILINE))
    for words in command_lines(page, within_sentences=True):
        assert words[1] in commands, words
        given = {word.strip("[]").partition("=")[0] for word in words[2:] if re.match(r"\[?--?[a-z]", word)}
        if words[1] != "launch":
            assert given <= shown_options(words[1]), words


@pytest.mark.parametrize("page", [page for page in PAGES if page.endswith(".md")])
def test_command_lines_can_be_parsed(page: str) -> None:
    for words in command_lines(page, within_sentences=False):
        if words[1] == "launch" or any(SYNOPSIS.search(word) for word in words):
            continue
        make_parser(words[1]).parse_args(["1" if word == "N" else word for word in words[1:]])


@pytest.mark.parametrize("page", [page for page in PAGES if page.endswith(".md")])
def test_snippets_compile_and_name_what_there_is(page: str) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL):
        compile(block, page, "exec")
        named = set(re.findall(r"\bmcore_ckpt\.(\w+)", block))
        for names in re.findall(r"from mcore_ckpt import ([\w, ]+)", block):
            named |= set(names.replace(" ", "").split(","))
        assert named <= {*mcore_ckpt.__all__, "launch"}, named - set(mcore_ckpt.__all__)


def normal(text: str) -> str:
    """An output without what differs from run to run: times, and how long ago something was."""
    text = re.sub(r"in \d+\.\d s( \([^)]*/s\))?", "in T", text)
    text = re.sub(r" +\d+ (s|min|h|d)  ", "  AGE  ", text)
    text = re.sub(r"   +", "  ", re.sub(r"^[- ]+$", "---", text, flags=re.MULTILINE))  # as wide as an age
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def sessions(page: str) -> list[tuple[str, str]]:
    """Commands at a prompt, and what the page says that they print."""
    blocks = re.findall(r"^```console\n(.*?)^```", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    shown = [part for block in blocks for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    return [(line.partition("\n")[0], line.partition("\n")[2]) for line in shown]


# Commands that load torch in processes of their own.
LONG = {"docs/guides/store.md"}
WITH_SESSIONS = [
    pytest.param(page, marks=[pytest.mark.long] * (page in LONG))
    for page in PAGES
    if page.endswith(".md") and sessions(page)
]


@pytest.fixture
def example_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run that pages show: two checkpoints of a small model at TP 2, and a copy of the newer one."""
    monkeypatch.chdir(tmp_path)
    small_run.main(["."])
    (tmp_path / "bin").mkdir()
    for name, start in (("python", ""), ("mcore-ckpt", "-m mcore_ckpt ")):
        command = tmp_path / "bin" / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" {start}"$@"\n')
        command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    return tmp_path


@pytest.mark.parametrize("page", WITH_SESSIONS)
def test_outputs_that_pages_show_are_real(page: str, example_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the order of the page; a line with dots stands for what was left out."""
    for line, expected in sessions(page):
        words = shlex.split(line)
        if words[0] == "mcore-ckpt":
            main(words[1:])
        else:
            print(subprocess.run(line, shell=True, check=True, capture_output=True, text=True).stdout)
        captured = capsys.readouterr()
        printed, wanted = normal(captured.out + captured.err), normal(expected)
        if wanted.endswith("\n..."):
            wanted = wanted.removesuffix("\n...")
            printed = "\n".join(printed.splitlines()[: len(wanted.splitlines())])
        assert printed == wanted, f"{page}: {line}"


def test_the_quick_start_of_the_readme_runs(example_run: Path) -> None:
    (block,) = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    install, *rest = block.splitlines()
    assert install.startswith("pip install .")
    (example_run / "examples").symlink_to(ROOT / "examples")
    command = ["sh", "-ec", "\n".join(rest)]
    ended = subprocess.run(command, cwd=example_run, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "2 complete" in ended.stdout
    assert "identical: " in ended.stdout
    assert (example_run / "try" / "page.html").exists()


def code_text() -> str:
    """The package's code, the pieces of each message joined."""
    texts = (path.read_text() for path in sorted((ROOT / "mcore_ckpt").rglob("*.py")))
    return re.sub(r"""["']\n\s*f?["']""", "", "\n".join(texts))


def test_messages_that_are_explained_are_in_the_code() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    cells = re.findall(r"^\| (`[^|]+`) \|", text, flags=re.MULTILINE)
    messages = [message for cell in cells for message in re.findall("`([^`]+)`", cell)]
    assert len(messages) > 20
    code = code_text()
    assert [message for message in messages if message not in code] == []


EXAMPLES = {
    # In the place of a launch line: the job's last save.
    "try.sh": ["run", "trial", "cp", "-r", "run", "trial"],
    "damage.sh": ["run/iter_0000200", "copy/iter_0000200"],
    "layout.sh": ["run/iter_0000200", "tp4/iter_0000200", "4", "1"],
    "hf.sh": ["Llama-small", "start/release", "model", "2"],
    "store.sh": ["run/iter_0000200", "{far}/iter_0000200", "back/iter_0000200"],
    "tiers.sh": ["near", "{far}", "python", "two_tiers.py", "save", "near/iter_0000300"],
}
ON_A_STORE = ("store.sh", "tiers.sh")


@pytest.mark.parametrize(
    "name", [*EXAMPLES, *(pytest.param(f"{name} on S3", marks=pytest.mark.long) for name in ON_A_STORE)]
)
def test_examples_run(name: str, example_run: Path, request: pytest.FixtureRequest) -> None:
    name, _, store = name.partition(" on ")
    far = f"{request.getfixturevalue('s3_directory').url}/run" if store else "far"
    damaged = example_run / "run" / "iter_0000200" / "__1_0.distcp"
    before = damaged.read_bytes()
    if name == "damage.sh":
        damaged.write_bytes(before[:20000] + b"X" + before[20001:])
    ended = subprocess.run(
        [ROOT / "examples" / name, *(word.format(far=far) for word in EXAMPLES[name])],
        cwd=example_run,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    expected = {
        "try.sh": "iter_0000200  complete",
        "damage.sh": "repaired: ",
        "layout.sh": "identical: ",
        "hf.sh": "valid: ",
        "store.sh": "identical: ",
        "tiers.sh": "iter_0000300  complete, copied",
    }
    assert expected[name] in ended.stdout
    if name == "damage.sh":
        assert damaged.read_bytes() == before


def test_every_example_is_run_or_says_that_it_never_was() -> None:
    for path in sorted(filter(Path.is_file, (ROOT / "examples").iterdir())):
        if path.name not in {*EXAMPLES, "own_loop.py", "small_run.py", "two_tiers.py"}:
            assert "\n# Never run: " in path.read_text()[:200], path.name
        if path.suffix in (".sh", ".sbatch"):
            subprocess.run(["bash", "-n", path], check=True)
    shown_by = {"slurm": ["slurm.sbatch"], "kubernetes": ["kubernetes.yaml", "kubernetes_verify.yaml"]}
    for page, names in shown_by.items():
        text = (ROOT / f"docs/guides/{page}.md").read_text()
        shown = re.findall(r"^```(?:sh|yaml)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        assert shown == [(ROOT / "examples" / name).read_text() for name in names]


def test_variables_that_pages_and_examples_set_are_options() -> None:
    known = {f"MCORE_CKPT_{field.name.upper()}" for kind in (SaveOptions, LoadOptions) for field in fields(kind)}
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.*")]:
        named = set(re.findall(r"\bMCORE_CKPT_[A-Z_]+\b", path.read_text()))
        unknown = {name for name in named if not name.startswith("MCORE_CKPT_TEST_")} - known
        assert unknown <= {"MCORE_CKPT_STAGE"}, path


def test_each_option_has_a_row_with_its_default() -> None:
    text = (ROOT / "docs" / "usage.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text, re.MULTILINE))
    options = {field.name: field.default for kind in (SaveOptions, LoadOptions) for field in fields(kind)}
    assert rows.keys() == options.keys()
    for name, default in options.items():
        if isinstance(default, str):
            assert rows[name] == f'`"{default}"`', name


@pytest.mark.skipif("MEGATRON_LM_REPO" not in os.environ, reason="MEGATRON_LM_REPO: a checkout of Megatron-LM")
def test_flags_that_are_explained_exist() -> None:
    checkout = Path(os.environ["MEGATRON_LM_REPO"]) / "megatron" / "training"
    code = "\n".join(path.read_text() for path in checkout.rglob("*.py"))
    for row in (ROOT / "docs" / "flags.md").read_text().splitlines():
        if row.startswith("| `--") and "(0.19)" not in row:
            for flag in re.findall(r"`--([\w-]+)", row.split("|")[1]):
                name = flag.removeprefix("no-").replace("-", "_")
                assert f"--{flag}" in code or name in code or name.removeprefix("ckpt_") in code, flag


@pytest.mark.skipif("MEGATRON_LM_REPO" not in os.environ, reason="MEGATRON_LM_REPO: a checkout of Megatron-LM")
def test_messages_of_megatron_that_are_explained_are_in_its_code() -> None:
    checkout = Path(os.environ["MEGATRON_LM_REPO"]) / "megatron"
    code = "\n".join(path.read_text() for path in checkout.rglob("*.py"))
    rows = re.findall(r"^\| Megatron: ([^|]+) \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert rows
    for row in rows:
        assert [piece for piece in re.findall(r"`([^`]+)`", row) if piece not in code] == []


def headings(path: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them of its headings."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [page for page in PAGES if page.endswith(".md")])
def test_links_lead_somewhere_in_a_clone(page: str) -> None:
    """That they do on the site, too, its build says."""
    path = ROOT / page
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        target, _, anchor = link.partition("#")
        if "://" in link:
            continue
        aim = path.parent / target if target else path
        assert aim.exists(), link
        if anchor:
            assert anchor in headings(aim), link


def test_a_preempted_pod_has_time_to_save() -> None:
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((ROOT / "examples" / "kubernetes.yaml").read_text())["spec"]["template"]["spec"]
    (container,) = job["containers"]
    assert container["command"][0] == "torchrun"  # process 1, which gets the signal
    assert "--exit-signal-handler" in container["args"]
    seconds = {row["name"]: row["value"] for row in container["env"]}
    for_ranks = int(seconds["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert int(seconds["MCORE_CKPT_WRITE_DEADLINE_S"]) < for_ranks < job["terminationGracePeriodSeconds"]


SHORT = {
    "bench": "scripts/bench.py --only dense async phases --gb 0.02 --rounds 1 --python312 /nowhere --dir {dir}",
    "scale": "-m benchmarks.scale --items 20 --ranks 2 4 8",
    "calls": "-m benchmarks.calls --items 3 --ranks 2",
    "stores": "-m benchmarks.stores --mb 8 --rounds 1",
}


def test_tables_are_those_of_the_results() -> None:
    assert tables.changed(ROOT) == [], "run `python scripts/bench.py --tables`"


def test_a_row_of_withheld_figures_alone_is_left_out() -> None:
    results = json.loads((ROOT / "docs" / "benchmark.json").read_text())
    of_loads = results["samples"]["dense"]["cold s"]
    assert "large: load, cold" in tables.one(results, "summary")
    for label in of_loads:
        of_loads[label] = [0.1, 0.2, 0.9]
    assert "large: load, cold" not in tables.one(results, "summary")
    assert tables.one({**results, "parts": {"dense": results["parts"]["dense"]}}, "tools") == "Not measured yet.\n"


@pytest.mark.long
def test_a_contender_of_another_folder_is_measured_with_the_package_there(tmp_path: Path) -> None:
    (tmp_path / "mcore_ckpt.py").write_text("raise ImportError('the other package')")
    interpreter = contextlib.closing(Interpreter(Path(sys.executable), (tmp_path, ROOT), megatron=False))
    with interpreter as python, pytest.raises(WorkFailedError, match="the other package"):
        Group(python, "mcore_ckpt", 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SHORT)
def test_a_short_run_measures_and_compares(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = SHORT[name].format(dir=tmp_path).split()
    command = [sys.executable, "-W", "ignore", *words, "--busy", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    results = json.loads(out.read_text())
    if name == "bench":
        assert {part: about["failed"] for part, about in results["parts"].items()} == {
            part: [] for part in ("dense", "async", "phases")
        }
        own, *_ = (label for label, one in results["contenders"].items() if one["adapter"] == "mcore_ckpt")
        (megatron,) = (label for label, one in results["contenders"].items() if one["adapter"] == "megatron")
        for figure in ("save s", "save cpu s", "cold s", "second s", "warm s"):
            assert len(results["samples"]["dense"][figure][megatron]) == 1
        assert results["samples"]["async dense"]["isolated"][own] == [1.0]
        assert own in tables.one(results, "saves and loads")
    elif name == "scale":
        assert [one["items"] for one in results["ours"]] == [40, 80, 160]
        assert all(one["check_s"] > 0 and one["read_s"] > 0 for one in results["ours"])
    elif name == "stores":
        assert [list(by_call) for by_call in results["samples"].values()] == [["save", "load", "start"]] * 3
    else:
        measured = [(one["replicas"], one["side"], one["call"]) for one in results["calls"] if one["cpu_s"] > 0]
        expected = ((0, CALLS), (2, SAVES))
        assert measured == [(n, side, call) for n, calls in expected for side in (OURS, STOCK) for call in calls]
    assert [path.name for path in tmp_path.iterdir()] == [out.name], "checkpoints are left"


def test_diagrams_are_those_of_the_script() -> None:
    for name, text in pictures.DIAGRAMS.items():
        assert (pictures.PICTURES / name).read_text() == pictures.draw_diagram(text), f"{name}: make pictures"


def test_the_picture_of_the_save_is_that_of_its_trace() -> None:
    trace = json.loads((pictures.PICTURES / pictures.TRACE).read_text())
    assert (pictures.PICTURES / "async_save.svg").read_text() == pictures.draw_trace(trace)


@pytest.mark.long
def test_a_trace_of_a_real_save_is_drawn(tmp_path: Path) -> None:
    pictures.make(["trace"], tmp_path)
    spans = [
        event for event in json.loads((tmp_path / pictures.TRACE).read_text())["traceEvents"] if event["ph"] == "X"
    ]
    for rank in range(2):
        mine = {event["name"]: event for event in spans if event["pid"] == rank}
        assert mine.keys() == {"plan", "stage", "dispatch", "train", "writer", "gather", "commit"}
        assert mine["writer"]["ts"] >= mine["stage"]["ts"] + mine["stage"]["dur"]
    drawn = (tmp_path / "async_save.svg").read_text()
    assert all(f"<title>{event['name']}: {event['dur'] / 1e3:.1f} ms</title>" in drawn for event in spans)


def test_each_promise_has_tests_and_the_page_names_them() -> None:
    assert promises.PAGE.read_text() == promises.page(), "run scripts/promises.py"


def test_what_else_the_page_names_is_there() -> None:
    paths, names = promises.named_in(promises.RELIABILITY.read_text())
    assert len(paths) > 5
    for named in (*paths, *names):
        assert promises.level_of(f"`{named}`"), named


def run_loop(rank: int, script: Path, run: Path, port: int) -> str:
    """What the script prints, in a process with the variables of torchrun."""
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), mock.patch.object(sys, "argv", [str(script), str(run)]):
        runpy.run_path(str(script))
    return printed.getvalue()


def test_the_loop_of_the_guide_runs_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="what the loop saves through")
    script = ROOT / "examples" / "own_loop.py"
    [shown] = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/guides/loop.md").read_text(), re.MULTILINE | re.DOTALL)
    assert shown in script.read_text()
    printed = run_megatron_ranks(run_loop, 2, script, tmp_path / "run", free_port())
    assert printed == [f"rank {rank} resumed at step 30\n" for rank in range(2)]
    for step in (10, 20, 30):
        assert verify_checkpoint(tmp_path / "run" / f"iter_{step:07d}").whole
