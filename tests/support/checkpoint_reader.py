"""A process that loads checkpoints, by this package or by stock Megatron-Core and stock DCP, and says what they hold.

    with reader("stock") as stock:
        found = stock.look(path)             # a checkpoint of `seeded_state`
        assert found.whole == 2

Stock is asked in a process into which this package was never imported. Each look is a child of it with a gloo world of
its own, so that nothing is remembered from the last one, and has a deadline.

    python -m tests.support.checkpoint_reader stock|ours        # what the process runs
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from tests.support.processes import in_child

Who = Literal["ours", "stock"]
REPOSITORY: Final = Path(__file__).resolve().parents[2]
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

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def look(self, directory: Path, *, tensors_only: bool = False) -> Found:
        """What is in a directory, if it exists; `tensors_only`: there are no objects, and the common state is empty."""
        self.ask(directory, tensors_only=tensors_only)
        return self.answer()

    def ask(self, directory: Path, *, tensors_only: bool = False) -> None:
        """The first half of `look`, so that two readers can look at once."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(directory), tensors_only]) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Found:
        """The second half of `look`. Raises as that does."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _DEADLINE_S + 60)
        answer = self._process.stdout.readline() if ready else ""
        assert answer, f"the reader {'has ended' if ready else 'does not answer'}"
        told = json.loads(answer)
        assert "died" not in told, f"the process that loads has ended: {told['died']}"
        return Found(**told)


@contextmanager
def reader(who: Who) -> Iterator[CheckpointReader]:
    """Start the process for the block."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.support.checkpoint_reader", who],
        cwd=REPOSITORY,
        env={name: value for name, value in environment.items() if not name.startswith("MCORE_CKPT_")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # what stock logs of each load that it refuses
        text=True,
    ) as process:
        try:
            yield CheckpointReader(process)
        finally:
            process.kill()  # it holds nothing, and tearing torch down takes seconds


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
    """The answer, from a child."""

    def told() -> str:
        os.dup2(2, 1)  # what Megatron prints is no answer
        found = _look(who, directory, tensors_only)
        return json.dumps({name: getattr(found, name) for name in Found.__slots__})

    try:
        return in_child(told, deadline_s=_DEADLINE_S)
    except AssertionError as error:
        return json.dumps({"died": str(error)})


def _main(who: Who) -> None:
    import megatron.core.dist_checkpointing.strategies.torch  # noqa: F401  (once, for all children)

    import tests.support.states  # noqa: F401

    if who == "ours":
        import mcore_ckpt

        mcore_ckpt.install()
    for line in sys.stdin:
        directory, tensors_only = json.loads(line)
        print(_answer(who, directory, tensors_only), flush=True)


if __name__ == "__main__":
    _main("stock" if sys.argv[1] == "stock" else "ours")
