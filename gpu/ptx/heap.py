"""Keeps the memory that freed arrays leave with the process.

Blocks of the executor make and drop arrays of some 100 KiB all the time.  By default glibc gives
such memory back to the system at once and gets it again page by page, which costs more than the
arithmetic on it.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGE = 256 << 20


@cache
def keep_freed_memory() -> None:
    """For this process; does nothing where the C library is not glibc."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _LARGE)
        mallopt(_MMAP_THRESHOLD, _LARGE)
