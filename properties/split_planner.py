"""Laws of the split heuristics, of FlashInfer's decode planner and of FlashMLA's scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from properties.law import Context, Law, LawViolation
from properties.plan_case import PlanCase, plan_cases
from properties.plan_coverage import check_coverage, check_plan_states, plan_pieces
from properties.prefill_planner import check_graham, check_smallest
from simkit.planning.decode import decode_plan
from simkit.planning.flashmla import MlaPiece, TileSchedule, pieces, tile_schedule
from simkit.planning.plan import Plan, coverage
from simkit.planning.split_planner import SPLIT_PLANNERS
from simkit.planning.splits import (
    FEW_BLOCKS,
    MOST_SPLITS,
    fa2_splits,
    fa3_dynamic_splits,
    fa3_splits,
    fa4_splits,
    split_blocks,
    visible_blocks,
)

NAME = "split_planner"

FLOAT32_SLACK = Fraction(1, 2**21)
"""Relative error of an efficiency: three float32 roundings, of at most 2^-24 each, and of 0.85."""


@dataclass(frozen=True)
class SplitCase:
    """A launch: ``units`` tiles on ``slots``, ``blocks`` of keys each."""

    units: int = 8
    slots: int = 264
    blocks: int = 64
    cap: int = MOST_SPLITS


@dataclass(frozen=True)
class BlockCase:
    """Lengths, tile and window of one request, and a number of splits; -1: no bound."""

    q_len: int = 1
    kv_len: int = 300
    block_m: int = 64
    block_n: int = 128
    group: int = 1
    window_left: int = -1
    window_right: int = -1
    splits: int = 2
    longer: int = 0


@dataclass(frozen=True)
class SchedulerCase:
    """FlashMLA's inputs: ``case`` has the lengths, as a `PlanCase` does."""

    batch: int = 1
    keys: str = "uniform"
    most_keys: int = 1024
    parts: int = 66
    overhead: int = 5
    seed: int = 0

    @property
    def lengths(self) -> np.ndarray:
        return PlanCase(
            batch=self.batch, keys=self.keys, most_keys=self.most_keys, seed=self.seed
        ).kv_lens


def check_answer_range(context: Context, case: SplitCase) -> None:
    most = max(min(case.cap, case.slots, case.blocks), 1)
    answers = _answers(case)
    for name, splits in answers.items():
        if not 1 <= splits <= most:
            raise LawViolation(f"{name} gives {splits} splits; 1 to {most} make sense")
    # Enough tiles for 80 % of the slots; exactly so, float32 rounds 0.8 up.
    if Fraction(case.units, case.slots) > Fraction(8, 10) + FLOAT32_SLACK and answers["fa2"] != 1:
        raise LawViolation(f"fa2 gives {answers['fa2']} splits for slots that are full without")


def _answers(case: SplitCase) -> dict[str, int]:
    return {
        "fa2": fa2_splits(case.units, case.slots, case.blocks, cap=case.cap),
        "fa3": fa3_splits(case.units, case.slots, case.blocks, cap=case.cap),
        "fa4": fa4_splits(case.units, case.slots, case.blocks, cap=case.cap),
    }


def check_fewest_good(context: Context, case: SplitCase) -> None:
    """By exact fractions, within the rounding of the source's float32."""
    if Fraction(case.units, case.slots) >= Fraction(8, 10) - FLOAT32_SLACK:
        return
    most = min(case.cap, case.slots, case.blocks)

    def efficiency(splits: int) -> Fraction:
        waves = Fraction(case.units * splits, case.slots)
        return waves / -(-waves.numerator // waves.denominator)

    def is_new(splits: int) -> bool:
        """Whether it cuts the blocks differently than one split less."""
        return splits == 1 or -(-case.blocks // splits) != -(-case.blocks // (splits - 1))

    candidates = {"fa3": list(range(1, most + 1))}
    candidates["fa2"] = [splits for splits in candidates["fa3"] if is_new(splits)]
    answers = _answers(case)
    for name, allowed in candidates.items():
        answer = answers[name]
        if (name == "fa3" and case.blocks <= FEW_BLOCKS) or not allowed:
            wanted = answer == 1
        else:
            best = max(map(efficiency, allowed)) * Fraction(85, 100)
            fewer = [splits for splits in allowed if splits < answer]
            wanted = (
                answer in allowed
                and efficiency(answer) >= best * (1 - FLOAT32_SLACK)
                and all(efficiency(splits) <= best * (1 + FLOAT32_SLACK) for splits in fewer)
            )
        if not wanted:
            raise LawViolation(f"{name} gives {answer} splits, not the fewest good ones")


def check_monotone(context: Context, case: SplitCase) -> None:
    """What holds; FlashAttention-2 answers less often for more blocks, by its eligibility."""
    now = _answers(case)
    longer = _answers(replace(case, blocks=case.blocks + 1))
    for name in ("fa3", "fa4"):
        if longer[name] < now[name]:
            raise LawViolation(f"{name} gives {now[name]} splits, {longer[name]} for a block more")
    more_units = _answers(replace(case, units=case.units + 1))
    if more_units["fa4"] > now["fa4"]:
        raise LawViolation(f"fa4 gives {now['fa4']} splits, {more_units['fa4']} for a tile more")


def check_blocks(context: Context, case: BlockCase) -> None:
    """Blocks by trying every key of every row; then both ways of cutting them."""
    rows = case.q_len * case.group
    for tile in range(-(-rows // case.block_m)):
        packed = range(tile * case.block_m, min((tile + 1) * case.block_m, rows))
        seen: set[int] = set()
        for query in {row // case.group for row in packed}:
            own = query + case.kv_len - case.q_len
            low = 0 if case.window_left < 0 else max(own - case.window_left, 0)
            high = case.kv_len if case.window_right < 0 else own + case.window_right + 1
            seen |= {key // case.block_n for key in range(low, min(high, case.kv_len))}
        blocks = visible_blocks(
            tile,
            block_m=case.block_m,
            block_n=case.block_n,
            q_len=case.q_len,
            kv_len=case.kv_len,
            window_left=case.window_left,
            window_right=case.window_right,
            group=case.group,
        )
        if list(blocks) != sorted(seen):
            raise LawViolation(f"tile {tile} has blocks {blocks}, its rows see {sorted(seen)}")
        longest = -(-case.kv_len // case.block_n) + case.longer
        for cut_at in (None, longest):
            parts = split_blocks(blocks, case.splits, longest=cut_at)
            if len(parts) != case.splits or [n for part in parts for n in part] != list(blocks):
                raise LawViolation(f"{blocks} cut into {parts}, of the longest {cut_at}")
            share = -(-(len(blocks) if cut_at is None else cut_at) // case.splits)
            if max(map(len, parts)) > share:
                raise LawViolation(f"{blocks} cut into {parts}; {share} blocks are a share")


def check_dynamic(context: Context, case: PlanCase) -> None:
    """Splits of each request: within the cap, no piece over a fair share, by length alone."""
    block_n, cap = 128, 1 + case.most_queries % MOST_SPLITS
    tiles = -(-case.q_lens * case.group // 64)
    blocks = -(-case.kv_lens // block_n)

    def splits(order: np.ndarray) -> np.ndarray:
        return fa3_dynamic_splits(
            tiles[order], blocks[order], heads=case.kv_heads, sm_count=case.sm_count, cap=cap
        )

    order = case.rng().permutation(case.batch)
    found = splits(np.arange(case.batch))
    if found.min() < 1 or found.max() > cap:
        raise LawViolation(f"splits are {found.min()} to {found.max()}; 1 to {cap} make sense")
    if splits(order).tolist() != found[order].tolist():
        raise LawViolation("a request has other splits in another order")
    by_length = found[np.argsort(blocks, kind="stable")]
    if (np.diff(by_length) < 0).any():
        raise LawViolation("a longer request has fewer splits than a shorter one")
    total = int((tiles * blocks).sum())
    share = Fraction(11, 10) * total * case.kv_heads / case.sm_count * (1 + FLOAT32_SLACK)
    for own, count in zip(found.tolist(), blocks.tolist(), strict=True):
        piece = -(-count // own)
        if own < cap and piece > max(share + 1, 1):
            raise LawViolation(f"{own} splits of {count} blocks; {float(share):.1f} are a share")
        if own > 1 and -(-count // (own - 1)) < share:
            raise LawViolation(f"{own} splits of {count} blocks; {own - 1} were small enough")


def _decode(case: PlanCase, **changes: object) -> Plan:
    arguments: dict[str, object] = {
        "group": case.group,
        "kv_heads": case.kv_heads,
        "page_size": case.page,
        "max_grid": 2 * case.sm_count,
        "graph": case.graph,
    }
    return decode_plan(case.kv_lens, **(arguments | changes))  # type: ignore[arg-type]


def _without_mask(case: PlanCase) -> PlanCase:
    return replace(case, queries="one", most_queries=1, window_left=-1, causal=False)


def check_decode_coverage(context: Context, case: PlanCase) -> None:
    case = _without_mask(case)
    plan = _decode(case)
    keys = coverage(plan, case.qo_indptr, case.kv_lens, group=case.group)
    check_coverage(case, plan_pieces(plan, keys), heads=1, group=case.group)
    check_plan_states(case, plan)


def check_decode_grid(context: Context, case: PlanCase) -> None:
    """The plans of one graph, and without a graph no more CTAs than the GPU holds."""
    plan = _decode(case)
    if len(plan.requests) > plan.grid:
        raise LawViolation(f"{len(plan.requests)} items exceed the grid of {plan.grid}")
    if plan.is_split and plan.grid * case.kv_heads > 2 * case.sm_count:
        raise LawViolation(f"{plan.grid * case.kv_heads} CTAs on {2 * case.sm_count} slots")
    if not case.graph:
        return
    for kind in ("none", "equal", "one_long"):
        other = _decode(replace(case, keys=kind))
        if (other.grid, other.is_split) != (plan.grid, plan.is_split):
            raise LawViolation(
                f"grid {plan.grid} and split {plan.is_split} become {other.grid} and "
                f"{other.is_split} for other lengths"
            )


def check_decode_chunk(context: Context, case: PlanCase) -> None:
    plan = _decode(case)
    most = max(-(-int(case.kv_lens.max()) // case.page), 1)
    pages = plan.kv_chunk // case.page

    def items(size: int) -> int:
        return int(np.maximum(-(-case.kv_lens // (size * case.page)), 1).sum())

    if case.batch * case.kv_heads >= 2 * case.sm_count:
        if pages != most or plan.is_split:
            raise LawViolation(f"chunks of {pages} of {most} pages, though requests fill the grid")
        return
    bound = 2 * case.sm_count // case.kv_heads
    least = max(128 // case.page, 1)
    check_smallest(pages=pages, least=least, most=most, items=items, bound=bound)


def check_flashmla(context: Context, case: SchedulerCase) -> None:
    lengths = case.lengths
    schedule = tile_schedule(lengths, case.parts, overhead=case.overhead)
    found = [*pieces(schedule, lengths)]
    if len(schedule.parts) != case.parts:
        raise LawViolation(f"{len(schedule.parts)} of {case.parts} parts")
    if schedule.num_splits[-1] > case.batch + case.parts - 1:
        raise LawViolation(f"{schedule.num_splits[-1]} splits of {case.batch} requests")
    if [piece.slot for piece in found] != list(range(int(schedule.num_splits[-1]))):
        raise LawViolation("slots of partial states are not 0, 1, 2, ... in order of the parts")
    for request, length in enumerate(lengths.tolist()):
        own = [piece for piece in found if piece.request == request]
        _check_request(schedule, request, -(-length // 64), own)
    for number in range(case.parts):
        load = sum(
            piece.stop - piece.start + case.overhead for piece in found if piece.part == number
        )
        if load > schedule.payload:
            raise LawViolation(f"part {number} has {load} of {schedule.payload} blocks")


def _check_request(schedule: TileSchedule, request: int, blocks: int, own: list[MlaPiece]) -> None:
    """Its pieces part its blocks, and merge if there is more than one."""
    at = 0
    for piece in own:
        if piece.start != at or piece.stop < at:
            raise LawViolation(f"request {request}: blocks {piece.start} to {piece.stop} at {at}")
        if piece.is_split != (len(own) > 1):
            raise LawViolation(f"request {request}: {len(own)} pieces, split {piece.is_split}")
        at = piece.stop
    slots = int(schedule.num_splits[request + 1] - schedule.num_splits[request])
    if at != blocks or slots != len(own):
        raise LawViolation(
            f"request {request}: {at} of {blocks} blocks in {len(own)} pieces with {slots} slots"
        )


def check_load(context: Context, case: PlanCase) -> None:
    """What the planners' items load, and how a GPU that takes them in order is loaded."""
    problem = _without_mask(case).problem()
    for name, planner in SPLIT_PLANNERS.items():
        outcome = planner(problem, case.sm_count)
        keys = np.zeros(case.batch, np.int64)
        of_one_head = outcome.items[outcome.items[:, 2] == 0]
        np.add.at(keys, of_one_head[:, 0], of_one_head[:, 4] - of_one_head[:, 3])
        if keys.tolist() != problem.kv_lens.tolist():
            raise LawViolation(f"{name}: items have {keys.tolist()} keys of {problem.kv_lens}")
        if name != "flashmla":  # which fills parts up to a payload instead
            placement = outcome.placement
            check_graham(name, placement, placement.costs, placement.worker)


def split_cases() -> SearchStrategy[SplitCase]:
    return st.builds(
        SplitCase,
        units=st.integers(1, 400),
        slots=st.one_of(st.sampled_from((108, 132, 216, 264)), st.integers(1, 300)),
        blocks=st.one_of(st.integers(0, 300), st.integers(0, 10_000)),
        cap=st.one_of(st.just(MOST_SPLITS), st.integers(1, MOST_SPLITS)),
    )


def block_cases() -> SearchStrategy[BlockCase]:
    return st.builds(
        BlockCase,
        q_len=st.integers(1, 100),
        kv_len=st.integers(0, 400),
        block_m=st.sampled_from((16, 64, 128)),
        block_n=st.sampled_from((64, 80, 128, 176)),
        group=st.sampled_from((1, 3, 7, 8)),
        window_left=st.one_of(st.just(-1), st.integers(0, 200)),
        window_right=st.one_of(st.just(-1), st.just(0), st.integers(0, 200)),
        splits=st.integers(1, 9),
        longer=st.integers(0, 9),
    )


def scheduler_cases() -> SearchStrategy[SchedulerCase]:
    return st.builds(
        SchedulerCase,
        batch=st.integers(1, 64),
        keys=st.sampled_from(("equal", "uniform", "often_empty", "one_long", "none")),
        most_keys=st.one_of(st.integers(0, 3000), st.sampled_from((2**17, 2**31 - 1))),
        parts=st.one_of(st.sampled_from((1, 33, 66, 132, 148)), st.integers(1, 148)),
        overhead=st.sampled_from((3, 5)),
        seed=st.integers(0, 2**16 - 1),
    )


_DECODE_CORNERS = (
    PlanCase(batch=4, keys="uniform", most_keys=8192),
    PlanCase(batch=20, keys="one_long", most_keys=8192, graph=True, sm_count=108),
    PlanCase(batch=20, keys="often_empty", most_keys=3000, graph=True),
    PlanCase(batch=64, keys="uniform", most_keys=8192, sm_count=7),
    PlanCase(batch=2, keys="none", graph=True),
)


def _law(
    name: str,
    statement: str,
    check: Callable[[Context, PlanCase], None],
    strategy: SearchStrategy[PlanCase],
) -> Law:
    return Law(
        algorithm=NAME,
        name=name,
        tier="exact",
        statement=statement,
        check=check,
        strategy=strategy,
        case_type=PlanCase,
        corners=_DECODE_CORNERS,
        uses_device=False,
    )


def _split_law(
    name: str, statement: str, check: Callable[[Context, SplitCase], None], examples: int
) -> Law:
    return Law(
        algorithm=NAME,
        name=name,
        tier="exact",
        statement=statement,
        check=check,
        strategy=split_cases(),
        case_type=SplitCase,
        corners=(SplitCase(), SplitCase(48, 108, 500), SplitCase(1, 132, 1, 1)),
        examples=examples,
        uses_device=False,
    )


LAWS = [
    _split_law(
        "answer_range",
        "FlashAttention's answers are 1 to the fewest of cap, slots and blocks",
        check_answer_range,
        200,
    ),
    _split_law(
        "fewest_good",
        "the fewest splits, of those that cut differently, within 85 % of the best efficiency",
        check_fewest_good,
        100,
    ),
    _split_law(
        "monotone",
        "a block more never means fewer splits (3, 4), a tile more never more (4)",
        check_monotone,
        200,
    ),
    Law(
        algorithm=NAME,
        name="blocks",
        tier="exact",
        statement="splits part the blocks of which a tile's rows see keys, none over its share",
        check=check_blocks,
        strategy=block_cases(),
        case_type=BlockCase,
        corners=(BlockCase(), BlockCase(q_len=90, kv_len=30, window_right=0, group=7)),
        uses_device=False,
    ),
    _law(
        "dynamic",
        "splits of each request are as few as a fair share of an SM admits, whatever the order",
        check_dynamic,
        plan_cases(),
    ),
    _law(
        "decode_coverage",
        "each key is in one item of its request, each item has a place for its state",
        check_decode_coverage,
        plan_cases(decode=True),
    ),
    _law(
        "decode_grid",
        "items fit the grid; under a graph, grid and merging do not depend on lengths",
        check_decode_grid,
        plan_cases(decode=True),
    ),
    _law(
        "decode_chunk",
        "the chunk is the smallest number of pages, at least 128 keys, whose items fit",
        check_decode_chunk,
        plan_cases(decode=True),
    ),
    Law(
        algorithm=NAME,
        name="flashmla",
        tier="exact",
        statement="parts have each block once and at most the payload; splits are numbered in turn",
        check=check_flashmla,
        strategy=scheduler_cases(),
        case_type=SchedulerCase,
        corners=(SchedulerCase(), SchedulerCase(3, "none", 0, 2), SchedulerCase(1, "one", 1, 4)),
        examples=50,
        uses_device=False,
    ),
    _law(
        "load_bound",
        "items have each key once; the longest worker has at most total / workers + "
        "(1 - 1 / workers) * largest",
        check_load,
        plan_cases(decode=True),
    ),
]
