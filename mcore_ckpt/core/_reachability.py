"""Which ranks of a job can still be reached: asked when an exchange has failed, since gloo knows addresses only.

Each rank opens a port, and leaves it in the store through which the job has met, with the name of its host. Nobody
accepts a connection there: the kernel does so as long as the process exists. So a rank that has lost contact can tell a
process that has ended (its host refuses) from a host that is down or cut off (nothing answers), without any thread,
and without any exchange before something has failed.

A process that is stopped, or hangs, answers like any other. So each rank that has waited in vain leaves word of that in
the store. The rank that was waited for leaves none.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import selectors
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from mcore_ckpt.core.process import host_identity

# Longer than the three attempts of the kernel to find a host of the own network.
_ANSWERS_S: Final = 4.0
# A process that is ending may have closed its connections and still listen.
_ENDS_S: Final = 2.0
_AGAIN_S: Final = 0.25
# All ranks may ask at once, and none of their connections is ever accepted.
_WAITING: Final = 4096
_NAMED: Final = 16
_KEY: Final = "mcore_ckpt/reached_at/"
_WAITED: Final = "mcore_ckpt/waited_for/"
# Ranks come to an exchange one after the other, and so do the ends of their patience.
_LEAVE_WORD_S: Final = 10.0
_ENDED: Final = "ended"
_UNREACHABLE: Final = "cannot be reached: the host is down or cut off"

# The port of this process; closed in its forks, which may outlive it.
_listener: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class _Reached:
    """Where a rank is reached."""

    host: str
    pid: int
    address: str
    port: int
    identity: str  # of `host_identity`

    @property
    def is_local(self) -> bool:
        return self.address.startswith("127.") or self.address == "::1"


def announce(store: Any, rank: int) -> None:
    """Leave in the store where this process is reached. A store that is no `TCPStore` has no address: nothing then."""
    met = _met_at(store)
    if met is None:
        return
    with contextlib.suppress(OSError):  # without a port, or a way to it, this rank cannot be asked for
        here = _Reached(platform.node(), os.getpid(), _own_address(met), _port(), host_identity())
        store.set(f"{_KEY}{rank}", json.dumps(asdict(here)))


def has_contact(store: Any, rank: int) -> None:
    """An exchange has succeeded after one that has not: the word of that counts no more."""
    with contextlib.suppress(RuntimeError, ValueError):
        store.delete_key(f"{_WAITED}{rank}")


def who_is_missing(store: Any, rank: int, ranks: Iterable[int]) -> str:
    """Which of these ranks do not answer, in words for a message: "rank 2 (process 71 on host h1) ended". `rank` is
    this one, which has waited in vain.

    Takes seconds. Empty if that cannot be told; never raises.
    """
    met = _met_at(store)
    if met is None:
        return ""
    problem: Exception | None = None
    for _ in range(2):
        if silence := _dial({0: met}, _ANSWERS_S):
            return f"the store at {met[0]}:{met[1]}, through which the ranks have met, {silence[0]}"
        try:
            store.set(f"{_WAITED}{rank}", "")
            return _who(store, sorted(ranks))
        except Exception as error:  # noqa: BLE001  (a store raises what it likes, and there is an error to be raised)
            problem = error  # perhaps the store was just ending
            time.sleep(_ENDS_S)
    return f"which one could not be found out ({problem})"


def _who(store: Any, ranks: list[int]) -> str:
    silent = [rank for rank in ranks if not store.check([f"{_KEY}{rank}"])]
    known = {rank: _Reached(**json.loads(store.get(f"{_KEY}{rank}"))) for rank in ranks if rank not in silent}
    missing = _missing(known) or _stopped(known)
    if not missing and not silent:
        missing = _without_word(store, list(known))
    said = [_of_host(missing, known, why, host) for why, host in sorted(_groups(missing, known))]
    if silent:
        said.append(f"{_listed(silent)} took part in no save or load before")
    return "; ".join(said) or "all ranks have lost contact"


def _stopped(known: Mapping[int, _Reached]) -> dict[int, str]:
    """The ranks on this host that have been stopped."""
    here = host_identity()
    found = {}
    for rank, it in known.items():
        with contextlib.suppress(OSError):
            # The name of the program, in brackets, may contain anything.
            if it.identity == here and Path(f"/proc/{it.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt":
                found[rank] = "is stopped (SIGSTOP, or a debugger)"
    return found


def _without_word(store: Any, ranks: list[int]) -> dict[int, str]:
    """The ranks that have waited for nobody."""
    until_s = time.monotonic() + _LEAVE_WORD_S
    while late := [rank for rank in ranks if not store.check([f"{_WAITED}{rank}"])]:
        if time.monotonic() >= until_s:
            break
        time.sleep(_AGAIN_S)
    return dict.fromkeys(late, f"has not waited within {_LEAVE_WORD_S:.0f} s: it hangs, or is in another call")


def _missing(known: Mapping[int, _Reached]) -> dict[int, str]:
    """Why each rank that is missing is; those on loopback addresses of other hosts cannot be asked for."""
    here = platform.node()
    doors = {rank: (it.address, it.port) for rank, it in known.items() if not it.is_local or it.host == here}
    until_s = time.monotonic() + _ENDS_S
    while True:
        missing = _dial(doors, _ANSWERS_S)
        if missing or time.monotonic() >= until_s:
            return missing
        time.sleep(_AGAIN_S)


def _groups(missing: Mapping[int, str], known: Mapping[int, _Reached]) -> set[tuple[str, str]]:
    return {(why, known[rank].host) for rank, why in missing.items()}


def _of_host(missing: Mapping[int, str], known: Mapping[int, _Reached], why: str, host: str) -> str:
    ranks = [rank for rank, reason in missing.items() if reason == why and known[rank].host == host]
    processes = ", ".join(str(known[rank].pid) for rank in ranks[:_NAMED])
    return f"{_listed(ranks)} ({'process' if len(ranks) == 1 else 'processes'} {processes} on host {host}) {why}"


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_NAMED])) + (f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _met_at(store: Any) -> tuple[str, int] | None:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return (host, port) if isinstance(host, str) and isinstance(port, int) and port > 0 else None


def _own_address(met: tuple[str, int]) -> str:
    """By which address this host goes to where the ranks have met: others can be expected to come by it."""
    family, kind, protocol, _, address = socket.getaddrinfo(*met, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # of datagrams: nothing is sent
        return str(probe.getsockname()[0])


def _port() -> int:
    global _listener
    if _listener is None:
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        opened = socket.create_server(
            ("", 0), family=family, backlog=_WAITING, dualstack_ipv6=family == socket.AF_INET6
        )
        port = opened.getsockname()[1]
        _listener = (opened.detach(), port)
    return _listener[1]


def _close_in_fork() -> None:
    global _listener
    if _listener is not None:
        os.close(_listener[0])
        _listener = None


os.register_at_fork(after_in_child=_close_in_fork)


def _dial(doors: Mapping[int, tuple[str, int]], wait_s: float) -> dict[int, str]:
    """Which of these do not answer, and why; all are asked at once."""
    found: dict[int, str] = {}
    with contextlib.ExitStack() as opened, selectors.DefaultSelector() as selector:
        for number, (host, port) in doors.items():
            try:
                family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
                dialled = opened.enter_context(socket.socket(family, kind, protocol))
                dialled.setblocking(False)
                code = dialled.connect_ex(address)
            except OSError as error:
                found[number] = f"{_UNREACHABLE} ({error})"
                continue
            if code == errno.EINPROGRESS:
                selector.register(dialled, selectors.EVENT_WRITE, number)
            elif code:
                found[number] = _why(code)
        until_s = time.monotonic() + wait_s
        while selector.get_map() and (left_s := until_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                selector.unregister(key.fileobj)
                assert isinstance(key.fileobj, socket.socket)
                if code := key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    found[key.data] = _why(code)
        found.update({key.data: _UNREACHABLE for key in selector.get_map().values()})
    return found


def _why(code: int) -> str:
    return _ENDED if code == errno.ECONNREFUSED else _UNREACHABLE
