"""Reading local files: what is cached from the cache, what is cold with enough requests in flight."""

from __future__ import annotations

import errno
import os

from mcore_ckpt.errors import CorruptCheckpointError, LoadError
from mcore_ckpt.storage.base import DirectIo, RangeReader

__all__ = ["LocalReader"]


class LocalReader(RangeReader):
    """An open local file; any number of threads may read it at once."""

    def __init__(self, path: str, direct: DirectIo) -> None:
        self.name = path
        self._fd: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size_bytes = os.fstat(self._fd).st_size

    def read_into(self, offset: int, view: memoryview) -> None:
        view = view.cast("B")
        self.check_range(offset, len(view))
        fd = self._fd
        if fd is None:
            raise ValueError(f"{self.name}: the reader is closed")
        done = 0
        try:
            while done < len(view):
                got = os.preadv(fd, [view[done:]], offset + done)
                if got == 0:
                    raise CorruptCheckpointError(
                        f"{self.name}: the file ended at byte {offset + done} where [{offset}, {offset + len(view)}) "
                        f"was wanted; it had {self.size_bytes} bytes when it was opened, so it was cut meanwhile"
                    )
                done += got
        except OSError as error:
            code = errno.errorcode.get(error.errno or 0, "no errno")
            raise LoadError(
                f"{self.name}: reading bytes [{offset + done}, {offset + len(view)}) failed: {error.strerror} ({code})"
            ) from error

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
