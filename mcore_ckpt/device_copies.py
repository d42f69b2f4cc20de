"""Copies from a device to host memory, on a stream of their own, beside what the trainer computes.

Each device has one side stream. It first waits for what the trainer has queued on its current stream, which belongs to
the state that is saved; then come the copies, an event behind each. Waiting goes from event to event, so it ends with
the last copy and never waits for the device as a whole, nor does it keep a core busy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

__all__ = ["DeviceCopies"]


class DeviceCopies:
    """Copies in progress of one snapshot."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._in_order: set[torch.device] = set()
        # The tensor is kept until its copy is done: whatever interrupts the save, its memory must not be given away.
        self._pending: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        self._idle: list[torch.cuda.Event] = []

    def copy(self, tensor: torch.Tensor, source: Callable[[], torch.Tensor], target: torch.Tensor) -> None:
        """Queue a copy; it is complete after `wait`.

        Args:
            tensor: on a CUDA device.
            source: makes the bytes to copy, on the same device; called on the side stream, so that what makes them
                contiguous is queued there, too.
            target: host memory of as many bytes; asynchronous where that is registered with the device.
        """
        stream = self._stream(tensor.device)
        event = self._idle.pop() if self._idle else torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            target.copy_(source(), non_blocking=True)
        event.record(stream)
        self._pending.append((event, tensor))

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if device not in self._in_order:
            stream.wait_stream(torch.cuda.current_stream(device))
            self._in_order.add(device)
        return stream

    def wait(self) -> None:
        """Wait for the copies queued so far, one after the other, and for nothing else on the device."""
        while self._pending:
            event, _ = self._pending[0]
            event.synchronize()
            self._pending.popleft()
            self._idle.append(event)
        # What the trainer queues from now on belongs to the state of a later snapshot.
        self._in_order.clear()
