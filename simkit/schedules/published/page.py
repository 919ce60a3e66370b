"""docs/published.md: every predicted figure beside the published one, with reasons for misses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from simkit.machine.gpus import H100
from simkit.schedules.parameters import PARAMETERS
from simkit.schedules.published.accuracy import WITHIN, Accuracy, Compared

_HEAD = """# Predicted against published

<!-- Written by `make docs` (simkit report published --markdown docs/published.md). -->

The cycle model simulates an SM, event by event, from the rates of the device table and the few
parameters below.  Nothing is fitted to a kernel, a head dimension or a row.  *bound by*: the
resource that holds the schedule back, "latency" where none does, and "power" where the clock had to
go down to stay within the board's power.
"""

_MODEL = """## What the model takes from where

- **Rates** of tensor cores, pipes, shared memory, L2 and HBM: `simkit gpus h100` shows each with
  its source.
- **Issue**: a warpgroup's `wgmma` waits in the warp until the tensor cores take it, so that softmax
  of a warpgroup starts when its last product has started, and warpgroups share the tensor cores
  product by product.
- **Conversions** to 16 and 8 bits share the pipe of `ex2`, two values an instruction.
- **Power**: a product costs {tensor:.3g} pJ per FLOP at {clock:.4g} GHz (the best measured matrix
  product: 722.5 TFLOP/s at 681 W and 1612 MHz on an H200, whose SMs are the H100's), an instruction
  {lane:.3g} pJ a lane; dynamic power goes with the cube of the clock. The clock is what a board of
  {board:.0f} W then allows, up to {most:.4g} GHz. FlashMLA's notes put it at about 1.6 GHz.

| parameter | value | unit | source |
|---|---|---|---|
"""


def page(found: Sequence[Compared], total: Accuracy) -> str:
    """The page as Markdown."""
    return "\n".join(_lines(found, total)) + "\n"


def _lines(found: Sequence[Compared], total: Accuracy) -> Iterator[str]:
    yield _HEAD
    yield (
        f"**{total.rows} rows count** (sequences of 2,048 or more): median error "
        f"{total.median:.1%}, {total.within:.0%} within {WITHIN:.0%}; "
        f"{len(total.broken)} published orders are wrong."
    )
    yield ""
    for group, members in groupby(found, key=lambda one: one.row.group):
        rows = list(members)
        yield f"## {group}"
        yield ""
        yield "| row | predicted | published | unit | error | bound by |"
        yield "|---|--:|--:|---|--:|---|"
        for one in rows:
            name = one.row.name.removeprefix(group).strip() or one.row.name
            yield (
                f"| {name} | {one.predicted:,.4g} | {one.row.published:,.4g} | {one.row.unit} "
                f"| {one.error:+.1%} | {one.bound} |"
            )
        yield ""
        for source in dict.fromkeys(one.row.source for one in rows):
            yield f"Source: {source}."
        for note in dict.fromkeys(one.row.note for one in rows if one.row.note):
            yield f"Note: {note}."
        yield ""
    assert H100.tensor_j_per_flop
    assert H100.lane_j
    yield _MODEL.format(
        tensor=H100.tensor_j_per_flop * 1e12,
        lane=H100.lane_j * 1e12,
        clock=H100.energy_clock_hz / 1e9,
        board=H100.board_w,
        most=H100.tensor_clock_hz / 1e9,
    ).rstrip("\n")
    for parameter in PARAMETERS:
        yield (
            f"| {parameter.name} | {parameter.value:g} | {parameter.unit} | {parameter.source} |"
        )
