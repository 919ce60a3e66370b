"""Where each state space lies in the generic address space.  Source: PTX ISA 8.8, 5.1 and 6.4.1.

The hardware's windows are not documented; these are ours.  Shared addresses carry the CTA's rank in
its cluster in bits 24 and up, as they do on sm_90 (a peer's address is one's own with another
rank).
"""

from __future__ import annotations

import numpy as np

WINDOW_BYTES = 1 << 32
SHARED_WINDOW = 0x7E00_0000_0000
LOCAL_WINDOW = 0x7D00_0000_0000
PARAMETER_WINDOW = 0x7C00_0000_0000
GLOBAL_BASE = 0x7000_0000_0000

# Addresses of CTA rank r in a cluster start at r << SHARED_RANK_SHIFT.
SHARED_RANK_SHIFT = 24
SHARED_OFFSET_MASK = (1 << SHARED_RANK_SHIFT) - 1

_WINDOWS = {
    "shared": SHARED_WINDOW,
    "shared::cta": SHARED_WINDOW,
    "shared::cluster": SHARED_WINDOW,
    "local": LOCAL_WINDOW,
    "param": PARAMETER_WINDOW,
}


def is_in_space(addresses: np.ndarray, space: str) -> np.ndarray:
    """Which generic addresses point into a state space; everything outside the windows is
    global.
    """
    if space in _WINDOWS:
        return (addresses >> np.uint64(32)) == np.uint64(_WINDOWS[space] >> 32)
    inside = np.zeros(addresses.shape, bool)
    for window in (SHARED_WINDOW, LOCAL_WINDOW, PARAMETER_WINDOW):
        inside |= (addresses >> np.uint64(32)) == np.uint64(window >> 32)
    return ~inside
