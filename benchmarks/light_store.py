"""A server of S3's protocol that takes as little CPU time as can be: what clients of a store cost shows beside it.

    python -m benchmarks.light_store FOLDER --latency-ms 10        prints the port where it listens

SeaweedFS takes several seconds of CPU time for a gigabyte, on the cores that the clients share with it; a store has
machines of its own. This one writes bodies to files below FOLDER and sends them from there (`sendfile`). It looks at no
signature and at no checksum, and repeats those that it is given. It keeps conditions of puts. Each request is answered
so many milliseconds later.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import threading
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_PIECE_BYTES = 1024 * 1024
_CHECKSUM = "x-amz-checksum-"
_Elements = list[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Object:
    files: tuple[_File, ...]
    checksums: dict[str, str]
    e_tag: str
    modified_s: float = field(default_factory=time.time)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


@dataclass(slots=True)
class _Upload:
    bucket: str
    key: str
    parts: dict[int, _Object] = field(default_factory=dict)


class _Store:
    """What there is, by bucket and key."""

    def __init__(self, folder: Path) -> None:
        self.lock = threading.Lock()
        self.buckets: dict[str, dict[str, _Object]] = {}
        self.uploads: dict[str, _Upload] = {}
        self._folder = folder
        self._numbers = itertools.count()

    def new_name(self) -> str:
        return f"{next(self._numbers):032x}"

    def new_file(self) -> Path:
        return self._folder / self.new_name()


class _RefusedError(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status = status
        self.code = code


def _xml(name: str, elements: _Elements) -> bytes:
    def add(parent: ElementTree.Element, items: _Elements) -> None:
        for tag, value in items:
            child = ElementTree.SubElement(parent, tag)
            if isinstance(value, list):
                add(child, value)
            else:
                child.text = str(value)

    root = ElementTree.Element(name, xmlns="http://s3.amazonaws.com/doc/2006-03-01/")
    add(root, elements)
    return b'<?xml version="1.0" encoding="UTF-8"?>' + ElementTree.tostring(root)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def __init__(self, *args: Any, store: _Store, latency_s: float) -> None:
        self._store = store
        self._latency_s = latency_s
        self._memory = memoryview(bytearray(_PIECE_BYTES))
        super().__init__(*args)

    def log_message(self, *_: Any) -> None:
        """No request is told of."""

    def handle_expect_100(self) -> bool:
        told = super().handle_expect_100()
        self.wfile.flush()
        return told

    def _handle(self) -> None:
        time.sleep(self._latency_s)
        url = urlsplit(self.path)
        self._query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        bucket, _, self._key = unquote(url.path).lstrip("/").partition("/")
        self._bucket_name = bucket
        self._bucket = self._store.buckets.setdefault(bucket, {})
        self._has_read = False
        try:
            {"GET": self._get, "HEAD": self._get, "PUT": self._put, "POST": self._post, "DELETE": self._delete}[
                self.command
            ]()
        except _RefusedError as refused:
            if not self._has_read:
                self._receive(None)
            self._answer(refused.status, _xml("Error", [("Code", refused.code), ("Message", refused.code)]))

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle  # noqa: N815  (the names that the base class calls)

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("x-amz-request-id", "light")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.wfile.flush()

    # Bodies

    def _receive(self, target: int | None) -> int:
        """Read the body, and write it to a descriptor; returns its length."""
        self._has_read = True
        length = int(self.headers.get("content-length") or 0)
        if not self.headers.get("x-amz-content-sha256", "").startswith("STREAMING"):
            self._receive_bytes(target, length)
            return length
        total = 0
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            self._receive_bytes(target, size)
            self.rfile.readline()
            total += size
        while trailer := self.rfile.readline().strip():
            name, _, value = trailer.decode().partition(":")
            self.headers[name] = value.strip()
        return total

    def _receive_bytes(self, target: int | None, length: int) -> None:
        while length:
            count = self.rfile.readinto(self._memory[: min(length, _PIECE_BYTES)])  # type: ignore[attr-defined]
            if not count:
                raise ConnectionError("the body ends early")
            length -= count
            if target is not None:
                os.write(target, self._memory[:count])

    def _received(self) -> _Object:
        path = self._store.new_file()
        with path.open("wb", buffering=0) as file:
            size_bytes = self._receive(file.fileno())
        checksums = {name.lower(): value for name, value in self.headers.items() if name.lower().startswith(_CHECKSUM)}
        return _Object((_File(path, size_bytes),), checksums, f'"{self._store.new_name()}"')

    def _small_body(self) -> bytes:
        made = self._received().files[0]
        content = made.path.read_bytes()
        made.path.unlink()
        return content

    # Objects

    def _check(self, there: _Object | None) -> None:
        """Refuse what a condition forbids. Called with the lock."""
        wanted, unwanted = self.headers.get("if-match"), self.headers.get("if-none-match")
        if wanted is not None and (there is None or wanted not in ("*", there.e_tag)):
            raise _RefusedError(*((412, "PreconditionFailed") if there else (404, "NoSuchKey")))
        if unwanted is not None and there is not None and unwanted in ("*", there.e_tag):
            raise _RefusedError(412, "PreconditionFailed")

    def _keep(self, made: _Object) -> None:
        with self._store.lock:
            old = self._bucket.get(self._key)
            self._check(old)
            self._bucket[self._key] = made
        self._remove(old)

    def _remove(self, old: _Object | None) -> None:
        for file in () if old is None else old.files:
            file.path.unlink(missing_ok=True)

    def _get(self) -> None:
        if not self._key:
            self._list()
            return
        there = self._bucket.get(self._key)
        if there is None:
            raise _RefusedError(404, "NoSuchKey")
        self._check(there)
        size = there.size_bytes
        start, end = 0, size
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("range", ""))
        if asked:
            if asked[1]:
                start, end = int(asked[1]), min(int(asked[2] or size) + 1, size)
            else:
                start = max(0, size - int(asked[2]))
            if start >= size:
                raise _RefusedError(416, "InvalidRange")
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        for name, value in there.checksums.items():
            if self.headers.get("x-amz-checksum-mode") and not asked:
                self.send_header(name, value)
        self.send_header("ETag", there.e_tag)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Last-Modified", formatdate(there.modified_s, usegmt=True))
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        self.wfile.flush()
        if self.command == "GET":
            self._send(there.files, start, end)

    def _send(self, files: tuple[_File, ...], start: int, end: int) -> None:
        for file in files:
            if start < file.size_bytes and end > 0:
                with file.path.open("rb") as source:
                    position, until = max(start, 0), min(end, file.size_bytes)
                    while position < until:
                        position += os.sendfile(self.connection.fileno(), source.fileno(), position, until - position)
            start -= file.size_bytes
            end -= file.size_bytes

    def _put(self) -> None:
        if not self._key:
            self._answer(200)
        elif (source := self.headers.get("x-amz-copy-source")) is not None:
            bucket, _, key = unquote(source).lstrip("/").partition("/")
            there = self._store.buckets.get(bucket, {}).get(key)
            if there is None:
                raise _RefusedError(404, "NoSuchKey")
            path = self._store.new_file()
            path.write_bytes(b"".join(file.path.read_bytes() for file in there.files))
            self._keep(_Object((_File(path, there.size_bytes),), there.checksums, f'"{self._store.new_name()}"'))
            self._answer(200, _xml("CopyObjectResult", [("ETag", self._bucket[self._key].e_tag)]))
        else:
            made = self._received()
            if "uploadId" in self._query:
                self._upload().parts[int(self._query["partNumber"])] = made
            else:
                self._keep(made)
            self._answer(200, ETag=made.e_tag, **made.checksums)

    def _upload(self) -> _Upload:
        found = self._store.uploads.get(self._query["uploadId"])
        if found is None:
            raise _RefusedError(404, "NoSuchUpload")
        return found

    def _post(self) -> None:
        body = self._small_body()
        if "uploads" in self._query:
            name = self._store.new_name()
            self._store.uploads[name] = _Upload(self._bucket_name, self._key)
            said: _Elements = [("Bucket", self._bucket_name), ("Key", self._key), ("UploadId", name)]
            self._answer(200, _xml("InitiateMultipartUploadResult", said))
        elif "uploadId" in self._query:
            parts = self._upload().parts
            numbers = [int(number) for number in re.findall(rb"<PartNumber>(\d+)<", body)]
            files = tuple(file for number in numbers for file in parts[number].files)
            checksums = {name.lower(): value for name, value in self.headers.items() if _CHECKSUM in name.lower()}
            made = _Object(files, checksums, f'"{self._store.new_name()}-{len(numbers)}"')
            self._keep(made)
            del self._store.uploads[self._query["uploadId"]]
            said = [("Bucket", self._bucket_name), ("Key", self._key), ("ETag", made.e_tag)]
            self._answer(200, _xml("CompleteMultipartUploadResult", said))
        elif "delete" in self._query:
            keys = [key.text or "" for key in ElementTree.fromstring(body).iter() if key.tag.endswith("}Key")]
            for key in keys:
                self._remove(self._bucket.pop(key, None))
            self._answer(200, _xml("DeleteResult", [("Deleted", [("Key", key)]) for key in keys]))
        else:
            raise _RefusedError(501, "NotImplemented")

    def _delete(self) -> None:
        if "uploadId" in self._query:
            for part in self._upload().parts.values():
                self._remove(part)
            del self._store.uploads[self._query["uploadId"]]
        else:
            with self._store.lock:
                self._check(self._bucket.get(self._key)) if "if-match" in self.headers else None
                old = self._bucket.pop(self._key, None)
            self._remove(old)
        self._answer(204)

    def _list(self) -> None:
        prefix, delimiter = self._query.get("prefix", ""), self._query.get("delimiter", "")
        if "uploads" in self._query:
            found = [(name, each.key) for name, each in self._store.uploads.items() if each.key.startswith(prefix)]
            each: _Elements = [("Upload", [("Key", key), ("UploadId", name)]) for name, key in found]
            self._answer(200, _xml("ListMultipartUploadsResult", [("IsTruncated", "false"), *each]))
            return
        after = self._query.get("continuation-token") or self._query.get("start-after") or self._query.get("marker", "")
        with self._store.lock:
            objects = {key: self._bucket[key] for key in sorted(self._bucket) if key.startswith(prefix) and key > after}
        most, entries, folders, last = int(self._query.get("max-keys", "1000")), [], dict[str, None](), ""
        for key, there in objects.items():
            rest = key[len(prefix) :]
            if len(entries) + len(folders) >= most:
                break
            if delimiter and delimiter in rest:
                folders[prefix + rest.split(delimiter)[0] + delimiter] = None
            else:
                modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(there.modified_s))
                said = [("Key", key), ("LastModified", modified), ("ETag", there.e_tag), ("Size", there.size_bytes)]
                entries.append(("Contents", [*said, ("StorageClass", "STANDARD")]))
            last = key
        is_cut = bool(objects) and last != next(reversed(objects))
        told: _Elements = [("Name", self._bucket_name), ("Prefix", prefix), ("KeyCount", len(entries) + len(folders))]
        told += [("MaxKeys", most), ("IsTruncated", str(is_cut).lower())]
        told += [("NextContinuationToken", last)] if is_cut else []
        told += [*entries, *(("CommonPrefixes", [("Prefix", name)]) for name in folders)]
        self._answer(200, _xml("ListBucketResult", told))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None:
        """A client has gone."""


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--latency-ms", type=float, default=0.0)
    arguments = parser.parse_args()
    handler = partial(_Handler, store=_Store(arguments.folder), latency_s=arguments.latency_ms / 1000)
    with _Server(("127.0.0.1", 0), handler) as server:
        print(server.server_address[1], flush=True)  # noqa: T201
        server.serve_forever()


if __name__ == "__main__":
    main()
