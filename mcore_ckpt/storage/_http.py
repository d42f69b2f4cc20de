"""HTTP/1.1 to one server, with a time limit for everything: connections that are kept, bodies straight from memory.

Only the standard library, because these connections must survive a fork (a child makes its own), and one that is late
must be cut off by another thread at once. Clients built on an event loop of their own, as object_store's, hang in a
forked child.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import socket
import ssl
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from mcore_ckpt.storage._alarms import call_off, set_alarm
from mcore_ckpt.storage._object_client import RequestError, patience

_SLICE_BYTES: Final = 1024 * 1024
_PER_ATTEMPT_BYTES: Final = 8 * 1024 * 1024
# Of what is neither the body of a range nor a listing; an error's text is short.
_MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024
# Servers close what is idle for longer; a request on such a connection fails and is sent again.
_KEPT_S: Final = 20.0


Body = memoryview | bytes | tuple[memoryview | bytes, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server has answered. The body is empty where it was received into the caller's memory."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def header(self, name: str) -> str:
        """A header's value, or nothing."""
        return self.headers.get(name, "")


class Cut:
    """Cuts a request off from another thread, at once, wherever it is: its memory is not touched any more then."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: http.client.HTTPConnection | None = None
        self.is_cut = False

    def watch(self, connection: http.client.HTTPConnection) -> None:
        """The request goes over that connection from now on."""
        with self._lock:
            self._connection = connection
            if self.is_cut:
                raise RequestError(errno.ECANCELED, "was cut off")

    def watch_nothing(self) -> None:
        """The request has ended."""
        with self._lock:
            self._connection = None

    def __call__(self) -> None:
        with self._lock:
            self.is_cut = True
            sock = None if self._connection is None else self._connection.sock
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)


class HttpServer:
    """Connections to one server, for any number of threads.

    Args:
        url: scheme, host and port.
        verify: compare the server's certificate with those of the system, or with the file of that path.
    """

    def __init__(self, url: str, verify: bool | str = True) -> None:
        parts = urlsplit(url)
        self.netloc = parts.netloc
        self._host, self._port = parts.hostname or "", parts.port
        self._context: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._context = ssl.create_default_context(cafile=verify if isinstance(verify, str) else None)
            if verify is False:
                self._context.check_hostname = False
                self._context.verify_mode = ssl.CERT_NONE
        self._pid = os.getpid()
        self._keep_none()

    def _keep_none(self) -> None:
        self._kept: deque[tuple[http.client.HTTPConnection, float]] = deque()
        weakref.finalize(self, _close_all, self._kept)

    def _connection(self) -> http.client.HTTPConnection:
        if self._pid != os.getpid():  # the parent's, which it goes on to use
            self._pid = os.getpid()
            self._keep_none()
        while self._kept:
            try:
                connection, until_s = self._kept.pop()
            except IndexError:
                break
            if time.monotonic() < until_s:
                return connection
            connection.close()
        connect_s = patience().connect_s
        if self._context is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=connect_s)
        return http.client.HTTPSConnection(self._host, self._port, timeout=connect_s, context=self._context)

    def request(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: Body = b"",
        into: memoryview | None = None,
        cut: Cut | None = None,
    ) -> Answer:
        """One attempt at a request.

        Args:
            method: GET, PUT, and so on.
            target: path and query, quoted.
            headers: of the request; `Host` and `Content-Length` are added.
            body: to send; of several pieces, one after the other.
            into: memory for the body of an answer of status 206 or 200, which must fill it.
            cut: by which another thread can end it.

        Raises:
            RequestError: no complete answer has come.
        """
        limits = patience()
        pieces = body if isinstance(body, tuple) else (body,)
        body_bytes = sum(map(len, pieces))
        payload_bytes = body_bytes + (0 if into is None else len(into))
        most_s = min(limits.give_up_s, limits.attempt_s * max(1.0, payload_bytes / _PER_ATTEMPT_BYTES))
        sent = False
        cut = cut or Cut()
        late = threading.Event()

        def cut_off() -> None:
            late.set()
            cut()

        # A server that sends a byte now and then is never idle; so what takes too long in all is ended.
        alarm = set_alarm(most_s, cut_off)
        connection: http.client.HTTPConnection | None = None
        try:
            connection = self._connection()
            if connection.sock is None:
                connection.connect()  # (which also sends small packets at once)
            cut.watch(connection)
            connection.sock.settimeout(limits.idle_s)
            connection.putrequest(method, target, skip_accept_encoding=True)
            for name, value in headers.items():
                try:
                    connection.putheader(name, value)
                except ValueError:  # its text shows the value
                    raise RequestError(errno.EINVAL, f"the value of {name} cannot stand in a request") from None
            connection.putheader("Content-Length", str(body_bytes))
            sent = True
            connection.endheaders()
            # Not by `sendall`, whose time limit is one for all bytes: here each must be taken within it.
            for piece in pieces:
                view = memoryview(piece)
                while len(view):
                    view = view[connection.sock.send(view[:_SLICE_BYTES]) :]
            response = connection.getresponse()
            answer = _receive(response, method, into)
            if late.is_set():  # an answer of unknown length ends where it is cut off
                raise _too_slow(most_s)
            if not response.will_close and not cut.is_cut:
                self._kept.append((connection, time.monotonic() + _KEPT_S))
                connection = None
            return answer
        except RequestError as error:
            if late.is_set():
                too_slow = _too_slow(most_s)
                too_slow.unclear = sent
                raise too_slow from error
            error.unclear = error.unclear or sent
            raise
        except TimeoutError as error:
            what = "no answer" if sent else "no connection"
            waited_s = limits.idle_s if sent else limits.connect_s
            raise RequestError(errno.ETIMEDOUT, f"{what} within {waited_s:.2g} s", again=True, unclear=sent) from error
        except ssl.SSLCertVerificationError as error:
            raise RequestError(errno.EREMOTEIO, f"the certificate is not trusted ({error.verify_message})") from error
        except (OSError, http.client.HTTPException) as error:
            if late.is_set():
                too_slow = _too_slow(most_s)
                too_slow.unclear = sent
                raise too_slow from error
            text = f"the connection failed ({type(error).__name__}: {error!s:.200})"
            raise RequestError(errno.EREMOTEIO, text, again=True, unclear=sent) from error
        finally:
            cut.watch_nothing()
            call_off(alarm)
            if connection is not None:
                connection.close()


def _close_all(kept: deque[tuple[http.client.HTTPConnection, float]]) -> None:
    while kept:
        kept.pop()[0].close()


def _receive(response: http.client.HTTPResponse, method: str, into: memoryview | None) -> Answer:
    if into is None or response.status not in (200, 206):
        parts, received = [], 0
        while part := response.read(_SLICE_BYTES):
            parts.append(part)
            received += len(part)
            if received > _MAX_ANSWER_BYTES:
                raise RequestError(errno.EREMOTEIO, f"the answer is longer than {_MAX_ANSWER_BYTES} bytes")
        if method != "HEAD" and response.length:
            raise RequestError(errno.EREMOTEIO, f"the answer ended {response.length} bytes early", again=True)
        return Answer(response.status, response.headers, b"".join(parts))
    if response.length is not None and response.length != len(into):
        text = f"{len(into)} bytes were asked for, and {response.length} are sent"
        raise RequestError(errno.EREMOTEIO, text, again=True)
    at = 0
    while at < len(into):
        count = response.readinto(into[at : at + _SLICE_BYTES])
        if not count:
            raise RequestError(errno.EREMOTEIO, f"the answer ended after {at} of {len(into)} bytes", again=True)
        at += count
    response.read(0)
    return Answer(response.status, response.headers, b"")


def _too_slow(most_s: float) -> RequestError:
    return RequestError(errno.ETIMEDOUT, f"too slow: not complete within {most_s:.2g} s", again=True)
