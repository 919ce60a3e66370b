"""Tensor maps that a kernel makes or changes itself: tensormap.replace, tensormap.cp_fenceproxy.

Source: PTX ISA 8.8, 9.7.9.28 and 9.7.13.16.
"""

from __future__ import annotations

import numpy as np

from gpu.ptx.frame import Frame
from gpu.ptx.lanes import Array, Mask
from gpu.tensor_map import DESCRIPTOR_BYTES, replaced
from simkit.errors import LaunchError

_WORDS = DESCRIPTOR_BYTES // 16


def replace(
    x: Frame, space: str, base: Array, offset: int, field: str, ordinal: int, value: Array,
    mask: Mask, site: int,
) -> None:  # fmt: skip
    """Each active lane sets a field of the map at its address."""
    active = np.ones(x.shape, bool) if mask is None else mask
    if not active.any():
        return
    places = [offset + 16 * k for k in range(_WORDS)]
    words = [x.load(space, base, place, 16, 1, mask, site)[0] for place in places]
    rows = np.stack([word[active] for word in words], axis=1)
    descriptors = np.ascontiguousarray(rows).view(np.uint8).reshape(-1, DESCRIPTOR_BYTES)
    try:
        changed = replaced(descriptors, field, ordinal, x.array(value)[active].astype(np.uint64))
    except LaunchError as error:
        raise LaunchError(f"{x.grid.place(site)}: tensormap.replace: {error}") from error
    columns = changed.view(np.complex128)
    for k, place in enumerate(places):
        word = np.zeros(x.shape, np.complex128)
        word[active] = columns[:, k]
        x.store(space, base, place, 16, (word,), mask, site)


def publish(
    x: Frame, target: Array, target_offset: int, source: Array, source_offset: int, mask: Mask,
    site: int,
) -> None:  # fmt: skip
    """The lanes of each warp together copy a map from shared to global memory, 4 bytes each."""
    if mask is not None and not mask.any():
        return
    own = np.arange(0, DESCRIPTOR_BYTES, 4, dtype=np.uint64)[:, None]
    values = x.load(
        "shared", x.array(source).astype(np.uint64) + own, source_offset, 4, 1, mask, site
    )
    x.store("global", x.array(target).astype(np.uint64) + own, target_offset, 4, values, mask, site)
