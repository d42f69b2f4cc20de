"""One command on several processes: the bytes and the report of one process, one error, and nothing done twice."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from mcore_ckpt.commands.cli import main
from mcore_ckpt.core.errors import CheckpointError, OptionError
from mcore_ckpt.core.team import Counter, Team, _place, current_team, share, team_of_launcher
from mcore_ckpt.reshard import conversion
from mcore_ckpt.reshard.target_directory import target_folder
from tests.support.gloo_ranks import rank_outcomes, run_ranks
from tests.support.local_files import contents, flip
from tests.support.meanwhile import behind
from tests.support.model_like import read_all, write_model
from tests.support.object_server import free_port

ROOT = Path(__file__).resolve().parents[2]
Shown = tuple[int, str, str]
"""Exit code, standard output, standard error."""

# Command lines in the folder in which a process stands, with their exit codes; what some make, later ones read.
STORY = {
    "verify ../ckpt": 0,
    "verify ../ckpt --check-optimizer --state --json": 1,
    "verify ../bad --json": 1,
    "verify .. --all": 1,
    "reshard ../ckpt tp4 --tp 4 --json": 0,
    "reshard ../ckpt bf16 --tp 1 --dtype bf16 --drop-optimizer --workers 3": 0,
    "diff ../ckpt tp4 --all": 0,
    "diff ../ckpt bf16 --json": 1,
    "diff ../ckpt ../other --state --json": 1,
    "export ../ckpt st --max-shard-size 20K --json": 0,
    "export ../ckpt torch --to torch --max-shard-size 50K": 0,
    "import st iter_0000003 --tp 2": 0,
    "merge merged ../ckpt ../other --tp 2 --json": 0,
    "copy ../ckpt copied --json": 0,
    "copy ../ckpt copied": 0,
    "repair broken --from ../ckpt --json": 0,
    "inspect tp4 --items --json": 0,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "ckpt")
    for name in ("bad", "one/broken", "many/broken"):
        shutil.copytree(tmp_path / "ckpt", tmp_path / name)
        damage(tmp_path / name)
    other = {key: value + 1 for key, value in read_all(tmp_path / "ckpt").items()}
    write_model(tmp_path / "other", tensors=other)
    return tmp_path


def damage(directory: Path) -> None:
    """In what the first of two ranks reads, and in what the second does."""
    flip(directory / "__0_1.distcp", 40_000)
    flip(directory / "__1_1.distcp", 40_000)


def shown(line: str) -> Shown:
    """What a command line shows, without the seconds that it took; ids of saves are always the same one."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch("secrets.token_bytes", bytes),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = main(line.split())
    said = re.sub(r"\d+\.\d s|\d+ (s|min)\b|(?<=_s\": )[\d.e-]+|(?<=seconds\": )[\d.e-]+", "N", out.getvalue())
    return code, said, err.getvalue()


def in_rank(rank: int, ports: Sequence[int], lines: Sequence[str], where: Path) -> list[Shown]:
    """Run command lines in a rank, as a launcher would start it; `{rank}` in them is its number."""
    dist.destroy_process_group()
    os.chdir(where)
    found = []
    for port, line in zip(ports, lines, strict=True):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        found.append(shown(line.format(rank=rank)))
    return found


def by_ranks(count: int, lines: Sequence[str], where: Path, **how: Any) -> list[list[Shown]]:
    return run_ranks(in_rank, count, [free_port() for _ in lines], lines, where, **how)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.long)])
def test_several_processes_write_and_say_what_one_does(
    folder: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder / "one")
    alone = [shown(line) for line in STORY]
    assert {line: code for line, (code, _, _) in zip(STORY, alone, strict=True)} == STORY
    by_rank = by_ranks(count, [*STORY], folder / "many")
    for line, expected, *of_ranks in zip(STORY, alone, *by_rank, strict=True):
        assert of_ranks[0] == expected, line
        assert of_ranks[1:] == [(expected[0], "", "")] * (count - 1), line
    assert contents(folder / "many") == contents(folder / "one")


def test_an_error_of_one_rank_is_that_of_all_and_leaves_nothing(folder: Path) -> None:
    lines = ["reshard bad t --tp 4", "export bad t", "copy bad t", "verify nothing", "reshard ckpt t --tp 5"]
    lines.append("reshard ckpt t{rank} --tp 4")
    first, second = by_ranks(2, lines, folder)
    assert first == second
    assert [code for code, _, _ in first] == [2] * len(lines)
    said = [text for _, _, text in first]
    assert all(text.count("\n") == 1 for text in said)
    assert re.match(r"mcore-ckpt: could not write the files: rank [01] of 2( \(2 ranks.*\))?: .*distcp", said[0])
    assert re.search(r"could not check the source: rank 0 of 2 \(2 ranks failed: 0, 1\): .*distcp", said[2])
    assert "nothing: no such directory" in said[3]
    assert "could not reshard: rank 0 of 2 (2 ranks failed: 0, 1): " in said[4]
    assert "not given the same command line: `reshard ckpt t0 --tp 4`, `reshard ckpt t1 --tp 4`" in said[5]
    assert not list(folder.glob("t*"))


def dies_after(rank: int, port: int, where: Path, step: str, killed: int = 1) -> list[Shown]:
    with behind(conversion, step, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL) if rank == killed else None):
        return in_rank(rank, [port], ["reshard ckpt t --tp 4"], where)


def test_what_a_killed_rank_has_done_is_not_done_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = rank_outcomes(dies_after, 2, free_port(), folder, "_write_part")
    assert outcomes[1].exit_code == -signal.SIGKILL
    ((code, _, said),) = outcomes[0].value
    assert code == 2
    assert "could not write the files: rank 0 of 2 has lost contact with another rank: rank 1 has ended" in said
    assert said.count("has lost contact") == 1
    assert sorted(path.name for path in folder.glob("t.*")) == ["t.partial", "t.partial.journal", "t.partial.journal.1"]
    before = {path.name: path.stat().st_ino for path in (folder / "t.partial").iterdir()}
    monkeypatch.chdir(folder)
    assert '"resumed": true' in shown("reshard ckpt t --tp 4 --json")[1]
    shown("reshard ckpt whole --tp 4")
    assert {name: (folder / "t" / name).stat().st_ino for name in before} == before
    assert len(before) == 6
    assert not list(folder.glob("t.*"))
    assert shown(f"diff {folder / 't'} {folder / 'whole'}")[0] == 0


def _exit_with(rank: int, *given: Any) -> None:
    ((code, _, _),) = dies_after(rank, *given)
    os._exit(code)


def test_all_stop_when_one_of_three_dies(folder: Path) -> None:
    """The first loses contact with the third, while the second waits for the word of the first."""
    outcomes = rank_outcomes(_exit_with, 3, free_port(), folder, "_write_part", 2, grace_s=20)
    assert [outcome.exit_code for outcome in outcomes] == [2, 2, -signal.SIGKILL]


@pytest.mark.parametrize("count", [2, 3])
def test_a_rank_that_dies_when_all_is_done_spoils_nothing(folder: Path, count: int) -> None:
    """Of three, the second still waits for the first's word on the work, when the first comes to show its outcome."""
    outcomes = rank_outcomes(dies_after, count, free_port(), folder, "check_all", count - 1, grace_s=20)
    assert outcomes[-1].exit_code == -signal.SIGKILL
    ((code, out, said),) = outcomes[0].value
    assert (code, said) == (0, "")
    assert "compared with the source" in out
    assert shown(f"verify {folder / 't'}")[0] == 0


def test_a_second_run_into_one_target_is_refused(folder: Path) -> None:
    with target_folder(folder / "t", "work"):
        for code, _, said in (one for (one,) in by_ranks(2, ["reshard ckpt t --tp 4"], folder)):
            assert code == 2
            assert "rank 0 of 2: another command is making this target" in said


def meets(rank: int, port: int, act: Callable[[Team], Any]) -> Any:
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with team_of_launcher() as team:
        return act(team)


def other_files(team: Team) -> str:
    with pytest.raises(CheckpointError) as caught:
        team.divide("count", range(2 + team.rank), lambda _: 1, list)
    return str(caught.value)


def fails_while_others_work(team: Team) -> tuple[str, int]:
    counter = Counter()

    def step() -> None:
        if team.rank == 1:
            raise ValueError("no such step")
        while True:  # until the others' failure is seen
            counter.add(1)
            time.sleep(0.01)

    with pytest.raises(CheckpointError) as caught:
        team.work("step", step, counter)
    assert current_team() is team
    return str(caught.value).partition("\n")[0], team.first("ask", lambda: current_team().size)


def test_ranks_that_see_other_files_divide_nothing() -> None:
    for said in run_ranks(meets, 2, free_port(), other_files):
        assert "rank 0 and rank 1 of 2 do not see the same files" in said


def test_others_stop_when_a_rank_fails() -> None:
    found = run_ranks(meets, 3, free_port(), fails_while_others_work)
    assert found == [("could not step: rank 1 of 3: ValueError: no such step", 1)] * 3


@pytest.mark.parametrize("count", range(1, 6))
@pytest.mark.parametrize(
    "sizes", [[], [5], [0, 0, 0], [1, 1, 1, 1], [9, 1, 1, 1], [1, 1, 1, 9], [0, 3, 0, 3, 0]], ids=str
)
def test_each_item_is_one_ranks(sizes: list[int], count: int) -> None:
    shares = [share(list(enumerate(sizes)), lambda item: item[1], rank, count) for rank in range(count)]
    assert [item for part in shares for item in part] == list(enumerate(sizes))


STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4"}


@pytest.mark.parametrize(
    ("variables", "place", "host"),
    [
        ({}, (0, 1), None),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, (1, 2), "a"),
        ({**STEP, "SLURM_STEP_NODELIST": "gpu[03-07,9],cpu1"}, (3, 4), "gpu03"),
        ({**STEP, "SLURM_JOB_NODELIST": "a-1,b[1-2]"}, (3, 4), "a-1"),
        ({**STEP, "SLURM_JOB_NODELIST": "a-1", "MASTER_ADDR": "b"}, (3, 4), "b"),
        ({**STEP, "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}, (0, 1), None),  # under srun
    ],
    ids=["alone", "torchrun", "srun", "srun, one host", "srun, an address", "torchrun of one"],
)
def test_the_launcher_says_who_they_are(variables: Mapping[str, str], place: tuple[int, int], host: str | None) -> None:
    with mock.patch.dict(os.environ, variables, clear=True):
        assert _place() == place
        assert os.environ.get("MASTER_ADDR") == host


def test_a_batch_script_is_no_task_of_a_step() -> None:
    batch = {name: value for name, value in STEP.items() if name != "SLURM_STEP_ID"}
    with mock.patch.dict(os.environ, {**batch, "SLURM_PROCID": "0", "RANK": "3"}, clear=True):
        assert _place() == (0, 1)


@pytest.mark.parametrize(
    "variables", [{"RANK": "2"}, {"RANK": "x"}, {"RANK": "-1"}, {}, {**STEP, "RANK": "0", "WORLD_SIZE": "1"}], ids=str
)
def test_a_place_that_cannot_be_is_refused(variables: Mapping[str, str]) -> None:
    with mock.patch.dict(os.environ, {"WORLD_SIZE": "2", **variables}, clear=True), pytest.raises(OptionError):
        _place()


def test_a_command_alone_imports_no_torch(folder: Path) -> None:
    code = "import sys; from mcore_ckpt.commands.cli import main; sys.exit(main() or 'torch' in sys.modules)"
    for words in (["verify", "ckpt"], ["reshard", "ckpt", "t", "--tp", "4"]):
        assert subprocess.run([sys.executable, "-c", code, *words], cwd=folder, check=False).returncode == 0


@pytest.mark.long
def test_torchrun_and_srun_start_the_commands_of_a_script(folder: Path) -> None:
    command = f"{sys.executable} -m mcore_ckpt verify ckpt --json"
    script = ["sh", "-c", f"{command} && {command}"]
    known = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    report = subprocess.run([*torchrun, *script], cwd=folder, env=known, check=True, capture_output=True, text=True)
    tasks = [
        subprocess.Popen(
            script,
            cwd=folder,
            env={**known, **STEP, "SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    first, second = (task.communicate()[0] for task in tasks)
    assert [task.returncode for task in tasks] == [0, 0]
    assert second == ""
    reports = [json.loads(line) for text in (report.stdout, first) for line in text.splitlines()]
    assert [(one["whole"], one["records"]) for one in reports] == [(True, 886)] * 4
