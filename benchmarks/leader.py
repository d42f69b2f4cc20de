"""One process for each interpreter of a benchmark: it forks the ranks, and passes calls on to them.

    python -m benchmarks.leader FD [MODULE ...]      by `benchmarks.groups`; FD is one end of a pair of sockets

Ranks are forked from a server that has imported torch and the modules, so that fresh ranks cost a fraction of a second.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

from benchmarks import work
from tests.support.gloo_ranks import StandingRanks, standing_ranks

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


class _Leader:
    def __init__(self) -> None:
        self._groups: dict[int, tuple[StandingRanks, ExitStack]] = {}
        self._next = 0

    def describe(self) -> dict[str, Any]:
        """What the interpreter has."""
        return work.describe()

    def open(self, world: int) -> int:
        """Start ranks; the number of their group."""
        stack = ExitStack()
        self._next += 1
        ranks = stack.enter_context(standing_ranks(world, preload=sys.argv[2:], is_measured=True))
        self._groups[self._next] = (ranks, stack)
        return self._next

    def call(self, group: int, within_s: float, name: str, *args: Any) -> Any:
        """Call a function of `benchmarks.work` on all ranks of a group; what rank 0 returned."""
        outcomes = self._groups[group][0].call(work.call, name, *args, within_s=within_s)
        failed = next((outcome for outcome in outcomes if not outcome.ok), None)
        if failed:
            raise RuntimeError(f"rank {failed.rank}: {failed.error_text}")
        return outcomes[0].value

    def close(self, group: int) -> None:
        """End the ranks of a group."""
        self._groups.pop(group)[1].close()


def main() -> None:
    """Do what the other end asks for, until it is closed. Ends with the process that has started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Some baselines keep descriptors for each tensor.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    leader = _Leader()
    with Connection(int(sys.argv[1])) as connection:
        while True:
            try:
                name, args = connection.recv()
            except EOFError:
                break
            try:
                connection.send((True, getattr(leader, name)(*args)))
            except Exception as problem:  # noqa: BLE001  (reported to whoever asked)
                connection.send((False, str(problem)))
    sys.stdout.flush()
    os._exit(0)  # groups that are still open end with this process


if __name__ == "__main__":
    main()
