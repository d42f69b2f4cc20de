"""An S3 server for tests, in a process of its own, and a proxy in front of it that does what networks and stores do.

moto_server()   moto's server, which makes one change at a time; yields its URL
Proxy(url)      passes requests on to a server, counts them, and lets some go wrong
"""

import contextlib
import ctypes
import http.client
import io
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

from mcore_ckpt.storage._store_urls import _clients

_STARTS_WITHIN_S = 60.0
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def s3_environment(url: str) -> dict[str, str]:
    """Variables by which S3 is that server."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test-key",
        "AWS_SECRET_ACCESS_KEY": "test-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def free_port() -> int:
    """A port that nothing listens on, and that Linux gives to nobody who asks for any: others might get it."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def _end_with_parent() -> None:
    """A test that passes its time limit ends its process without another word."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@contextlib.contextmanager
def running(command: Sequence[str], make_bucket: Callable[[], object]) -> Iterator[None]:
    """A server, for the block; `make_bucket` raises `OSError` while it does not answer."""
    server = subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=_end_with_parent,
    )
    try:
        until_s = time.monotonic() + _STARTS_WITHIN_S
        while True:
            try:
                make_bucket()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > until_s:
                    raise
                time.sleep(0.1)
        yield
    finally:
        server.terminate()
        server.wait()


@contextlib.contextmanager
def moto_server(bucket: str) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with running(
        [sys.executable, "-m", "tests.support.object_server", str(port)], S3Directory(url, bucket).make_bucket
    ):
        yield url


def _serve(port: int) -> None:
    """moto's server, with what it lacks: S3 looks at the condition of a put and makes the object in one step. moto
    answers each request on a thread, and looks first: of two conditional puts at once both succeeded now and then.
    """
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import run_simple

    os.environ["MOTO_PORT"] = str(port)
    moto = DomainDispatcherApplication(create_backend_app)
    changing = threading.Lock()

    def answer(environment: dict[str, Any], start_response: Any) -> Any:
        if environment["REQUEST_METHOD"] in ("GET", "HEAD"):
            return moto(environment, start_response)
        # Before the lock is taken: a body that comes slowly holds up no other request.
        body = environment["wsgi.input"].read(int(environment.get("CONTENT_LENGTH") or 0))
        environment["wsgi.input"] = io.BytesIO(body)
        with changing, contextlib.closing(moto(environment, start_response)) as parts:
            return list(parts)

    run_simple("127.0.0.1", port, answer, threaded=True, request_handler=MotoRequestHandler)


def _signed(method: str, url: str, body: bytes | None) -> dict[str, str]:
    """Headers of a request, signed by Amazon's own client."""
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    request = AWSRequest(method, url, data=body, headers={"Content-Type": "application/octet-stream"})
    S3SigV4Auth(Credentials("test-key", "test-secret"), "s3", "us-east-1").add_auth(request)
    return dict(request.headers)


class ObjectDirectory:
    """A prefix of a bucket, looked at and changed by plain requests, never by the code under test."""

    scheme: str
    variable: str  # by which the store is a server

    def __init__(self, url: str, bucket: str) -> None:
        self.server = url
        self.bucket = bucket
        self.prefix = f"test-{secrets.token_hex(6)}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}"

    def _request(self, method: str, target: str, body: bytes | None = None) -> bytes:
        url = f"{self.server}{target}"
        request = urllib.request.Request(url, data=body, method=method, headers=self._headers(method, url, body))
        with urllib.request.urlopen(request, timeout=30) as answer:
            content: bytes = answer.read()
            return content

    def _headers(self, method: str, url: str, body: bytes | None) -> dict[str, str]:
        return {"Content-Type": "application/octet-stream"}

    def _target(self, name: str) -> str:
        raise NotImplementedError

    def put(self, name: str, content: bytes) -> None:
        self._request("PUT", self._target(name), content)

    def get(self, name: str) -> bytes:
        return self._request("GET", self._target(name))

    def delete(self, name: str) -> None:
        self._request("DELETE", self._target(name))

    def names(self) -> list[str]:
        raise NotImplementedError


class S3Directory(ObjectDirectory):
    scheme, variable = "s3", "AWS_ENDPOINT_URL"

    def _headers(self, method: str, url: str, body: bytes | None) -> dict[str, str]:
        return _signed(method, url, body)

    def _target(self, name: str) -> str:
        return f"/{self.bucket}/{self.prefix}/{name}"

    def make_bucket(self) -> None:
        self._request("PUT", f"/{self.bucket}")

    def names(self) -> list[str]:
        listed = self._request("GET", f"/{self.bucket}?list-type=2&prefix={self.prefix}%2F").decode()
        return sorted(key.removeprefix(f"{self.prefix}/") for key in re.findall("<Key>(.*?)</Key>", listed))


@dataclass(frozen=True)
class Request:
    """What came to the proxy: method, path and query, and the length of the body.

    What it asks for is told alike of S3 and of Google's JSON API.
    """

    method: str
    path: str
    query: str
    size_bytes: int
    name: str = ""  # of what is sent to Google, where the body says it

    @property
    def changes(self) -> bool:
        return self.method != "GET" and self.method != "HEAD"

    @property
    def of_google(self) -> bool:
        return self.path.startswith(("/storage/v1/", "/upload/storage/v1/", "/download/storage/v1/"))

    @property
    def key(self) -> str:
        """Of the object or upload that it is about."""
        if not self.of_google:
            return unquote(self.path).split("/", 2)[-1]
        named = self.name or parse_qs(self.query).get("name", [""])[0]
        return named or unquote(self.path.partition("/o/")[2])

    @property
    def part(self) -> int:
        """Number of the part that it sends to S3, from 1 on; 0 if it sends none."""
        return int(parse_qs(self.query).get("partNumber", ["0"])[0])

    @property
    def makes(self) -> bool:
        """Whether it makes an object of what it sends."""
        if self.of_google:
            return self.method == "POST" and "uploadType=multipart" in self.query
        return self.method == "PUT" and not self.part

    @property
    def completes(self) -> bool:
        """Whether it makes an object of parts that S3 has."""
        return self.method == "POST" and "uploadId" in self.query

    @property
    def reads(self) -> bool:
        return self.method == "GET" and ("alt=media" in self.query if self.of_google else not self.query)

    @property
    def looks(self) -> bool:
        """Whether it asks for the version of an object."""
        if self.of_google:
            return self.method == "GET" and "/o/" in self.path and not self.reads
        return self.method == "HEAD"


@dataclass(frozen=True)
class Fault:
    """What goes wrong with a request; `then` is called when it has.

    `"status"`: the proxy answers so, and passes nothing on; `"forgotten"`: it passes it on before; `"reset"`: it cuts
    the connection in the midst of the request's body; `"lost"`: the server gets all, and the answer is cut off;
    `"truncated"`: half of the answer's body comes; `"stall"`: no answer comes for `seconds`; `"damaged"`: a byte of the
    request's body is changed; `"pretended"`: the proxy answers 200 and a version.
    """

    kind: Literal["status", "reset", "lost", "forgotten", "truncated", "stall", "damaged", "pretended"]
    status: int = 503
    code: str = ""  # what it says of the status; "" for a word of its own
    seconds: float = 0.0
    then: Callable[[], None] = field(default=lambda: None)


class Proxy:
    """A context manager; `url` is where requests go.

    Args:
        upstream: URL of the server.
        rule: called with each request, on several threads; returns what is to go wrong with it.
    """

    def __init__(self, upstream: str, rule: Callable[[Request], Fault | None] = lambda request: None) -> None:
        self.rule = rule
        self.requests: list[Request] = []
        self._upstream = urlsplit(upstream).netloc
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                proxy._handle(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any  # noqa: N815 (the base class's names)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # clients that cut off a request

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "Proxy":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._server.shutdown()
        self._server.server_close()
        _clients.clear()  # whose connections are open on both sides

    def changes(self) -> list[Request]:
        return [request for request in self.requests if request.changes]

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("Content-Length") or 0)
        path, _, query = handler.path.partition("?")
        head = handler.rfile.read(length) if "uploadType=" in query and handler.command == "POST" else b""
        name = re.search(rb'"name": *"([^"]*)"', head)
        with self._lock:
            request = Request(handler.command, path, query, length, name[1].decode() if name else "")
            self.requests.append(request)
        fault = self.rule(request)
        kind = None if fault is None else fault.kind
        struck: Callable[[], None] = (lambda: None) if fault is None else fault.then
        if kind == "reset":
            handler.rfile.read(0 if head else length // 2)
            return self._cut(handler, struck)
        body = head or handler.rfile.read(length)
        if fault is not None and kind == "stall":
            self._stopped.wait(fault.seconds)
            struck()
            handler.close_connection = True
            return None
        if fault is not None and kind in ("status", "forgotten"):
            if kind == "forgotten":
                self._pass_on(handler, body)
            struck()
            code = fault.code or f"Injected{fault.status}"
            told = {"error": {"code": fault.status, "message": code}}
            said = f"<Error><Code>{code}</Code></Error>"
            return self._answer(handler, fault.status, {}, (json.dumps(told) if request.of_google else said).encode())
        if kind == "pretended":
            struck()
            made = {"generation": "1234567", "size": str(length)}
            content = json.dumps(made).encode() if request.makes else b""
            return self._answer(handler, 200, {"ETag": '"pretended"'}, content)
        if kind == "damaged":
            at = len(body) // 2
            body = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
        status, headers, content = self._pass_on(handler, body)
        if kind == "lost":
            return self._cut(handler, struck)
        dropped = ["connection", "transfer-encoding", "date"] + ["content-length"] * (handler.command != "HEAD")
        kept = {name: value for name, value in headers.items() if name.lower() not in dropped}
        self._answer(handler, status, kept, content, half=kind == "truncated")
        return self._cut(handler, struck) if kind == "truncated" else None

    def _cut(self, handler: BaseHTTPRequestHandler, struck: Callable[[], None]) -> None:
        struck()
        handler.connection.shutdown(socket.SHUT_RDWR)
        handler.close_connection = True

    def _pass_on(self, handler: BaseHTTPRequestHandler, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """What the server answers: status, headers, content."""
        headers = {name: value for name, value in handler.headers.items() if name.lower() != "connection"}
        connection = http.client.HTTPConnection(self._upstream, timeout=60)
        try:
            connection.request(handler.command, handler.path, body=body, headers=headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def _answer(
        self, handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str], content: bytes, half: bool = False
    ) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        if handler.command != "HEAD" or "content-length" not in {name.lower() for name in headers}:
            handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(content[: len(content) // 2] if half else content)
        handler.wfile.flush()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
