"""A network between clients and a server: each byte arrives later, and no more than so many in a second.

    python -m benchmarks.network PORT --latency-ms 10 --mb-s 100        prints the port where it listens

A relay of TCP, so it knows no requests: what a client sends arrives half of the latency later, and so do answers; all
connections share the bandwidth of each direction. The kernel's own (`tc netem`) needs a module that many machines lack.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import sys
import threading
import time
from collections import deque

_PIECE_BYTES = 256 * 1024
# What is on its way in one direction of a connection: at 50 ms that does not hold back 160 MB/s.
_MOST_BYTES = 4 * 1024 * 1024
_LISTEN = 128


class _Direction:
    """What all connections share."""

    def __init__(self, delay_s: float, bytes_per_s: float) -> None:
        self._delay_s = delay_s
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def arrives_at_s(self, nbytes: int) -> float:
        """When bytes that were sent now are there."""
        now_s = time.monotonic()
        if not self._bytes_per_s:
            return now_s + self._delay_s
        with self._lock:
            self._free_at_s = max(self._free_at_s, now_s) + nbytes / self._bytes_per_s
            return self._free_at_s + self._delay_s


class _Relay:
    """One direction of one connection, on two threads."""

    def __init__(self, source: socket.socket, target: socket.socket, direction: _Direction) -> None:
        self._source = source
        self._target = target
        self._direction = direction
        self._changed = threading.Condition()
        self._sent: deque[tuple[float, bytes]] = deque()
        self._held_bytes = 0
        for work in (self._receive, self._deliver):
            threading.Thread(target=work, daemon=True).start()

    def _receive(self) -> None:
        while True:
            try:
                content = self._source.recv(_PIECE_BYTES)
            except OSError:
                content = b""
            with self._changed:
                self._changed.wait_for(lambda: self._held_bytes < _MOST_BYTES)
                self._held_bytes += len(content)
                self._sent.append((self._direction.arrives_at_s(len(content)), content))
                self._changed.notify_all()
            if not content:
                return

    def _deliver(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._sent))
                arrives_at_s, content = self._sent.popleft()
            time.sleep(max(0.0, arrives_at_s - time.monotonic()))
            try:
                if not content:
                    self._target.shutdown(socket.SHUT_WR)
                    return
                self._target.sendall(content)
            except OSError:
                for end in (self._source, self._target):
                    with contextlib.suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)
                with self._changed:
                    self._held_bytes = 0
                    self._changed.notify_all()
                return
            with self._changed:
                self._held_bytes -= len(content)
                self._changed.notify_all()


def main() -> None:
    """Relay until killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int, help="of the server, on this machine")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="of a request and its answer together")
    parser.add_argument("--mb-s", type=float, default=0.0, help="1e6 bytes a second in each direction; 0: no limit")
    arguments = parser.parse_args()
    there, back = (_Direction(arguments.latency_ms / 2000, arguments.mb_s * 1e6) for _ in range(2))
    with socket.create_server(("127.0.0.1", 0), backlog=_LISTEN) as listener:
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        while True:
            client, _ = listener.accept()
            try:
                server = socket.create_connection(("127.0.0.1", arguments.port))
            except OSError:
                client.close()
                continue
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _Relay(client, server, there)
            _Relay(server, client, back)


if __name__ == "__main__":
    main()
