"""Real gloo ranks that stay, and are called again and again: for sweeps, where starting ranks would take all the time.

    with standing_ranks(2) as ranks:
        for path in paths:
            outcomes = ranks.call(save, path)       # save(rank, path), a module-level function
            assert all(outcome.ok for outcome in outcomes)

A call that raises is an outcome; the ranks stay. One that does not end is an error, with the stacks of who hangs, and
the end of the ranks. See `gloo_ranks`, which starts and ends them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any, Final

from tests.support.gloo_ranks import RankOutcome, rank_outcomes

__all__ = ["StandingRanks", "standing_ranks"]

_START_WITHIN_S: Final = 120.0
_STAY_FOR_S: Final = 7200.0


class StandingRanks:
    """Made by `standing_ranks`.

    Attributes:
        world_size: how many they are.
        ended: one has hung or died, and all have been killed.
    """

    def __init__(self, connections: list[Connection], pids: list[int], stacks: Path) -> None:
        self.world_size = len(connections)
        self.ended = False
        self._connections = connections
        self._pids = pids
        self._stacks = stacks

    def call(
        self, function: Callable[..., Any], *args: Any, within_s: float = 300.0, only: int | None = None
    ) -> list[RankOutcome]:
        """Call `function(rank, *args)` on every rank at once; what became of it, by rank.

        Args:
            function: a module-level function.
            args: can be pickled, as must be what it returns.
            within_s: a rank that takes longer hangs.
            only: the one rank to call; None: all.

        Raises:
            AssertionError: a rank hangs, or has died; the ranks are of no use any more.
        """
        payload = pickle.dumps((function, args, within_s))
        began_s = time.monotonic()
        called = range(self.world_size) if only is None else (only,)
        for rank in called:
            self._connections[rank].send_bytes(payload)
        outcomes: dict[int, RankOutcome] = {}
        while len(outcomes) < len(called):
            waiting = {self._connections[rank]: rank for rank in called if rank not in outcomes}
            left_s = began_s + within_s + 5.0 - time.monotonic()
            ready = wait(list(waiting), timeout=max(left_s, 0.0))
            if not ready:
                self._end()
                stacks = {rank: (self._stacks / str(rank)).read_text() for rank in waiting.values()}
                told = "\n".join(f"--- rank {rank}\n{stack}" for rank, stack in stacks.items())
                raise AssertionError(f"{function.__qualname__}: ranks {sorted(stacks)} hang for {within_s} s\n{told}")
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                try:
                    value, error, text = pickle.loads(self._connections[rank].recv_bytes())
                except (EOFError, OSError):
                    self._end()
                    raise AssertionError(f"{function.__qualname__}: rank {rank} has died") from None
                outcomes[rank] = RankOutcome(rank, value, error, text, seconds=time.monotonic() - began_s)
        return [outcomes[rank] for rank in called]

    def _end(self) -> None:
        self.ended = True
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


@contextmanager
def standing_ranks(
    world_size: int, *, environment: Mapping[str, str] | None = None, preload: Sequence[str] = ()
) -> Iterator[StandingRanks]:
    """Start ranks for the block.

    Args:
        world_size: how many.
        environment: variables to set on top of the caller's.
        preload: as for `rank_outcomes`.

    Raises:
        OSError: they do not start in time.
    """
    with tempfile.TemporaryDirectory(prefix="standing-ranks-") as scratch:
        key = os.urandom(16)
        with Listener(f"{scratch}/meeting", family="AF_UNIX", backlog=world_size, authkey=key) as listener:
            listener._listener._socket.settimeout(_START_WITHIN_S)  # type: ignore[attr-defined]
            thread = threading.Thread(
                target=rank_outcomes,
                args=(_serve, world_size, str(listener.address), key, scratch),
                kwargs={"deadline_s": _STAY_FOR_S, "environment": environment, "preload": preload},
                daemon=True,
            )
            thread.start()
            found: dict[int, tuple[Connection, int]] = {}
            while len(found) < world_size:
                connection = listener.accept()
                rank, pid = connection.recv()
                found[rank] = (connection, pid)
        connections = [found[rank][0] for rank in range(world_size)]
        try:
            yield StandingRanks(connections, [found[rank][1] for rank in range(world_size)], Path(scratch))
        finally:
            for connection in connections:
                connection.close()
            thread.join(60)


def _serve(rank: int, address: str, key: bytes, scratch: str) -> None:
    """A rank: does what it is told, until nobody tells it anything."""
    stacks = open(Path(scratch) / str(rank), "w")  # noqa: SIM115  (faulthandler writes to it until the end)
    with Client(address, family="AF_UNIX", authkey=key) as connection:
        connection.send((rank, os.getpid()))
        while True:
            try:
                payload = connection.recv_bytes()
            except (EOFError, OSError):
                return
            value, error, text = None, None, ""
            try:
                function, args, within_s = pickle.loads(payload)
                faulthandler.dump_traceback_later(within_s, file=stacks)
                value = function(rank, *args)
            except BaseException as caught:  # noqa: BLE001  (an outcome)
                error, text = caught, traceback.format_exc()
            finally:
                faulthandler.cancel_dump_traceback_later()
            try:
                report = pickle.dumps((value, error, text))
                pickle.loads(report)
            except Exception:  # noqa: BLE001  (an exception with a constructor of its own may not unpickle)
                report = pickle.dumps((None, None, text or "the result cannot be pickled"))
            connection.send_bytes(report)
