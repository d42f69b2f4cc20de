"""Megatron without asynchronous saves of its own, and the names of nvidia-resiliency-ext that it then imports."""

import signal
import textwrap
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import mcore_ckpt
from mcore_ckpt import AsyncCallsQueue, SaveError
from tests.support.gloo_ranks import rank_outcomes, run_ranks
from tests.support.next_megatron import load_what_was_saved, save_and_be_killed, without_own_async
from tests.support.processes import forked

megatron_core = pytest.importorskip("megatron.core", reason="what imports these names")

ASYNC = "nvidia_resiliency_ext.checkpointing.async_ckpt"
needs_own = pytest.mark.skipif(
    find_spec("nvidia_resiliency_ext") is not None, reason="nvidia-resiliency-ext is installed here"
)


@needs_own
@forked
def test_what_megatron_imports_of_it_is_supplied_and_taken_back() -> None:
    mcore_ckpt.install()
    core = import_module(f"{ASYNC}.core")
    assert core.AsyncCallsQueue is AsyncCallsQueue
    assert import_module(f"{ASYNC}.filesystem_async").FileSystemWriterAsync is mcore_ckpt.FileSystemWriterAsync
    assert find_spec("nvidia_resiliency_ext") is not None
    with pytest.raises(ModuleNotFoundError):
        import_module("nvidia_resiliency_ext.inprocess")
    mcore_ckpt.uninstall()
    with pytest.raises(ModuleNotFoundError):
        import_module("nvidia_resiliency_ext")


@needs_own
@forked
def test_one_that_is_installed_is_never_covered_and_its_queue_finishes_our_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / ASYNC.replace(".", "/")
    package.mkdir(parents=True)
    (tmp_path / "site/nvidia_resiliency_ext/__init__.py").write_text("__version__ = '0.7.0'\n")
    (package / "core.py").write_text(
        textwrap.dedent(
            """
            from mcore_ckpt.save.async_queue import AsyncRequest as _Like
            AsyncRequest = type("AsyncRequest", (_Like,), {})
            class AsyncCallsQueue:
                def __init__(self, persistent=False):
                    self.async_calls, self.call_idx, self.persistent, self.persistent_caller = [], -1, persistent, None
                def schedule_async_request(self, async_request): raise AssertionError("this worker drops the request")
                def maybe_finalize_async_calls(self, blocking=False, no_dist=False): return []
                def get_num_unfinalized_calls(self): return len(self.async_calls)
                def close(self, abort=False): pass
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    theirs = import_module(f"{ASYNC}.core").AsyncCallsQueue
    queue = theirs()
    mcore_ckpt.install()
    assert import_module(f"{ASYNC}.core").AsyncCallsQueue is theirs
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}
    target = tmp_path / "checkpoint"
    target.mkdir()
    request: Any = dist_checkpointing.save(
        state, str(target), mcore_ckpt.TorchDistSaveStrategy(), async_sharded_save=True
    )
    queue.schedule_async_request(request)
    assert queue.get_num_unfinalized_calls() == 1
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert (target / ".metadata").exists()
    queue.close()


def _ran(values: list[int], staged: list[int]) -> None:
    assert staged == [1, 2], "the preload function stands for the second argument"


def test_a_request_is_taken_by_its_fields_or_refused_by_its_class() -> None:
    class Request(NamedTuple):
        """As in Megatron and in nvidia-resiliency-ext."""

        async_fn: Any
        async_fn_args: tuple[Any, ...]
        finalize_fns: list[Any]
        async_fn_kwargs: dict[str, Any] = {}
        preload_fn: Any = None
        is_frozen: bool = False
        call_idx: int = 0

        def freeze(self) -> Any:
            return self._replace(is_frozen=True)

    queue, called = AsyncCallsQueue(), []
    for finalized in range(2):
        request = Request(_ran, ([], None), [lambda: called.append("done")], preload_fn=lambda: [1, 2])
        assert queue.schedule_async_request(request) == finalized
    with pytest.raises(
        SaveError, match=r"AsyncRequest of mcore_ckpt, Megatron or nvidia-resiliency-ext, got builtins\.dict"
    ):
        queue.schedule_async_request({"async_fn": None})
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1]
    assert called == ["done", "done"]
    queue.close()


@needs_own
def test_the_next_megatron_saves_asynchronously_is_killed_and_loads(tmp_path: Path) -> None:
    """On the installed megatron-core without its modules for asynchronous saves."""
    if (megatron_core.package_info.MAJOR, megatron_core.package_info.MINOR) < (0, 19):
        pytest.skip("the next Megatron is made from 0.19 or later")
    tree = without_own_async(Path(megatron_core.__path__[0]).parents[1], tmp_path / "tree")
    (ended,) = rank_outcomes(save_and_be_killed, 1, tree, tmp_path / "run")
    assert ended.exit_code == -signal.SIGKILL, ended.error_text
    assert run_ranks(load_what_was_saved, 1, tree, tmp_path / "run") == [[1, 2]]
