"""Each algorithm as the cycle model times it: problem, choices, launches."""

from __future__ import annotations

from simkit.cli.timed.attention import ATTENTION
from simkit.cli.timed.decoding import DECODING
from simkit.cli.timed.mla import MLA
from simkit.cli.timed.timed import Timed
from simkit.errors import SimkitError

TIMED: dict[str, Timed] = {row.name: row for row in (*ATTENTION, *DECODING, *MLA)}


def timed(name: str) -> Timed:
    """The schedule of that name; SimkitError that lists the names otherwise."""
    if name not in TIMED:
        raise SimkitError(f"no schedule {name!r}; there are {', '.join(TIMED)}")
    return TIMED[name]
