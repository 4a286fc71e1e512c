"""CUDA's memory as a sink: page-locked staging memory, one piece per thread that fills it, each with a stream of its own.

A copy out of page-locked memory goes on by itself, in the order of its stream; an event tells when it has ended. Until then the
piece is not filled again. Casts between the usual floating dtypes are left to the device; there a NaN may become another NaN.
Nothing of this is reached without CUDA.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshload.box import Shape
from meshload.errors import LimitError
from meshload.frameworks import Placement

STREAMED = {"cuda"}
"""Kinds of devices that are filled while others are read."""

CAST = {"float16", "bfloat16", "float32"}
"""Dtypes that the device casts from and to, rounding as NumPy and ml_dtypes do; others are cast before they go."""


class Ring:
    """The staging memory of one call.

    `where` tells the device of a placement, `own` torch's dtype of NumPy's and of the format's name of it.
    """

    def __init__(self, where: Callable[[Placement], Any], own: Callable[[np.dtype[Any], str | None], Any]) -> None:
        self._where, self._own = where, own
        self._mine = threading.local()
        self._pieces: list[_Piece] = []
        self._before: dict[Any, Any] = {}

    def memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Return the thread's piece, once the copies out of it have ended."""
        piece = self._piece()
        piece.wait()
        if len(piece.memory) < nbytes:
            piece.memory = pinned(nbytes)
        return piece.memory

    def wait(self) -> None:
        """Return once all copies have ended."""
        for piece in self._pieces:
            piece.wait()

    def landing(self, name: str, shape: Shape, dtype: np.dtype[Any], stored: str | None, placement: Placement) -> Landed | None:
        """Return a new tensor of CUDA, whose streams begin behind what the caller's does now; None for another device."""
        import torch

        device = self._where(placement)
        if device is None or torch.device(device).type not in STREAMED:
            return None
        own = self._own(dtype, stored)
        try:
            memory = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise LimitError(f"{name}: {tuple(shape)} of {dtype.name} find no memory on {device}: {error}") from error
        self._before.setdefault(memory.device, torch.cuda.current_stream(memory.device))
        return Landed(self, name, dtype, memory.view(own).view(shape))

    def copy(self, here: Any, there: Any) -> None:
        """Begin a copy in the stream of the thread's piece; a cast is made on the device, of what has arrived there."""
        import torch

        piece = self._piece()
        stream, event = piece.stream_to(there.device, self._before)
        piece.going.append(here)
        try:
            with torch.cuda.stream(stream):
                arrived = here if here.dtype == there.dtype else here.to(there.device, non_blocking=True)
                there.copy_(arrived, non_blocking=True)
        finally:  # a cast that finds no memory comes behind a copy that has begun
            event.record(stream)

    def _piece(self) -> _Piece:
        piece: _Piece | None = getattr(self._mine, "piece", None)
        if piece is None:
            piece = self._mine.piece = _Piece()
            self._pieces.append(piece)
        return piece


@dataclass(eq=False)
class _Piece:
    """Page-locked memory of one thread, and per device the stream of the copies out of it and the event that ends the last."""

    memory: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    streams: dict[Any, tuple[Any, Any]] = field(default_factory=dict)
    going: list[Any] = field(default_factory=list)
    """What is copied, which may lie in memory of its own: what a step or a cast gave."""

    def stream_to(self, device: Any, before: dict[Any, Any]) -> tuple[Any, Any]:
        import torch

        cuda: Any = torch.cuda  # untyped
        if device not in self.streams:
            stream = cuda.Stream(device)
            stream.wait_stream(before[device])  # memory that it gave back may still be read there
            self.streams[device] = stream, cuda.Event()
        return self.streams[device]

    def wait(self) -> None:
        for _, event in self.streams.values():
            event.synchronize()
        self.going.clear()


@dataclass(frozen=True, eq=False)
class Landed:
    """A tensor of CUDA that is being filled."""

    ring: Ring
    name: str
    dtype: np.dtype[Any]
    tensor: Any

    def write(self, start: int, values: NDArray[Any]) -> Callable[[], None]:
        """Begin to copy elements; bits as they are where the dtype is the wanted one."""
        import torch

        flat, values = self.tensor.view(-1), values.reshape(-1)
        if values.dtype != self.dtype and not {values.dtype.name, self.dtype.name} <= CAST:
            values = values.astype(self.dtype)
        if values.dtype == self.dtype:
            size = self.dtype.itemsize
            there = flat.view(torch.uint8)[start * size : (start + len(values)) * size]
            self.ring.copy(torch.from_numpy(values.view(np.uint8)), there)
        else:
            bits = torch.from_numpy(values.view(np.dtype(f"u{values.dtype.itemsize}")))
            self.ring.copy(bits.view(getattr(torch, values.dtype.name)), flat[start : start + len(values)])
        return _nothing

    def holds(self, start: int, values: NDArray[Any]) -> bool:
        return False

    def flush(self) -> None:
        pass


def _nothing() -> None:
    """Do nothing: whoever fills the staging memory next waits."""


def pinned(nbytes: int) -> NDArray[np.uint8]:
    """Return page-locked memory; torch keeps what is given back, so that a second call finds it."""
    import torch

    found: NDArray[np.uint8] = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()
    return found
