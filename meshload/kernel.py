"""System calls that Python has no names for, through the C library. Each is a way to be faster, and may be missing.

Sources: the Linux manual, io_submit(2), madvise(2).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import time
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .pieces import Ints

PAGE = mmap.PAGESIZE
MOST = 256
"""Reads in a queue; a system has some 65,000 for all of its processes, and more at once are no faster."""
POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, Linux 5.14."""


def _loaded(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of the C library; None where there is none, or addresses are not what vectors take them for."""
    try:
        found = getattr(ctypes.CDLL(None, use_errno=True), name, None) if os.name == "posix" else None
    except OSError:
        return None
    if found is None or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    found.restype, found.argtypes = result, arguments
    return found


_pointer, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_madvise = _loaded("madvise", _int, _pointer, _size, _int)
_syscall: Any = _loaded("syscall", ctypes.c_long, *[ctypes.c_long] * 6) if hasattr(os, "RWF_NOWAIT") else None


def address_of(memory: NDArray[np.uint8]) -> tuple[int, int]:
    """Return the address and the size of memory that the kernel is to write to."""
    if not (memory.flags.c_contiguous and memory.flags.writeable and memory.itemsize == 1):
        raise ValueError("contiguous writeable bytes were expected")
    return memory.ctypes.data, memory.nbytes


# --- new memory -------------------------------------------------------------------------------------------------------

SLOW = 1_000_000
"""Nanoseconds that touching a huge page does not take: mostly 0.1 ms, a sixth of what its 512 plain pages take. Where the host of
a virtual machine took free memory back, it takes 4 ms; plain pages come from what is left of used memory then, and seldom wait."""


def new_memory(size: int) -> NDArray[np.uint8]:
    """Return zeros, in huge pages where there are any, that take no memory until they are touched."""
    mapped = np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    _advise(mapped, "MADV_HUGEPAGE")
    return mapped


def use_plain_pages(memory: NDArray[np.uint8]) -> None:
    """Ask for no huge pages in what has not been touched yet of new memory."""
    _advise(memory, "MADV_NOHUGEPAGE")


def touch(memory: NDArray[np.uint8]) -> bool:
    """Have the kernel map new memory all at once, not page by page as it is written; say whether that was as fast as it can be."""
    begin = time.thread_time_ns()
    _advise(memory, POPULATE_WRITE)  # a kernel that knows it not says no, and pages come one by one
    return time.thread_time_ns() - begin < SLOW


def _advise(memory: NDArray[np.uint8], advice: int | str) -> None:
    """Tell the kernel something of the whole pages in a piece of memory, if it and Python know the word."""
    number = getattr(mmap, advice, None) if isinstance(advice, str) else advice
    address, size = memory.ctypes.data, memory.nbytes
    first, last = -(-address // PAGE) * PAGE, (address + size) // PAGE * PAGE
    if _madvise is not None and number is not None and last > first:
        _madvise(first, last - first, number)


# --- many reads in one call -------------------------------------------------------------------------------------------

REQUEST = np.dtype(
    {
        "names": ["number", "flags", "file", "memory", "length", "start"],
        "formats": ["u8", "i4", "u4", "u8", "u8", "i8"],
        "offsets": [0, 12, 20, 24, 32, 40],
        "itemsize": 64,
    }
)
"""`struct iocb` of linux/aio_abi.h, for a read: its operation is 0."""
EVENT = np.dtype([("number", "u8"), ("request", "u8"), ("result", "i8"), ("more", "i8")])
_NUMBERS = {"x86_64": (206, 208, 209), "aarch64": (0, 4, 2)}.get(platform.machine())
"""Of io_setup, io_getevents and io_submit, which the C library has no functions for."""


class _Queue:
    """A queue of asynchronous reads."""

    def __init__(self, setup: int, collect: int, submit: int) -> None:
        self.collect, self.submit = collect, submit
        self.requests, self.events = np.zeros(MOST, REQUEST), np.zeros(MOST, EVENT)
        self.requests["number"] = np.arange(MOST)
        self.pointers = self.requests.ctypes.data + REQUEST.itemsize * np.arange(MOST)
        self.context = ctypes.c_ulong(0)
        if _syscall(setup, MOST, ctypes.addressof(self.context), 0, 0, 0):
            raise OSError(ctypes.get_errno(), "io_setup")

    def read(self, file: int, start: Ints, length: Ints, to: Ints, flags: int) -> NDArray[np.bool_]:
        """Read runs, at most as many as the queue takes; say which are there in full."""
        n = len(start)
        requests = self.requests[:n]
        requests["file"], requests["start"], requests["length"], requests["memory"] = file, start, length, to
        requests["flags"] = flags
        done = np.zeros(n, bool)
        begun = _syscall(self.submit, self.context.value, n, self.pointers.ctypes.data, 0, 0)
        left = max(begun, 0)
        while left:
            found = _syscall(self.collect, self.context.value, left, left, self.events.ctypes.data, 0)
            if found < 0:
                if ctypes.get_errno() == errno.EINTR:
                    continue
                raise OSError(ctypes.get_errno(), "io_getevents")
            events = self.events[:found]
            number = events["number"].astype(np.int64)
            done[number] = events["result"] == length[number]
            left -= found
        return done


_queues: list[_Queue] = []
"""Those that no thread uses just now: making one takes longer than a read, and giving it back to the kernel longer still."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_queues.clear)


def _queue() -> _Queue | None:
    """Return a queue of the thread's own; None where there is none to be had."""
    with suppress(IndexError):
        return _queues.pop()
    with suppress(OSError):  # forbidden, or too many
        return _Queue(*_NUMBERS) if _NUMBERS and _syscall else None
    return None


def read_queued(file: int, start: Ints, length: Ints, to: Ints, *, cached: bool) -> NDArray[np.bool_]:
    """Read runs of a file to addresses, without a call for each; say which are there in full.

    Where `cached`, those that are not in the page cache are left; all are where the system has no queues.
    """
    done = np.zeros(len(start), bool)
    queue = _queue()
    if queue is not None:
        for a in range(0, len(start), MOST):
            b = min(a + MOST, len(start))
            done[a:b] = queue.read(file, start[a:b], length[a:b], to[a:b], os.RWF_NOWAIT if cached else 0)
        _queues.append(queue)
    return done
