"""S3 in memory, as far as a save and a load use it: each answer comes late, and all bytes pass at one pace.

    python -m benchmarks.paced_store PORT LATENCY_MS MB_PER_S

Signatures and checksums are not looked at. All connections share the pace, each direction has its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Final
from urllib.parse import parse_qs, unquote

from tests.support.object_server import free_port, running

__all__ = ["paced_store"]

_BUCKET: Final = "checkpoints"
_PIECE_BYTES = 256 * 1024
_KEPT_HEADERS: Final = re.compile(r"x-amz-meta-.*")


@contextlib.contextmanager
def paced_store(latency_ms: float, mb_per_s: float) -> Iterator[str]:
    """A server, for the block; its URL. It has one bucket, "checkpoints"."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "benchmarks.paced_store", str(port), str(latency_ms), str(mb_per_s)]
    with running(command, lambda: urllib.request.urlopen(f"{url}/{_BUCKET}?list-type=2", timeout=10).close()):
        yield url


class _Pace:
    """Lets bytes pass at one rate, whoever sends them."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    async def passes(self, count: int) -> None:
        """Wait until so many bytes have passed."""
        self._free_at_s = max(self._free_at_s, time.monotonic()) + count / self._bytes_per_s
        if (wait_s := self._free_at_s - time.monotonic()) > 0.002:
            await asyncio.sleep(wait_s)


class _Object:
    def __init__(self, content: bytes, headers: dict[str, str]) -> None:
        self.content = content
        self.etag = f'"{hashlib.md5(content[:4096]).hexdigest()}-{time.monotonic_ns()}"'
        self.headers = {name: value for name, value in headers.items() if _KEPT_HEADERS.fullmatch(name)}


class _Answer:
    """What is answered: status, headers, content."""

    def __init__(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.status, self.content = status, content
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class _Store:
    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self._latency_s = latency_s
        self._up, self._down = _Pace(bytes_per_s), _Pace(bytes_per_s)
        self._objects: dict[str, _Object] = {}
        self._uploads: dict[str, tuple[dict[str, str], dict[int, bytes]]] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                method, target, headers = _parsed(await reader.readuntil(b"\r\n\r\n"))
                body = bytearray()
                while (left := int(headers.get("content-length", "0")) - len(body)) > 0:
                    piece = await reader.readexactly(min(left, _PIECE_BYTES))
                    body += piece
                    await self._up.passes(len(piece))
                await asyncio.sleep(self._latency_s)
                answer = self._answered(method, target, headers, bytes(body))
                content = memoryview(answer.content)
                sent = {"content-length": str(len(content)), **answer.headers}
                lines = [f"HTTP/1.1 {answer.status} -", *(f"{name}: {value}" for name, value in sent.items())]
                writer.write("\r\n".join([*lines, "", ""]).encode())
                for at in range(0, len(content) if method != "HEAD" else 0, _PIECE_BYTES):
                    piece = content[at : at + _PIECE_BYTES]
                    await self._down.passes(len(piece))
                    writer.write(piece)
                    await writer.drain()
        writer.close()

    def _answered(self, method: str, target: str, headers: dict[str, str], body: bytes) -> _Answer:
        path, _, query = target.partition("?")
        key = unquote(path).removeprefix(f"/{_BUCKET}").removeprefix("/")
        given = {name: values[0] for name, values in parse_qs(query, keep_blank_values=True).items()}
        if method in ("GET", "HEAD"):
            return self._list(given) if not key else self._get(key, headers, is_head=method == "HEAD")
        if method == "DELETE":
            self._objects.pop(key, None)
            return _Answer(204)
        return self._put(key, given, headers, body)

    def _get(self, key: str, headers: dict[str, str], *, is_head: bool) -> _Answer:
        found = self._objects.get(key)
        if found is None:
            return _Answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        if headers.get("if-match", found.etag) != found.etag:
            return _Answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        told = {"etag": found.etag, "last-modified": "Sat, 28 Nov 2026 00:00:00 GMT", **found.headers}
        size = len(found.content)
        if is_head:
            return _Answer(200, **{**told, "content-length": str(size)})
        if not (asked := re.fullmatch(r"bytes=(\d*)-(\d*)", headers.get("range", ""))):
            return _Answer(200, found.content, **told)
        if not asked[1]:
            first, end = max(0, size - int(asked[2])), size
        else:
            first, end = int(asked[1]), min(size, int(asked[2] or size) + 1)
        if first >= end:
            return _Answer(416, b"<Error><Code>InvalidRange</Code></Error>")
        told["content-range"] = f"bytes {first}-{end - 1}/{size}"
        return _Answer(206, found.content[first:end], **told)

    def _list(self, given: dict[str, str]) -> _Answer:
        prefix, delimiter = given.get("prefix", ""), given.get("delimiter", "")
        objects, folders = [], set()
        for key, found in sorted(self._objects.items()):
            if not key.startswith(prefix):
                continue
            if delimiter and delimiter in (rest := key[len(prefix) :]):
                folders.add(prefix + rest.split(delimiter)[0] + delimiter)
                continue
            objects.append(
                f"<Contents><Key>{key}</Key><Size>{len(found.content)}</Size><ETag>{found.etag}</ETag>"
                "<LastModified>2026-11-28T00:00:00.000Z</LastModified></Contents>"
            )
        objects += (f"<CommonPrefixes><Prefix>{folder}</Prefix></CommonPrefixes>" for folder in sorted(folders))
        shown = f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(objects)}</ListBucketResult>"
        return _Answer(200, shown.encode())

    def _put(self, key: str, given: dict[str, str], headers: dict[str, str], body: bytes) -> _Answer:
        if "uploads" in given:
            upload = f"upload-{time.monotonic_ns()}"
            self._uploads[upload] = headers, {}
            told = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            return _Answer(200, told.encode())
        if "partNumber" in given:
            part = int(given["partNumber"])
            self._uploads[given["uploadId"]][1][part] = body
            return _Answer(200, etag=f'"part-{part}"')
        if "uploadId" in given:
            headers, parts = self._uploads.pop(given["uploadId"])
            body = b"".join(parts[number] for number in sorted(parts))
        found = self._objects.get(key)
        wanted = headers.get("if-match")
        if (headers.get("if-none-match") and found) or (wanted and (found is None or found.etag != wanted)):
            return _Answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        made = self._objects[key] = _Object(body, headers)
        told = f"<CompleteMultipartUploadResult><ETag>{made.etag}</ETag></CompleteMultipartUploadResult>"
        return _Answer(200, told.encode() if "uploadId" in given else b"", etag=made.etag)


def _parsed(head: bytes) -> tuple[str, str, dict[str, str]]:
    first, *lines = head.decode("latin-1").strip().split("\r\n")
    method, target, _ = first.split(" ")
    return method, target, {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


async def _serve(port: int, latency_ms: float, mb_per_s: float) -> None:
    store = _Store(latency_ms / 1e3, mb_per_s * 1e6)
    server = await asyncio.start_server(store.serve, "127.0.0.1", port, limit=4 * _PIECE_BYTES)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])))
