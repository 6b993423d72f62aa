"""Waiting on a word of shared memory (futex(2)), so that a message between processes costs one system call a side.

Knows nothing of what the word counts. Called by `ring`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_ALL = 2**31 - 1


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class FutexWord:
    """A 32-bit counter in shared memory that processes wait on.

    Args:
        memory: writable shared buffer. offset: of the word, a multiple of 4.

    Raises:
        NotImplementedError: a machine whose system call number is not known here.
    """

    def __init__(self, memory: memoryview, offset: int) -> None:
        if _SYS_FUTEX is None:
            raise NotImplementedError(f"no futex on {platform.machine()}")
        self._word = ctypes.c_uint32.from_buffer(memory, offset)
        self._address = ctypes.c_void_p(ctypes.addressof(self._word))
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall

    @property
    def value(self) -> int:
        """As it is now."""
        return int(self._word.value)

    def set_and_wake(self, value: int) -> None:
        """Stores the value (modulo 2^32) and wakes everyone who waits."""
        self._word.value = value & 0xFFFFFFFF
        self._syscall(_SYS_FUTEX, self._address, _FUTEX_WAKE, _ALL, None, None, 0)

    def wait(self, seen: int, timeout_s: float) -> None:
        """Returns once the word is no longer `seen`, at the latest after the time; also for no reason at all."""
        timeout = _TimeSpec(int(timeout_s), int(timeout_s % 1 * 1e9))
        result = self._syscall(
            _SYS_FUTEX, self._address, _FUTEX_WAIT, ctypes.c_uint32(seen), ctypes.byref(timeout), None, 0
        )
        if result == -1 and (number := ctypes.get_errno()) not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise OSError(number, os.strerror(number))

    def close(self) -> None:
        """Lets go of the memory, which could not be unmapped otherwise."""
        del self._word
