"""Two ranks on two hosts, each with a client of its own: what they do, and what ends or stops them."""

import contextlib
import ctypes
import io
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_ckpt import AsyncCallsQueue, SaveOptions, TorchDistSaveStrategy, prune_run
from mcore_ckpt.commands.cli import main
from mcore_ckpt.directory.commit import Commit
from mcore_ckpt.storage.resolve import LocalWriter, storage_at
from scripts.shared_fs.volumes import Ceph, Gluster, pause
from tests.megatron.trap_ranks import installed
from tests.shared_fs.conftest import Hosts, seen
from tests.support.gloo_ranks import MEGATRON, RanksFailedError, StandingRanks, made, standing_ranks
from tests.support.meanwhile import ahead_of, once

pytest.importorskip("megatron.core")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
_NEW_MOUNTS = 0x20000  # <sched.h>, CLONE_NEWNS
_LARGE = 50_000  # rows: 60 MB a rank


def join(rank: int, hosts: Hosts, run: Path) -> None:
    """From now on the rank has its host's directory at `run`."""
    assert ctypes.CDLL(None).unshare(_NEW_MOUNTS) == 0
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", hosts[rank], run], check=True)


@contextmanager
def ranks_on(hosts: Hosts) -> Iterator[tuple[StandingRanks, Path]]:
    """Two ranks, and the directory that both name, where each has its own client's mount."""
    run = hosts[0].parents[1] / "run"
    run.mkdir(exist_ok=True)
    with standing_ranks(2, preload=MEGATRON, collective_s=90.0) as ranks:
        ranks.values(join, hosts, run)
        yield ranks, run


# --- in the ranks -----------------------------------------------------------------------------------------------------


def state(rank: int, value: int, rows: int) -> dict[str, Any]:
    from megatron.core.dist_checkpointing import ShardedTensor

    tensor = torch.full((rows, 300), float(value + rank))
    return {"shard": ShardedTensor.from_rank_offsets("shard", tensor, (0, rank, 2)), "common": {"iteration": value}}


def save(rank: int, directory: Path, value: int, rows: int = 1000) -> None:
    installed().save(state(rank, value, rows), made(directory))


def save_async(rank: int, directory: Path, value: int, **options: Any) -> None:
    strategy, queue = TorchDistSaveStrategy(options=SaveOptions(**options)), AsyncCallsQueue()
    queue.schedule_async_request(
        installed().save(state(rank, value, 1000), made(directory), strategy, async_sharded_save=True)
    )
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()


def check(rank: int, directory: Path, value: int) -> None:
    """Load what this host has written, and what the other has."""
    for writer in (rank, 1 - rank):
        loaded = installed().load(state(writer, 0, 1000), str(directory))
        assert loaded["common"] == {"iteration": value}
        assert torch.equal(loaded["shard"], state(writer, value, 1000)["shard"].data)


def command(*arguments: object) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        result = main([str(argument) for argument in arguments])
    assert result == 0, out.getvalue()


def replace_in_turns(rank: int, directory: Path) -> None:
    for value in range(10):
        (save_async if value % 2 else save)(rank, directory, value)
        check(rank, directory, value)


def iterations(run: Path) -> list[int]:
    return sorted(int(name.removeprefix("iter_")) for name in os.listdir(run) if name.startswith("iter_"))


def look_at_new_ones_and_remove(rank: int, run: Path) -> None:
    for value in (1, 2, 3):
        directory = run / f"iter_{value:07d}"
        save(rank, directory, value)
        if rank == 1:  # at once, on the host that has not published
            command("list", run)
            command("verify", directory)
            command("copy", directory, run.with_name(f"copy{value}"))
        dist.barrier()
    with storage_at(run / "iter_0000001").in_use(".metadata") if rank else contextlib.nullcontext():
        dist.barrier()
        if rank == 0:
            prune_run(run, keep_last=1, remove=True)
        dist.barrier()
        command("verify", run / "iter_0000001")
        assert seen(lambda: iterations(run) == [1, 3])
        dist.barrier()
    if rank == 1:
        prune_run(run, keep_last=1, remove=True)
    assert seen(lambda: iterations(run) == [3]), iterations(run)
    dist.barrier()
    save(rank, run / "iter_0000002", 4)  # where one was removed, of which the other host knew the names
    check(rank, run / "iter_0000002", 4)


def keep_the_last(rank: int, run: Path) -> None:
    """A load of the other host keeps one more."""
    with contextlib.ExitStack() as held:
        for value in range(11, 16):
            save_async(rank, run / f"iter_{value:07d}", value, keep_last=2)
            if rank == 0:
                (run / "latest_checkpointed_iteration.txt").write_text(str(value))
            elif value == 12:
                held.enter_context(storage_at(run / "iter_0000012").in_use(".metadata"))
        assert seen(lambda: iterations(run) == [12, 14, 15]), iterations(run)
        command("verify", run / "iter_0000012")
        dist.barrier()


def save_until(rank: int, directory: Path, value: int, at: str, act: Callable[[], object]) -> None:
    """Save, and call `act` right before the rank syncs what it has written, or the first one publishes."""
    owner, name = {"write": (LocalWriter, "finish"), "publish": (Commit, "publish")}[at]
    acted: list[object] = []
    with ahead_of(owner, name, once(lambda: acted.append(act()))):
        save(rank, directory, value)
    assert acted or (at == "publish" and rank == 1)


def end(pid: int | None) -> None:
    with contextlib.suppress(ProcessLookupError):  # the other rank has done it
        os.kill(pid or os.getpid(), signal.SIGKILL)


def nothing_is_left(rank: int, directory: Path) -> None:
    names = sorted(os.listdir(directory))
    assert len([name for name in names if name.endswith(".distcp")]) == 2, names
    assert not [name for name in names if "incomplete" in name or "pending" in name], names


# --- the tests --------------------------------------------------------------------------------------------------------


def saved_again(hosts: Hosts) -> None:
    """The older checkpoint is complete, and the next save works, by ranks of which each is on the other host."""
    with ranks_on((hosts[1], hosts[0])) as (ranks, run):
        ranks.values(check, run, 1)
        ranks.values(save, run, 3)
        ranks.values(check, run, 3)
        ranks.values(nothing_is_left, run)


@pytest.mark.parametrize("work", [replace_in_turns, look_at_new_ones_and_remove, keep_the_last])
def test_two_hosts(work: Callable[..., None], hosts: Hosts) -> None:
    with ranks_on(hosts) as (ranks, run):
        ranks.values(work, run / "run")


@pytest.mark.long
@pytest.mark.parametrize(("at", "dead"), [("write", [0, 1]), ("publish", [0])])
def test_ranks_that_are_killed(at: str, dead: list[int], hosts: Hosts) -> None:
    with ranks_on(hosts) as (ranks, run):
        ranks.values(save, run, 1)
        with pytest.raises(RanksFailedError) as raised:
            ranks.call(save_until, run, 2, at, partial(end, None))
    outcomes = raised.value.outcomes
    assert [outcome.rank for outcome in outcomes if outcome.exit_code == -signal.SIGKILL] == dead
    assert all("rank 0" in str(outcome.error) for outcome in outcomes if outcome.rank not in dead)
    saved_again(hosts)


@pytest.mark.long
def test_a_client_that_ends(hosts: Hosts, volume: Gluster | Ceph) -> None:
    with ranks_on(hosts) as (ranks, run):
        ranks.values(save, run, 1)
        outcomes = ranks.call(save_until, run, 2, "write", partial(end, volume.processes["b"].pid))
    volume.remount("b")
    for outcome in outcomes:
        assert "the client of this mount has ended" in str(outcome.error), outcome
    saved_again(hosts)


@pytest.mark.long
@pytest.mark.parametrize("at", ["write", "publish"])
def test_servers_that_stop_for_ten_seconds(at: str, hosts: Hosts, volume: Gluster | Ceph) -> None:
    with ranks_on(hosts) as (ranks, run):
        ranks.values(save, run, 1)
        ranks.values(save_until, run, 2, at, partial(pause, volume.servers(), 10))
        ranks.values(check, run, 2)
        ranks.values(nothing_is_left, run)


@pytest.mark.long
def test_a_full_volume(hosts: Hosts, volume: Gluster | Ceph) -> None:
    with ranks_on(hosts) as (ranks, run):
        ranks.values(save, run, 1)
        with volume.full(hosts):
            outcomes = ranks.call(save, run, 2, _LARGE)
        for outcome in outcomes:
            assert re.search("No space left|quota exceeded", str(outcome.error)), outcome
    saved_again(hosts)


@pytest.mark.long
def test_a_brick_that_ends(hosts: Hosts, volume: Gluster | Ceph) -> None:
    if not isinstance(volume, Gluster) or volume.replicas == 1:
        pytest.skip("there is no other server that has the data")
    with ranks_on(hosts) as (ranks, run):
        ranks.values(save, run, 1)
        ranks.values(save_until, run, 2, "write", partial(end, volume.servers()[0]))
        ranks.values(check, run, 2)
        volume.bring_back()
        ranks.values(save, run, 3)
        ranks.values(check, run, 3)
    command("verify", hosts[1])
