"""Jobs on several hosts: they save and load together, a host that is lost is named, the job resumes on the others."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.tools.verify import verify_checkpoint
from tests.hosts.hosts import ROOT, Host, missing_reason, running_hosts, torchrun
from tests.support.local_files import flip
from tests.support.model_like import assert_same, model_tensors, read_all, write_model
from tests.support.state_compare import differing, read_state

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(missing_reason() != "", reason=missing_reason()),
]

_DEADLINE_S = 240.0


def _start(
    hosts: list[Host], ranks_each: int, folder: Path, name: str, **variables: str
) -> list[subprocess.Popen[bytes]]:
    script, environment = ["-m", "tests.hosts.job", str(folder), name], {"PYTHONPATH": str(ROOT), **variables}
    return torchrun(hosts, ranks_each, script, folder / name, environment)


def _end(processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    _wait_for(lambda: all(process.poll() is not None for process in processes), folder)
    codes = [process.returncode for process in processes]
    assert not any(codes), f"exit codes {codes}\n{_logs(folder)}"


def _wait_for(condition: Callable[[], bool], folder: Path) -> None:
    until_s = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < until_s, f"after {_DEADLINE_S} s\n{_logs(folder)}"
        time.sleep(0.05)


def _logs(folder: Path) -> str:
    return "\n".join(
        f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}" for log in sorted(folder.glob("*.log"))
    )


def _told(folder: Path, fact: str) -> dict[int, Any]:
    """What each rank that has told it said of a fact, last."""
    found = {}
    for file in sorted(folder.glob("rank*.jsonl")):
        for line in file.read_text().splitlines():
            facts = json.loads(line)
            if fact in facts:
                found[int(file.stem.removeprefix("rank"))] = facts[fact]
    return found


def test_two_hosts_save_and_load_together(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    with running_hosts(2, shared) as hosts:
        _end(_start(hosts, 2, shared, "saves"), shared / "saves")
    assert _told(shared, "host") == {0: "host-0", 1: "host-0", 2: "host-1", 3: "host-1"}
    for name in ("sync", "async"):
        assert verify_checkpoint(shared / name).whole
        assert differing(read_state(shared / f"{name}-loaded"), read_state(shared / f"{name}-saved")) == []


def test_two_hosts_run_one_command_together(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    source, target = shared / "ckpt", shared / "tp4"
    write_model(source)
    damaged = shutil.copytree(source, shared / "damaged")
    flip(damaged / "__1_1.distcp", 40_000)
    lines = {
        "verify": ["verify", source],
        "reshard": ["reshard", source, target, "--tp", "4", "--workers", "4"],
        "diff": ["diff", source, target],
        "damaged": ["reshard", damaged, shared / "none", "--tp", "4"],
    }
    with running_hosts(2, shared) as hosts:
        for name, words in lines.items():
            script = ["-m", "mcore_ckpt", *map(str, words)]
            processes = torchrun(hosts, 2, script, shared / name, {"PYTHONPATH": str(ROOT)})
            _wait_for(lambda started=processes: all(one.poll() is not None for one in started), shared / name)
            assert [process.returncode for process in processes] == [int(name == "damaged")] * 2, _logs(shared / name)
    said = {name: [(shared / name / f"host-{n}.log").read_text() for n in range(2)] for name in lines}
    for name, words in (("verify", "valid: 127 items"), ("reshard", "TP 4 PP 1 EP 1"), ("diff", "identical: 60 of 60")):
        assert [text.count(words) for text in said[name]] == [1, 0]
    for text in said["damaged"]:
        assert re.search(r"could not write the files: rank \d of 4", text)
    assert not list(shared.glob("none*"))
    assert verify_checkpoint(target).whole
    assert_same(read_all(target), model_tensors())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["killed", "cut off"])
@pytest.mark.parametrize("lost", [0, 1], ids=["with the coordinator", "without"])
def test_a_host_lost_in_mid_save_is_named_and_the_job_resumes_on_the_other(lost: int, way: str, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    with running_hosts(2, shared) as hosts:
        gone, stays = hosts[lost], hosts[1 - lost]
        theirs = (2 * (1 - lost), 2 * (1 - lost) + 1)
        _start(hosts, 2, shared, "fails", STAYS=gone.name)
        _wait_for(lambda: len(_told(shared, "written")) == 4, shared / "fails")
        before = (shared / "first" / ".metadata").read_bytes()
        if way == "cut off":
            gone.cut_off()
        else:
            gone.kill()
        _wait_for(lambda: set(theirs) <= set(_told(shared, "error")), shared / "fails")
        gone.kill()
        for rank, error in _told(shared, "error").items():
            assert f"could not write the data files: rank {rank} of 4 has lost contact" in error
            if lost:
                assert re.search(r"with another rank: rank [23](, for which rank 0 has waited,)? has ended", error)
            else:
                assert re.search(
                    r"with another rank: rank ([01] has ended|\d, or another: the store .* (fails|hangs))", error
                )
        assert not (shared / "second" / ".metadata").exists()
        assert (shared / "first" / ".metadata").read_bytes() == before
        assert verify_checkpoint(shared / "first").whole

        _end(_start([stays], 2, shared, "resumes"), shared / "resumes")
        assert _told(shared, "resumed") == {0: 1, 1: 1}
        assert _told(shared, "saved") == {0: 2, 1: 2}
        assert verify_checkpoint(shared / "first").whole
        assert verify_checkpoint(shared / "second").whole


@pytest.mark.slow
@pytest.mark.parametrize("story", ["fails", "loads"])
def test_a_host_that_is_plugged_in_again_is_waited_for(story: str, tmp_path: Path) -> None:
    """In mid-save, and in mid-load: where the network is back before the process group's time is up, nothing fails."""
    shared = tmp_path / "shared"
    with running_hosts(2, shared) as hosts:
        processes = _start(hosts, 2, shared, story, STAYS=hosts[1].name, STAYS_S="6")
        began = "written" if story == "fails" else "reads"
        _wait_for(lambda: {2, 3} <= set(_told(shared, began)), shared / story)
        hosts[1].cut_off()
        time.sleep(3.0)
        hosts[1].reconnect()
        _end(processes, shared / story)
    assert _told(shared, "error") == dict.fromkeys(range(4), "")
    assert verify_checkpoint(shared / ("second" if story == "fails" else "lost")).whole
