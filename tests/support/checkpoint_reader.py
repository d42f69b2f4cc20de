"""A process that loads checkpoints, by this package or by stock Megatron-Core and stock DCP, and says what they hold.

    with reader("stock") as stock:
        found = stock.look(path)             # a checkpoint of `seeded_state`
        assert found.whole == 2

Stock is asked in a process into which this package was never imported. Each look is a child of it with a gloo world of
its own, so that nothing is remembered from the last one, and has a deadline.
"""

import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal
from unittest import mock

from tests.support.gloo_ranks import MEGATRON, STOCK, start_apart
from tests.support.processes import in_child

Who = Literal["ours", "stock"]
MIX: Final = -1
_SEEDS: Final = range(1, 10)
_DEADLINE_S: Final = 60


@dataclass(frozen=True, slots=True)
class Found:
    """What a directory holds, by one reader: seeds; `MIX`: of none; None: refused."""

    tensors: int | None  # of all tensors and objects, by Megatron's `load`
    common: int | None  # in the common state
    plain: int | None  # of all tensors, by `torch.distributed.checkpoint.load` with the reader of either
    refused: str = ""  # what Megatron's load has raised

    @property
    def whole(self) -> int | None:
        """The seed of everything; None if the load was refused; `MIX` for all else."""
        if self.tensors is None:
            return None
        return self.tensors if self.tensors == self.common else MIX

    @property
    def new_beside_old(self) -> tuple[int, int] | None:
        """The seeds of tensors and common state, where each is whole, but they are of two checkpoints."""
        if self.tensors is None or self.common is None or MIX in (self.tensors, self.common):
            return None
        return None if self.tensors == self.common else (self.tensors, self.common)


class CheckpointReader:
    """The process, as seen from the test; see `reader`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def look(self, directory: Path, *, tensors_only: bool = False) -> Found:
        """What is in a directory, if it exists; `tensors_only`: there are no objects, and the common state is empty."""
        self.ask(directory, tensors_only=tensors_only)
        return self.answer()

    def ask(self, directory: Path, *, tensors_only: bool = False) -> None:
        """The first half of `look`, so that two readers can look at once."""
        self._connection.send((str(directory), tensors_only))

    def answer(self) -> Found:
        """The second half of `look`. Raises as that does."""
        assert self._connection.poll(_DEADLINE_S + 60), "the reader does not answer"
        told = json.loads(self._connection.recv())
        assert "died" not in told, f"the process that loads has ended: {told['died']}"
        return Found(**told)


@contextmanager
def reader(who: Who) -> Iterator[CheckpointReader]:
    """Start the process for the block."""
    here, there = Pipe()
    # The child imports the main module of this process, and would import this package with it.
    with mock.patch.dict(sys.modules, {"__main__": ModuleType("__main__")}):
        process = start_apart(_answer_all, who, there, preload=STOCK if who == "stock" else MEGATRON)
    there.close()
    try:
        yield CheckpointReader(here)
    finally:
        process.kill()
        process.join()
        process.close()
        here.close()


# --- in the process ---------------------------------------------------------------------------------------------------


def _seed_of(loaded: dict[str, Any]) -> int:
    import torch

    from tests.support.states import tensors

    for seed in _SEEDS:
        if all(torch.equal(loaded[key], value) for key, value in tensors(seed).items()):
            return seed if loaded.get("object", {"seed": seed})["seed"] == seed else MIX
    return MIX


def _look(who: Who, directory: str, tensors_only: bool) -> Found:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from megatron.core import dist_checkpointing

    from tests.support.states import sharded_state_dict, tensors

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    wanted = sharded_state_dict(0)
    del wanted["iteration"]
    if tensors_only:
        del wanted["object"]
    found: int | None = None
    common: int | None = None
    refused = ""
    try:
        if who == "stock":
            from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

            assert "mcore_ckpt" not in sys.modules
            loaded = dist_checkpointing.load(wanted, directory, TorchDistLoadShardedStrategy())
        else:
            loaded = dist_checkpointing.load(wanted, directory)
        found, common = _seed_of(loaded), loaded.get("iteration")
        if tensors_only:
            common = found
    except (Exception, dcp.CheckpointException) as error:  # noqa: BLE001  (stock raises what it comes across)
        refused = f"{type(error).__name__}: {error}"[:2000]
    plain: int | None = None
    plain_reader: Any = dcp.FileSystemReader
    if who == "ours":
        from mcore_ckpt.dcp.reader import FileSystemReader as plain_reader  # noqa: N813
    into = {key: torch.zeros_like(value) for key, value in tensors(1).items()}
    try:
        dcp.load(into, storage_reader=plain_reader(directory), no_dist=True)
        plain = _seed_of(into)
    except (Exception, dcp.CheckpointException):  # noqa: BLE001  (as above)
        plain = None
    assert who == "ours" or not any(name.partition(".")[0] == "mcore_ckpt" for name in sys.modules)
    return Found(found, common, plain, refused)


def _answer(who: Who, directory: str, tensors_only: bool) -> str:
    def told() -> str:
        found = _look(who, directory, tensors_only)
        return json.dumps({name: getattr(found, name) for name in Found.__slots__})

    try:
        return in_child(told, deadline_s=_DEADLINE_S)
    except AssertionError as error:
        return json.dumps({"died": str(error)})


def _answer_all(who: Who, questions: Connection) -> None:
    for name in [name for name in os.environ if name.startswith("MCORE_CKPT_")]:
        del os.environ[name]
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nothing:  # what stock logs of each load that it refuses
        for number in (1, 2):
            os.dup2(nothing.fileno(), number)
    if who == "ours":
        import mcore_ckpt

        mcore_ckpt.install()
    while True:
        questions.send(_answer(who, *questions.recv()))
