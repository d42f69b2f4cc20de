"""The index is decoded by one process of a host, and the others get what it has decoded."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from mcore_ckpt.core.errors import CorruptCheckpointError
from mcore_ckpt.load import reader as reader_module
from mcore_ckpt.load.reader import FileSystemReader
from tests.support.gloo_ranks import rank_outcomes, run_ranks

RANKS = 4
_WORTH = "mcore_ckpt.load._host_index._WORTH_BYTES"


def _state(fill: bool) -> dict[str, torch.Tensor]:
    return {f"layer.{n}": torch.full((3, 5), n if fill else -1.0) for n in range(200)}


def _saved(path: Path, writer: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: nothing is distributed here
        dcp.save(_state(True), storage_writer=writer(path))
    return path


@pytest.fixture(scope="module", params=["mcore_ckpt", "DCP"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mcore_ckpt.dcp.writer import FileSystemWriterAsync

    writer = FileSystemWriterAsync if request.param == "mcore_ckpt" else dcp.FileSystemWriter
    return _saved(tmp_path_factory.mktemp("index") / "checkpoint", writer)


class _Counted:
    """`read_index` as the reader calls it; leaves a file for each call, and may end this rank in the middle of one."""

    def __init__(self, rank: int, notes: Path, dies: bool = False, sleeps_s: float = 0.5) -> None:
        self._read, self._rank, self._notes, self._dies = reader_module.read_index, rank, notes, dies
        self._sleeps_s = sleeps_s

    def __call__(self, path: Any, **kwargs: Any) -> Any:
        (self._notes / str(self._rank)).touch()
        time.sleep(self._sleeps_s)  # the others ask meanwhile
        if self._dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._read(path, **kwargs)


def _index(
    rank: int, paths: list[Path], notes: Path, dies: bool = False, slow: bool = False, refused: str = ""
) -> tuple[bool, bool]:
    """Whether the index is what this rank would have decoded, and whether what is loaded by it is what was saved."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_WORTH, 0, raising=False)
        own = FileSystemReader(paths[rank % len(paths)])._decoded()
        sleeps_s = 8.0 if slow and rank == 0 else 0.5
        patch.setattr(reader_module, "read_index", _Counted(rank, notes, dies and rank == 0, sleeps_s))
        if slow:
            patch.setattr("mcore_ckpt.load._host_index._DEADLINE_S", 0.5)
        if refused:

            def refuse(*_: Any, **__: Any) -> Any:
                raise PermissionError(1, "refused")

            patch.setattr(*((os, "memfd_create") if refused == "memory" else (socket, "socket")), refuse)
        dist.barrier()
        if rank and (dies or slow):
            while not (notes / "0").exists():
                time.sleep(0.01)
        reader = FileSystemReader(paths[rank % len(paths)])
        index = reader.index
        same = dict(index.tensors) == dict(own.tensors) and replace(index, tensors={}) == replace(own, tensors={})
        loaded = _state(False)
        _load_state_dict(loaded, reader, no_dist=True)  # `dcp.load` of torch 2.6 cannot leave the others out
        expected = _state(True)
        return same, all(torch.equal(value, expected[key]) for key, value in loaded.items())


def test_one_rank_of_a_host_decodes_the_index(checkpoint: Path, tmp_path: Path) -> None:
    """All ranks have the same index, which one of them has read, and load by it what was saved."""
    assert run_ranks(_index, RANKS, [checkpoint], tmp_path) == [(True, True)] * RANKS
    assert len(list(tmp_path.iterdir())) == 1


def test_ranks_that_load_other_directories_share_nothing(checkpoint: Path, tmp_path: Path) -> None:
    """Each gets the index of its own directory, also where `.metadata` has the same content."""
    other, notes = tmp_path / "other", tmp_path / "notes"
    shutil.copytree(checkpoint, other)
    notes.mkdir()
    assert run_ranks(_index, RANKS, [checkpoint, other], notes) == [(True, True)] * RANKS
    assert sorted(int(name.name) % 2 for name in notes.iterdir()) == [0, 1]


def test_a_rank_that_dies_decoding_is_not_waited_for(checkpoint: Path, tmp_path: Path) -> None:
    """The others decode for themselves, or for each other, at once."""
    dead, *others = rank_outcomes(_index, RANKS, [checkpoint], tmp_path, dies=True, deadline_s=60.0)
    assert not dead.ok
    assert [outcome.value for outcome in others] == [(True, True)] * (RANKS - 1)


def test_a_rank_that_takes_too_long_is_not_waited_for(checkpoint: Path, tmp_path: Path) -> None:
    """Beyond the deadline each of the others decodes for itself."""
    assert run_ranks(_index, RANKS, [checkpoint], tmp_path, slow=True) == [(True, True)] * RANKS
    assert len(list(tmp_path.iterdir())) == RANKS


@pytest.mark.parametrize("refused", ["memory", "socket"])
def test_without_such_memory_each_rank_decodes(checkpoint: Path, tmp_path: Path, refused: str) -> None:
    """A sandbox that refuses sockets or memory makes nobody wait."""
    assert run_ranks(_index, RANKS, [checkpoint], tmp_path, refused=refused) == [(True, True)] * RANKS
    assert len(list(tmp_path.iterdir())) == RANKS


def _error(rank: int, path: Path, notes: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_WORTH, 0, raising=False)
        patch.setattr(reader_module, "read_index", _Counted(rank, notes))
        dist.barrier()
        with pytest.raises(CorruptCheckpointError) as raised:
            _ = FileSystemReader(path).index
        return str(raised.value)


def test_all_ranks_say_the_same_of_a_damaged_index(checkpoint: Path, tmp_path: Path) -> None:
    """A damaged `.metadata` is never handed on."""
    damaged, notes = tmp_path / "damaged", tmp_path / "notes"
    shutil.copytree(checkpoint, damaged)
    notes.mkdir()
    content = (damaged / ".metadata").read_bytes()
    (damaged / ".metadata").write_bytes(content[: len(content) // 2])
    assert len(set(run_ranks(_error, RANKS, damaged, notes))) == 1
    assert len(list(notes.iterdir())) == RANKS
