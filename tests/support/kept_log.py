"""What the package logs, kept: for ranks, where pytest's `caplog` is not at hand."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_log(level: int = logging.WARNING) -> Iterator[list[str]]:
    """The messages of the logger `mcore_ckpt`, of `level` and above, that come inside."""
    said: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mcore_ckpt")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
