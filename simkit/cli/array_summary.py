"""What an array holds, in a line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SHOWN_ELEMENTS = 4

Number = int | float


@dataclass(frozen=True)
class ArraySummary:
    """Type, first elements, numbers of NaNs and infinities, least and greatest finite element.

    ``minimum`` and ``maximum`` are None where no element is finite.
    """

    dtype: str
    shape: tuple[int, ...]
    first: tuple[Number, ...]
    nans: int
    infinities: int
    minimum: Number | None
    maximum: Number | None

    def cells(self) -> tuple[str, ...]:
        """Cells of a table: type, first elements, NaNs, infinities, minimum, maximum."""
        more = " …" if int(np.prod(self.shape)) > len(self.first) else ""
        return (
            f"{self.dtype} {list(self.shape)}",
            " ".join(map(_text, self.first)) + more,
            str(self.nans),
            str(self.infinities),
            *("" if end is None else _text(end) for end in (self.minimum, self.maximum)),
        )


def summarise(array: NDArray[Any]) -> ArraySummary:
    """The summary of an array of any dtype that has numbers."""
    flat = array.reshape(-1)
    if flat.dtype.kind not in "iu":
        flat = flat.astype(np.float64)  # bfloat16 and fp8 are NumPy's only in part
    finite = flat[np.isfinite(flat)]
    return ArraySummary(
        str(array.dtype),
        array.shape,
        tuple(value.item() for value in flat[:_SHOWN_ELEMENTS]),
        int(np.isnan(flat).sum()),
        int(np.isinf(flat).sum()),
        finite.min().item() if finite.size else None,
        finite.max().item() if finite.size else None,
    )


def _text(value: Number) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"
