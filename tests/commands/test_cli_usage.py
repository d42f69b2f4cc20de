"""The command from outside: what it imports, its exit codes, its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_ckpt.commands.cli import main
from tests.support.model_like import write_model

COMMANDS = ["reshard", "inspect", "verify", "diff", "export", "import", "cat", "list", "copy", "prune"]
ROOT = Path(__file__).resolve().parents[2]


def imported_by(arguments: list[str]) -> set[str]:
    """Which of the heavy packages a run of the command imports."""
    code = (
        "import sys\nfrom mcore_ckpt.commands.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        "sys.stderr.write(' '.join({'torch', 'numpy', 'rich', 'megatron'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return set(ended.stderr.split())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cli") / "ckpt"
    write_model(directory)
    return directory


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=" ".join)
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    assert imported_by([*command, "--help"]) == set()


@pytest.mark.parametrize(
    "arguments",
    [["inspect"], ["inspect", "--json", "--tensors"], ["inspect", "--items"], ["inspect", "--files"], ["verify"]],
    ids=" ".join,
)
def test_looking_and_verifying_need_neither_torch_nor_numpy(checkpoint: Path, arguments: list[str]) -> None:
    assert imported_by([arguments[0], str(checkpoint), *arguments[1:]]) == set()


def test_every_command_is_listed_and_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for command in COMMANDS:
        assert f"    {command}" in shown
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert f"usage: mcore-ckpt {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [[], ["nonsense"], ["inspect"], ["reshard", "a"], ["inspect", "x", "--files", "--args"]], ids=" ".join
)
def test_bad_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: mcore-ckpt" in capsys.readouterr().err


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


def test_an_empty_directory_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path)]) == 2
    assert ".metadata" in capsys.readouterr().err


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        main(["inspect", str(tmp_path / "gone"), "--debug"])


def test_json_is_one_document(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["inspect", str(checkpoint)],
        ["inspect", str(checkpoint), "--tensors"],
        ["inspect", str(checkpoint), "--items"],
        ["inspect", str(checkpoint), "--files"],
        ["inspect", str(checkpoint), "--objects"],
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


def test_nothing_is_drawn_where_output_is_piped(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["reshard", str(checkpoint), str(tmp_path / "r"), "--tp", "1", "--pp", "1"]
    command = [sys.executable, "-m", "mcore_ckpt", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""


@pytest.mark.parametrize(("command", "reader", "code"), [("inspect", "head -n 1", 0), ("verify", "true", 1)])
def test_a_reader_that_goes_away_changes_nothing(tmp_path: Path, command: str, reader: str, code: int) -> None:
    write_model(tmp_path / "c")
    (tmp_path / "c" / "__0_0.distcp").unlink()  # which verify says by its exit code
    options = "--items" if command == "inspect" else ""
    line = f"{sys.executable} -m mcore_ckpt {command} {tmp_path / 'c'} {options} | {reader}; echo ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert (ended.stderr, ended.stdout.splitlines()[-1]) == ("", str(code))


def test_scripts_reshard_is_the_command(checkpoint: Path, tmp_path: Path) -> None:
    script = ROOT / "scripts" / "reshard.py"
    command = [sys.executable, str(script), str(checkpoint), str(tmp_path / "r"), "--tp", "1", "--pp", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "r" / ".metadata").exists()


def test_keys_cannot_act_in_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    evil = "\x1b[31mred\x9b2J\ud800"
    write_model(tmp_path / "c", tp=1, tensors={evil: torch.zeros(2)})
    assert main(["inspect", str(tmp_path / "c"), "--tensors"]) == 0
    shown = capsys.readouterr().out
    assert "\\x1b[31mred\\x9b2J\\ud800" in shown
    assert "\x1b" not in shown
    assert main(["cat", str(tmp_path / "c"), "\x1b[0m"]) == 2
    assert "\x1b" not in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "c"), "--tensors", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"][0]["fqn"] == evil
