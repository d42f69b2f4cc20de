"""A program's default device and torch's modes do not reach into saves and loads: what is made within is as ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch._subclasses.fake_tensor import FakeTensorMode

from mcore_ckpt import open_checkpoint
from mcore_ckpt.dcp.reader import FileSystemReader, MCoreLoadPlanner
from mcore_ckpt.dcp.writer import FileSystemWriterAsync, MCoreSavePlanner


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default device": default_device,
    "device": lambda: torch.device("meta"),
    "no such device": lambda: torch.device("cuda:7"),
    "fake tensors": FakeTensorMode,
}
TENSORS = {"small": torch.arange(12.0).view(3, 4), "long": torch.arange(2.0**20)}


def state_of(tensors: dict[str, torch.Tensor], lr: float) -> dict[str, Any]:
    return {**tensors, "options": {"lr": lr, "moment": torch.full((3,), lr)}}


@pytest.mark.parametrize("mode", MODES)
def test_a_save_and_a_load_by_dcp_within_a_mode(tmp_path: Path, mode: str) -> None:
    state = state_of(TENSORS, 0.5)
    blank = state_of({key: torch.zeros_like(value) for key, value in TENSORS.items()}, 0.0)
    blank["options"]["moment"] = blank["options"]["moment"].t()
    with MODES[mode]():
        dcp.save(state, storage_writer=FileSystemWriterAsync(tmp_path), planner=MCoreSavePlanner(), no_dist=True)
        dcp.load(blank, storage_reader=FileSystemReader(tmp_path), planner=MCoreLoadPlanner(), no_dist=True)
        part = open_checkpoint(tmp_path)["small"][1:]
    assert all(blank[key].equal(value) for key, value in TENSORS.items())
    assert blank["options"]["lr"] == 0.5
    assert blank["options"]["moment"].tolist() == [0.5] * 3
    assert part.equal(TENSORS["small"][1:])
