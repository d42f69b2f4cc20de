"""Small jobs for writer processes, and storages that misbehave inside them; no torch, so that writers start fast."""

import mmap
import os
import signal
import threading
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mcore_ckpt.image.layout import FileImage, PlannedFile
from mcore_ckpt.save.jobs import WriterJob
from mcore_ckpt.storage.base import RangeWriter, align_up
from mcore_ckpt.storage.resolve import LocalStorage

_TAIL_BYTES = 64


def image(name: str, payload_bytes: int) -> PlannedFile:
    """A file of one payload, followed by 64 bytes that begin with its CRC-32."""
    start, length = array("q", [0]), array("q", [payload_bytes])
    return PlannedFile(name, FileImage(payload_bytes + _TAIL_BYTES, start, length, length))


def job(directory: Path, images: Sequence[PlannedFile], **fields: Any) -> WriterJob:
    """A job that writes the files, one after the other in the staging buffer."""
    files = []
    offset = 0
    for each in images:
        files.append(replace(each, buffer_offset=offset))
        offset += align_up(each.image.size_bytes)
    fields.setdefault("storage", LocalStorage(directory))
    return WriterJob(files=tuple(files), **fields)


class SmallBuffer:
    """Shared memory with recognizable contents."""

    def __init__(self, nbytes: int) -> None:
        self.fd = os.memfd_create("test_buffer", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, nbytes)
        self.memory = mmap.mmap(self.fd, nbytes)

    def fill(self, seed: int) -> None:
        """Other bytes for every seed, and at every offset."""
        block = bytes((seed * 31 + index * 7) % 251 for index in range(4093))
        whole = block * (len(self.memory) // len(block) + 1)
        self.memory[:] = whole[: len(self.memory)]

    def close(self) -> None:
        self.memory.close()
        os.close(self.fd)


@dataclass
class MisbehavingStorage(LocalStorage):
    """A local directory whose writer, at each write of the file that is opened as number `at_file`, misbehaves: `how`
    is "SIGKILL" or another signal's name, "exit" with code 3, "hang", or "slow".
    """

    directory: str
    how: str
    at_file: int = 0
    write_bytes: int = 0
    writes_at_once: int = 2

    def __post_init__(self) -> None:
        super().__init__(self.directory)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.directory, self.how, self.at_file, self.write_bytes, self.writes_at_once)

    def open_writer(self, name: str, size_bytes: int, **options: Any) -> RangeWriter:
        writer = super().open_writer(name, size_bytes, **options)
        if self.at_file == 0:
            write = writer.write

            def misbehaving(offset: int, view: memoryview) -> None:
                misbehave(self.how)
                write(offset, view)

            writer.write = misbehaving  # type: ignore[method-assign]
        self.at_file -= 1
        return writer


def misbehave(how: str) -> None:
    """End or hang this process; see `MisbehavingStorage`."""
    if how == "exit":
        os._exit(3)
    elif how == "hang":
        time.sleep(600)
    elif how == "slow":
        time.sleep(0.2)
    else:
        signal.pthread_kill(threading.get_ident(), signal.Signals[how])
        time.sleep(600)
