"""A device that does everything late: what it is asked for is queued, and done when somebody waits for it.

For code that talks to an accelerator by `torch.get_device_module`, where there is none. Tensors of class `OnDevice` say
that they are on `cuda:N`; their contents lie in host memory, as `held`. Kernels and copies on them are queued on the
stream that is current; a view is one at once, as on a real device. A wait that is forgotten, or an order that is not
kept, shows as wrong bytes: `finish` does at last what nobody has waited for.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch


class _Stream:
    def __init__(self, device: torch.device | int | str = 0) -> None:
        self.device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        self.queued: list[Callable[[], object]] = []
        self.done = 0

    def wait_stream(self, other: "_Stream") -> None:
        position = len(other.queued)
        self.queued.append(lambda: other.run(position))

    def run(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            self.queued[self.done - 1]()


class SimulatedDevices:
    """Stands in for `torch.cuda`; `largest_bytes`: the largest memory that a tensor was put in order in."""

    def __init__(self) -> None:
        self._default: dict[torch.device, _Stream] = {}
        self._current: dict[torch.device, _Stream] = {}
        self._all: list[_Stream] = []
        self.largest_bytes = 0

        class Event:
            def __init__(self, *, blocking: bool = False) -> None:
                assert blocking, "a trainer's core must not spin"
                self.recorded: tuple[_Stream, int] | None = None

            def record(self, stream: _Stream) -> None:
                self.recorded = (stream, len(stream.queued))

            def synchronize(self) -> None:
                assert self.recorded is not None
                stream, position = self.recorded
                stream.run(position)

        self.Event = Event

    def Stream(self, device: Any) -> _Stream:
        stream = _Stream(device)
        self._all.append(stream)
        return stream

    def current_stream(self, device: torch.device) -> _Stream:
        if device not in self._default:
            self._default[device] = self.Stream(device)
        return self._current.get(device, self._default[device])

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before = self.current_stream(stream.device)
        self._current[stream.device] = stream
        try:
            yield
        finally:
            self._current[stream.device] = before

    def queue(self, device: torch.device, work: Callable[[], object]) -> None:
        self.current_stream(device).queued.append(work)

    def is_available(self) -> bool:
        return True

    def cudart(self) -> Any:
        """What registers host memory: all of it may be."""
        return SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)

    def finish(self) -> None:
        """Do all that is queued, the streams one after the other."""
        for stream in self._all:
            stream.run(len(stream.queued))

    def synchronize(self, *_: Any) -> None:
        raise AssertionError("waited for the whole device")


_here = SimulatedDevices()
_VIEWS = ("view", "slice", "narrow", "as_strided", "detach", "t", "transpose", "expand", "alias", "_unsafe_view")


class OnDevice(torch.Tensor):
    """A tensor that lies on the simulated device; `held` is what it holds by now."""

    held: torch.Tensor
    number: int

    @staticmethod
    def __new__(cls, real: torch.Tensor, index: int = 0) -> "OnDevice":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            real.shape,
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device=torch.device("meta"),  # torch wants to guard a real one
            dispatch_device=True,
        )
        made.number = index
        made.held = real
        return made

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        # torch's own guards the device before it asks anybody.
        return self if self.is_contiguous() else self.clone(memory_format=memory_format)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        name = func._schema.name.removeprefix("aten::")
        first = args[0]
        if func is torch.ops.prim.device.default:
            return torch.device("cuda", first.number)
        if name in _VIEWS:
            return OnDevice(func(first.held, *args[1:], **(kwargs or {})), first.device.index)
        if name == "clone":
            order = (kwargs or {}).get("memory_format", torch.preserve_format)
            copied = torch.empty_like(first.held, memory_format=order)
            _here.largest_bytes = max(_here.largest_bytes, copied.nbytes)
            _here.queue(first.device, lambda: copied.copy_(first.held))
            return OnDevice(copied, first.device.index)
        if name in ("fill_", "zero_", "add_", "mul_"):
            _here.queue(first.device, lambda: func(first.held, *args[1:]))
            return first
        if name == "copy_":
            source, waits = args[1], not (len(args) > 2 and args[2])
            device = next(side.device for side in (first, source) if isinstance(side, OnDevice))
            to, of = (side.held if isinstance(side, OnDevice) else side for side in (first, source))
            _here.queue(device, lambda: to.copy_(of))
            if waits:
                stream = _here.current_stream(device)
                stream.run(len(stream.queued))
            return first
        raise NotImplementedError(f"{func} of a tensor on the simulated device")


@pytest.fixture
def simulated_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevices]:
    """Let `torch.get_device_module` find the simulated devices under the name cuda."""
    global _here
    from mcore_ckpt.save import staging

    _here = SimulatedDevices()
    module_of = torch.get_device_module

    def get_device_module(device: Any = None) -> Any:
        return _here if torch.device(device).type == "cuda" else module_of(device)

    monkeypatch.setattr(torch, "get_device_module", get_device_module)
    monkeypatch.setattr(staging, "_streams", {})
    yield _here
    staging.release_buffer()  # one that is registered with the simulated device goes while it is there
