"""The queue of async saves, in order: the calls that have ended or failed, and the callbacks that may run.

A request pairs work that runs during training with callbacks that make it count: publish the checkpoint, advance the
tracker file, delete the previous checkpoint. The rule here is that callbacks run only if the work is done well on
every rank. If it failed anywhere, or was skipped, then none of them runs on any rank; the failure is raised (or
warned about) once, on all ranks, when the request is finalized.

A save of this package comes as a `SaveTransaction`: its job has been started already, and the queue only watches that.
Any other request is a third-party function (a flush of logits, a local checkpoint, another format). It runs in a
process apart from the byte writer, so that neither can harm the other.

Ranks agree in small gloo collectives on the caller's thread; nothing is put on a device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import CheckpointError, SaveError, describe, remote_cause
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.core.process import Outcome
from mcore_ckpt.core.ranks import (
    RankGroup,
    coordination_group,
    reached_every_rank,
    was_interrupted,
    without_modes,
)
from mcore_ckpt.save.jobs import Job
from mcore_ckpt.save.transaction import SaveTransaction
from mcore_ckpt.save.writer_process import shared_writer


class AsyncRequest(NamedTuple):
    """Work to run during training and what to do afterwards; field for field Megatron's class of that name."""

    async_fn: Callable[..., Any] | None  # the work; None for a request that has callbacks only
    async_fn_args: tuple[Any, ...]  # positional arguments for it
    finalize_fns: list[Callable[..., Any]]  # called in order, on the trainer, once the work is done on all ranks
    async_fn_kwargs: dict[str, Any] = {}  # keyword arguments for `async_fn`
    # Makes what `async_fn` gets as its second positional argument (the staged tensors).
    preload_fn: Callable[..., Any] | None = None
    is_frozen: bool = False  # no more callbacks may be added
    call_idx: int = 0  # number given by the queue

    def add_finalize_fn(self, fn: Callable[..., Any]) -> None:
        """Add a callback behind those that are there. Raises `RuntimeError` once the request is frozen."""
        if self.is_frozen:
            raise RuntimeError("the request has been scheduled: no more finalize functions can be added")
        self.finalize_fns.append(fn)

    @without_modes()
    def execute_sync(self) -> None:
        """Do the work here and now, then, when all ranks have done so, run the callbacks. Raises `SaveError` if work or
        a callback failed on some rank. With one rank only, what was raised comes as it is.
        """
        group = coordination_group()
        if group.size == 1:
            self._work()
            for fn in self.finalize_fns:
                fn()
            return
        outcome = Outcome.of(self._work)
        if group.any("end the work of an async request", outcome.error is not None, wrap=SaveError):
            group.run("do the work of an async request", outcome.value, wrap=SaveError)
        _run_callbacks(group, self.finalize_fns, "an async request")

    def _work(self) -> None:
        if self.async_fn is not None:
            self.async_fn(*staged_arguments(self), **(self.async_fn_kwargs or {}))

    def freeze(self) -> AsyncRequest:
        """This request, closed for further callbacks."""
        return self._replace(is_frozen=True)


def staged_arguments(request: Any) -> tuple[Any, ...]:
    """Positional arguments of a request's work, staged by its `preload_fn` if it has one."""
    arguments = list(request.async_fn_args)
    if request.preload_fn is not None:
        arguments[1] = request.preload_fn()
    return tuple(arguments)


_logger = logger_of("mcore_ckpt")

# While a caller waits, the ranks compare notes this often: a failure anywhere ends the wait everywhere that soon, and
# no collective waits so long for a slow writer that gloo gives up.
_COMPARE_EVERY_S = 1.0


# What the queue uses of a request of any class.
_FIELDS_USED = (*AsyncRequest._fields[:5], "freeze")


class _ActiveCall(NamedTuple):
    idx: int
    job: Job
    async_request: Any

    @property
    def saves(self) -> list[SaveTransaction]:
        """The saves of ours that the callbacks commit. Megatron may move callbacks to the request that follows."""
        found = [self.async_request.async_fn] if isinstance(self.async_request.async_fn, SaveTransaction) else []
        for fn in self.async_request.finalize_fns:
            save = _committed_by(fn)
            if save is not None and save not in found:
                found.append(save)
        return found

    @property
    def jobs(self) -> list[Job]:
        """All that has to be done before the callbacks may run."""
        return [self.job, *(save.job for save in self.saves if save.job is not self.job)]

    def has_ended(self) -> bool:
        """Whether this rank's part has ended well, or some of it has failed. Returns at once."""
        ended = [job.poll() for job in self.jobs]
        return all(ended) or any(job.error is not None for job in self.jobs)

    def wait(self, timeout_s: float) -> bool:
        """Whether this rank's part has ended well; waits for each job. Raises what a job has failed with."""
        for job in self.jobs:
            if not job.wait(timeout_s):
                return False
            job.result()
        return True

    def abort(self) -> None:
        """Stop this rank's part, and remove what it wrote."""
        saves = self.saves
        others = [job for job in self.jobs if job not in [save.job for save in saves]]
        for abort in [*(save.abort for save in saves), *(job.abort for job in others)]:
            try:
                abort()
            except Exception:
                _logger.exception("could not clean up after %s", self.what)

    @property
    def what(self) -> str:
        saves = self.saves
        name = getattr(self.async_request.async_fn, "__qualname__", None)
        return saves[0].what if saves else f"async request {self.idx}" + (f" ({name})" if name else "")


class AsyncCallsQueue:
    """Requests in flight, oldest first. Every rank makes the same calls in the same order, as with Megatron's queue.

    Attributes:
        async_calls: requests that are not finalized yet.
        call_idx: number of the last request.
        persistent, persistent_caller: for the sake of Megatron's; every function of others runs in a forked child.
        failures: what requests have failed with, the same on every rank; their callbacks were not run. Of those that
            were warned of, tracebacks are text, under `__cause__`.
        skipped: how many saves were skipped; nor were theirs.
    """

    def __init__(
        self, persistent: bool = False, cpu_shm_mode: bool | None = None, *, options: SaveOptions | None = None
    ) -> None:
        """Make an empty queue; no process is started.

        Args:
            persistent: accepted for Megatron's sake. Saves are written by whichever writer their options name.
            cpu_shm_mode: accepted since newer training code passes it; staging buffers are in shared memory always.
            options: `on_failure` matters here, for requests that do not bring their own.
        """
        self.async_calls: deque[_ActiveCall] = deque()
        self.call_idx = -1
        self.persistent = persistent
        self.persistent_caller = None
        self.failures: list[BaseException] = []
        self.skipped = 0
        self._options = options if options is not None else SaveOptions.from_environment()
        self._reported: list[SaveTransaction] = []

    @classmethod
    def warmup_persistent_caller(
        cls,
        rank: int = 0,
        mp_mode: str = "spawn",
        cpu_priority: int | None = 10,
        io_priority: int | None = None,
        cpu_shm_mode: bool = False,
        **others: Any,
    ) -> None:
        """Start the byte writer ahead of the first save.

        Args:
            rank: this rank; not needed.
            mp_mode: how Megatron would start its worker; ours is a bare interpreter always.
            cpu_priority: nice value of the writer.
            io_priority: its I/O scheduling class (1 real time, 2 best effort, 3 idle).
            cpu_shm_mode: accepted by name, since newer training code looks for it in the signature; staging buffers are
                in shared memory always.
            others: what other implementations take here.
        """
        writer = shared_writer()
        writer.cpu_priority, writer.io_priority = cpu_priority, io_priority
        writer.warm_up(wait=False)

    @without_modes()
    def schedule_async_request(self, async_request: Any) -> int:
        """Start a request's work (a `SaveTransaction` has been started already) and put it into the queue.

        Never raises because the work cannot be started: the other ranks are notified when the request is finalized.

        Args:
            async_request: ours, Megatron's, or that of nvidia-resiliency-ext.

        Returns:
            The request's number.

        Raises:
            SaveError: it is no such request; every rank should then say so, since the queue would wait for nothing.
        """
        if lacking := [name for name in _FIELDS_USED if not hasattr(async_request, name)]:
            cls = type(async_request)
            raise SaveError(
                f"expected an AsyncRequest of mcore_ckpt, Megatron or nvidia-resiliency-ext, got "
                f"{cls.__module__}.{cls.__qualname__}, which has no {', '.join(lacking)}"
            )
        self.call_idx += 1
        request = async_request.freeze()
        if request.async_fn is None:
            job = Job("a request without work")
        elif isinstance(request.async_fn, SaveTransaction):
            job = request.async_fn.job
        else:
            try:
                from mcore_ckpt.save.forked_child import fork_call  # (only requests of others need it)

                name = getattr(request.async_fn, "__qualname__", repr(request.async_fn))
                keywords = dict(request.async_fn_kwargs or {})
                job = fork_call(request.async_fn, staged_arguments(request), keywords, what=name)
            except Exception as error:  # noqa: BLE001  (a preload function may raise anything; raised at finalization)
                job = Job("a request that could not be started", error=error)
        self.async_calls.append(_ActiveCall(self.call_idx, job, request))
        return self.call_idx

    @without_modes()
    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Finalize the requests whose work is done on all ranks, oldest first.

        Args:
            blocking: wait for all requests.
            no_dist: while this rank's own work goes on, return without asking the others. Once it has ended, well or
                not, this rank waits for the others to come here with theirs, since all commit a request or none: a
                rank that ran callbacks alone would wait in them for a rank that has failed.

        Returns:
            Numbers of the requests that were finalized; not of those that failed or were skipped.

        Raises:
            CheckpointError: a request failed on some rank and `on_failure` is `"raise"`; the same error on every rank.
                The request is out of the queue, those behind it are still there.
            KeyboardInterrupt, SystemExit: this rank was interrupted. While it waited for its work, all the others raise
                `SaveError`, whatever `on_failure` says; within an exchange, once this process is gone.
        """
        finalized: list[int] = []
        while self.async_calls:
            active = self.async_calls[0]
            if no_dist and not blocking and not active.has_ended():
                break
            group = coordination_group()
            if any(save in self._reported for save in active.saves):
                _logger.warning("%s failed before: the callbacks of request %d are not run", active.what, active.idx)
                self.async_calls.popleft().abort()
                continue
            try:
                asked = time.monotonic()
                outcome = self._outcome(group, active, blocking)
                for save in active.saves:
                    save.waited_s += time.monotonic() - asked
                if outcome == "running":
                    break
                if outcome == "skipped":
                    self.async_calls.popleft()
                    self.skipped += 1
                    _logger.warning("%s was skipped: its finalize callbacks are not run", active.what)
                    continue
                self.async_calls.popleft()  # whatever comes of it, callbacks are not run twice
                _run_callbacks(group, active.async_request.finalize_fns, active.what)
            except BaseException as error:
                if group.size > 1 and not reached_every_rank(error):
                    raise  # not agreed upon: contact with another rank is lost, or the ranks disagree
                self._fail(active, error)
                continue
            finalized.append(active.idx)
        return finalized

    def _outcome(self, group: RankGroup, active: _ActiveCall, blocking: bool) -> Literal["running", "skipped", "done"]:
        """What became of a request's work, on all ranks. A failure anywhere is raised everywhere, at once."""
        skipped = any(save.skipped for save in active.saves)
        while True:
            error: BaseException | None = None
            running = False
            try:
                running = not (skipped or active.wait(_COMPARE_EVERY_S if blocking else 0))
            except BaseException as caught:  # noqa: BLE001  (the other ranks are notified of any error)
                error = caught
            any_running, any_failed, any_skipped, last, minus_first = group.maximum(
                "finalize async saves",
                [int(running), int(error is not None), int(skipped), active.idx, -active.idx],
                wrap=SaveError,
            )
            if last != -minus_first:
                raise SaveError(
                    f"the ranks are finalizing different async requests, from number {-minus_first} to {last}, this "
                    f"one number {active.idx}: every rank must schedule and finalize the same requests in order"
                )
            if any_failed:
                group.run(f"write {active.what}", Outcome(error=error).value, wrap=SaveError, name="write")
            if any_skipped:
                return "skipped"
            if not any_running:
                return "done"
            if not blocking:
                return "running"

    def _fail(self, active: _ActiveCall, error: BaseException) -> None:
        """Take a request that failed on some rank out of the queue, and raise or warn."""
        if self.async_calls and self.async_calls[0] is active:
            self.async_calls.popleft()
        active.abort()
        self.failures.append(error)
        # Only requests that are still queued can bring the same save up again.
        queued = [save for call in self.async_calls for save in call.saves]
        self._reported = [save for save in (*self._reported, *active.saves) if save in queued]
        if was_interrupted(error):
            raise error  # no failure to be warned of: a rank was told to end, and is not going to be there for the next
        policy = next((save.on_failure for save in active.saves), self._options.on_failure)
        if policy == "raise":
            raise error
        # Text in the place of frames, which hold what was to be saved.
        error.__cause__, error.__context__ = remote_cause(describe(error)), None
        error.__traceback__ = None
        _logger.error(
            "%s failed (failure %d of this queue) and training goes on, as on_failure='warn' asks: %s",
            active.what,
            len(self.failures),
            error,
        )

    def get_num_unfinalized_calls(self) -> int:
        """How many requests are in the queue."""
        return len(self.async_calls)

    def close(self, abort: bool = False) -> None:
        """Empty the queue; it can be used again afterwards.

        Args:
            abort: stop the work and run no callbacks, without talking to other ranks (they may be gone); otherwise
                wait for all requests and finalize them.

        Raises:
            CheckpointError: as `maybe_finalize_async_calls`; the first failure, after all requests were dealt with.
        """
        first: BaseException | None = None
        while self.async_calls and not abort:
            before = len(self.async_calls)
            try:
                self.maybe_finalize_async_calls(blocking=True)
            except BaseException as error:
                if isinstance(error, Exception) and not isinstance(error, CheckpointError):
                    raise
                first = first or error
                # No way to agree with the other ranks any more, or not with the one that was interrupted.
                abort = len(self.async_calls) == before or was_interrupted(error)
        while self.async_calls:
            active = self.async_calls.popleft()
            _logger.warning("%s is aborted: its finalize callbacks are not run", active.what)
            active.abort()
        self._reported.clear()
        if first is not None:
            raise first


def _committed_by(fn: Any) -> SaveTransaction | None:
    """The save that a callback commits; None for a third-party callback."""
    for owner in (fn, getattr(fn, "__self__", None)):
        save = owner if isinstance(owner, SaveTransaction) else getattr(owner, "save_call", None)
        if isinstance(save, SaveTransaction):
            return save
    return None


def _run_callbacks(group: RankGroup, callbacks: Sequence[Callable[[], Any]], what: str) -> None:
    """Run the callbacks in order; if one fails on some rank, all ranks raise, and no save behind it is committed. Those
    of others may be there on one rank only. A commit takes all ranks, which compare notes before it.
    """
    outcome: Outcome[Any] = Outcome()
    for fn in callbacks:
        failed = outcome.error is not None
        if _committed_by(fn) is not None and group.any("run the finalize functions", failed, wrap=SaveError):
            break
        if not failed:
            outcome = Outcome.of(fn)
    group.run(f"finalize {what}", Outcome(error=outcome.error).value, wrap=SaveError, name="finalize")
