"""What happens while something else is at work: ahead of each call of a function, or behind it."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def ahead_of(owner: Any, name: str, do: Callable[..., object]) -> Iterator[None]:
    """In the block, `do` is called with the arguments of each call of that function or method, and before it."""
    function = getattr(owner, name)

    @functools.wraps(function)  # (Megatron looks at signatures)
    def call(*args: Any, **named: Any) -> Any:
        do(*args, **named)
        return function(*args, **named)

    with mock.patch.object(owner, name, call):
        yield


@contextmanager
def behind(owner: Any, name: str, do: Callable[..., object]) -> Iterator[None]:
    """As `ahead_of`, when the function has returned."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        result = function(*args, **named)
        do(*args, **named)
        return result

    with mock.patch.object(owner, name, call):
        yield


@contextmanager
def interrupted_at(owner: Any, name: str) -> Iterator[None]:
    """The block ends with the `KeyboardInterrupt` that comes instead of that call."""
    with mock.patch.object(owner, name, side_effect=KeyboardInterrupt):
        try:
            yield
        except KeyboardInterrupt:
            return
    raise AssertionError(f"{name} has interrupted nothing")


def once(do: Callable[[], object]) -> Callable[..., None]:
    """`do` at the first call, whatever the arguments."""
    left = [do]

    def call(*_: Any, **__: Any) -> None:
        if left:
            left.pop()()

    return call
