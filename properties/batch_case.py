"""Cases of batched attention and how Hypothesis draws them: requests of any lengths, layouts,
variants and plans.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from properties.compare import Expected
from properties.data import KINDS, attention_inputs
from simkit.algorithms.batch_attention import BatchResult
from simkit.algorithms.batch_bounds import batch_bounds, has_bounds
from simkit.algorithms.batch_problem import BatchProblem, batch_reference
from simkit.algorithms.elements import BF16, E4M3, F16
from simkit.algorithms.variant import UserVariant, Variant, rope_angles
from simkit.layouts import custom_mask
from simkit.layouts.paged import random_cache, random_rows
from simkit.layouts.ragged import Ragged
from simkit.machine.gpus import Gpu
from simkit.numerics.formats import encode_e4m3
from simkit.planning.decode import decode_plan
from simkit.planning.plan import Plan
from simkit.planning.prefill import prefill_plan

Array = np.ndarray[Any, Any]

ELEMENTS = {"bf16": BF16, "f16": F16, "e4m3": E4M3}
FEATURES = ("causal", "custom_mask", "soft_cap", "alibi", "sink", "rope")
"""What ``BatchCase.variant`` may name, joined by "+", beside one of USER_VARIANTS."""

SM_COUNT = 8
"""Of the GPU that plans are made for: small, so that short requests are split."""

_NAN_FREE = 0.35  # of the bits of a custom mask


@dataclass(frozen=True)
class BatchCase:
    """Requests with ``q_lens`` queries and ``kv_lens`` keys.

    ``page_size`` 0: ragged K and V; otherwise pages, at random places, NaN and infinity in what is
    unused; ``shared``: full pages of the same tokens are one page. ``variant``: FEATURES joined by
    "+". ``window_left`` -1: none. ``split``: keys of a chunk; 0 lets the planner choose, -1
    forbids. ``graph``: a plan for a CUDA graph, with CTAs without work; not with a fixed split, for
    which a captured grid may be too small. ``cuda_cores``: decoding
    on those. ``data``: properties.data.KINDS.
    """

    q_lens: tuple[int, ...] = (64,)
    kv_lens: tuple[int, ...] = (64,)
    kv_heads: int = 1
    group: int = 1
    d: int = 64
    dv: int = 64
    element: str = "bf16"
    kv: str = "same"
    page_size: int = 0
    order: str = "NHD"
    index_bits: int = 32
    shared: bool = False
    variant: str = ""
    window_left: int = -1
    tile_q: int = 64
    split: int = -1
    graph: bool = False
    cuda_cores: bool = False
    data: str = "normal"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("q_lens", "kv_lens"):  # JSON has lists
            object.__setattr__(self, name, tuple(getattr(self, name)))
        known = (*FEATURES, *USER_VARIANTS)
        if not set(filter(None, self.variant.split("+"))) <= set(known):
            raise ValueError(f"variant {self.variant!r}: there are {', '.join(known)}")

    def has(self, feature: str) -> bool:
        return feature in self.variant.split("+")

    @cached_property
    def problem(self) -> BatchProblem:
        # Scales, pages and the variant each have numbers of their own: none changes the others.
        scales, pages, variant = np.random.default_rng(self.seed).spawn(3)
        index = np.dtype(f"i{self.index_bits // 8}")
        queries = Ragged.from_lengths(np.array(self.q_lens, np.int64), index)
        ragged = Ragged.from_lengths(np.array(self.kv_lens, np.int64), index)
        q, k, v = self._values(queries.total, ragged.total)
        k_scale = v_scale = 1.0
        if self.kv == "e4m3":
            k_scale, v_scale = (float(x) for x in 2.0 ** scales.uniform(-2, 2, 2))
            k, v = _quantised(k, k_scale), _quantised(v, v_scale)
        keys: Any = ragged
        if self.page_size:
            content = None
            if self.shared:
                # Requests share a prefix of tokens, half of the first request's.
                content, k, v = _shared_prefix(ragged, k, v)
            keys = random_rows(
                pages, ragged, page_size=self.page_size, dtype=index, content=content
            )
            k, v = (random_cache(pages, keys, x, self.order).values for x in (k, v))  # type: ignore[arg-type]
        return BatchProblem(
            q=q, k=k, v=v, queries=queries, keys=keys, order=self.order,  # type: ignore[arg-type]
            variant=self._variant(variant), k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip

    def _values(self, rows: int, keys: int) -> tuple[Array, Array, Array]:
        heads = self.kv_heads * self.group
        q, k, v = attention_inputs(
            self.data, self.seed, (1, rows, heads, self.d), (1, keys, self.kv_heads, self.d)
        )
        # Other columns of V are those of other keys.
        wide = [np.roll(v, turn, axis=1) for turn in range(-(-self.dv // self.d))]
        v = np.concatenate(wide, axis=-1)[..., : self.dv]
        dtype = ELEMENTS[self.element]
        with np.errstate(all="ignore"):
            q, k, v = (x[0].astype(np.float32).astype(dtype) for x in (q, k, v))
        return q, k, v

    def _variant(self, rng: np.random.Generator) -> Variant:
        heads = self.kv_heads * self.group
        mask = None
        if self.has("custom_mask"):
            mask = custom_mask.pack(
                [
                    rng.random((q, kv)) > _NAN_FREE * rng.random()
                    for q, kv in zip(self.q_lens, self.kv_lens, strict=True)
                ]
            )
        slopes = (2.0 ** -rng.uniform(0, 8, heads)).astype(np.float32)
        sinks = rng.normal(0, 3, heads).astype(np.float32)
        longest = max(*self.kv_lens, 1, 1)
        return Variant(
            causal=self.has("causal"),
            window_left=self.window_left,
            custom_mask=mask,
            soft_cap=float(rng.choice((1.0, 15.0, 50.0))) if self.has("soft_cap") else 0.0,
            alibi_slopes=slopes if self.has("alibi") else None,
            sinks=sinks if self.has("sink") else None,
            rope=rope_angles(longest, self.d) if self.has("rope") else None,
            user=next((own for name, own in USER_VARIANTS.items() if self.has(name)), None),
        )

    @cached_property
    def plan(self) -> Plan:
        """Of batch_prefill_*; decoding has `decode_plan`. A user's outputs are never split."""
        problem = self.problem
        user = problem.variant.user
        is_whole = self.split < 0 or (user is not None and user.output is not None)
        sizes: dict[str, Any] = {"disable_split": True} if is_whole else {}
        if self.split > 0 and not is_whole:
            pages = max(self.page_size, 1)
            sizes = {"fixed_split": -(-self.split // pages) * pages}
        return prefill_plan(
            problem.queries.indptr, problem.kv_lens, group=self.group, kv_heads=self.kv_heads,
            head_dim_v=self.dv, page_size=max(self.page_size, 1), sm_count=SM_COUNT,
            window_left=self.window_left, causal=self.has("causal"), tile_q=self.tile_q,
            graph=self.graph and self.split <= 0 and (user is None or user.output is None), **sizes,
        )  # fmt: skip

    @property
    def units(self) -> Any:
        return "cuda_cores" if self.cuda_cores else "tensor_cores"


def _quantised(x: Array, scale: float) -> Array:
    """x / scale as e4m3, saturated."""
    with np.errstate(all="ignore"):
        scaled = (x.astype(np.float64) / scale).astype(np.float32)
    return encode_e4m3(scaled).view(E4M3)


def _shared_prefix(ragged: Ragged, k: Array, v: Array) -> tuple[Array, Array, Array]:
    """Numbers of the tokens, and K and V, in which requests begin like the longest one."""
    lens, starts = ragged.lens, ragged.indptr.astype(np.int64)
    content = np.arange(ragged.total)
    if not lens.size or not ragged.total:
        return content, k, v
    longest = int(lens.argmax())
    for request, length in enumerate(lens):
        common = min(int(length), int(lens[longest]) // 2)
        own = starts[request] + np.arange(common)
        content[own] = starts[longest] + np.arange(common)
    return content, k[content], v[content]


EXAMPLE_VARIANT = UserVariant(
    name="damped",
    cuda="""
  // values[0]: how much logits of odd keys are damped; values[1]: a key that nobody sees;
  // values[2]: by how much outputs are scaled.
  static __device__ __forceinline__ float logit(float logit, const Place& at, const float* values) {
    return at.key % 2 ? __fmul_rn(logit, values[0]) : logit;
  }
  static __device__ __forceinline__ bool visible(const Place& at, const float* values) {
    return static_cast<float>(at.key) != values[1];
  }
  static __device__ __forceinline__ float output(float output, const Place& at, int dimension,
                                                 const float* values) {
    return dimension % 2 ? __fmul_rn(output, values[2]) : output;
  }
""",
    logit=lambda logit, at, values: np.where(at.key % 2 == 1, logit * values[0], logit),
    visible=lambda at, values: at.key != values[1],
    output=lambda output, at, dimension, values: np.where(
        dimension % 2 == 1, output * values[2], output
    ),
    values=np.array([0.25, 3.0, 1.5], np.float32),
)
"""A variant as a user may write one, in CUDA C++ and in NumPy."""

USER_VARIANTS: dict[str, UserVariant] = {EXAMPLE_VARIANT.name: EXAMPLE_VARIANT}
"""Variants by name; a user's own one is added for its laws (properties.user_variant)."""


# Drawing cases

PAGE_SIZES = st.integers(1, 257) | st.sampled_from((1, 2, 7, 16, 64, 128, 257))
GROUPS = st.integers(1, 16) | st.sampled_from((1, 4, 7, 8))
MOST_REQUESTS = 64
LONGEST = 3000

# Tiles of queries times tiles of keys of a case, so that a law takes seconds.
_MOST_WORK = 250


def lengths(most: int) -> SearchStrategy[int]:
    """Lengths of requests: none, few, at the edges of tiles of 64, and any."""
    edges = [n for k in range(1, most // 64 + 1) for n in (64 * k - 1, 64 * k, 64 * k + 1)]
    return st.one_of(
        st.sampled_from((0, 1, 2)),
        st.integers(0, min(most, 40)),
        st.sampled_from([n for n in edges if n <= most] or [most]),
        st.integers(0, most),
    )


def batch_cases(
    configurations: tuple[dict[str, Any], ...],
    *,
    most_queries: int = 300,
    decode: bool = False,
    paged: bool = True,
) -> SearchStrategy[BatchCase]:
    """Batches of 1 to 64 requests, up to 3,000 keys each, in one of ``configurations`` (fields of a
    case that kernels are compiled for; "window": with a left window).

    ``decode``: one query each. ``paged``: K and V in pages, otherwise ragged.
    """
    queries = st.just(1) if decode else lengths(most_queries)
    few, many = st.tuples(queries, lengths(150)), st.tuples(queries, lengths(LONGEST))
    # Hypothesis hardly draws long lists unless it must.
    requests = st.one_of(
        st.lists(few, min_size=1, max_size=6),
        st.integers(1, 6).flatmap(lambda size: st.lists(many, min_size=size, max_size=size)),
        st.integers(7, MOST_REQUESTS).flatmap(
            lambda size: st.lists(many, min_size=size, max_size=size)
        ),
    )

    @st.composite
    def draw_case(draw: st.DrawFn) -> BatchCase:
        fields = dict(draw(st.sampled_from(configurations)))
        group = fields.setdefault("group", draw(GROUPS))
        kv_heads = draw(st.integers(1, 2))
        if fields.get("cuda_cores"):
            fields["tile_q"] = group
        tile_q = fields.get("tile_q", 64)
        chosen = _affordable(draw(requests), group * kv_heads, tile_q)
        if fields.pop("window", False):
            longest = max(kv for _, kv in chosen)
            fields["window_left"] = draw(st.integers(0, longest) | st.integers(0, 70))
        if paged:
            fields["page_size"] = draw(PAGE_SIZES)
            fields["shared"] = draw(st.booleans())
        return BatchCase(
            q_lens=tuple(q for q, _ in chosen),
            kv_lens=tuple(kv for _, kv in chosen),
            kv_heads=kv_heads,
            split=draw(st.sampled_from((-1, 0, 64, 200))),
            graph=draw(st.booleans()),
            data=draw(st.sampled_from(KINDS)),
            seed=draw(st.integers(0, 2**16 - 1)),
            **fields,
        )

    return draw_case()


def _affordable(requests: list[tuple[int, int]], heads: int, tile_q: int) -> list[tuple[int, int]]:
    """The requests, lengths halved until the work on them takes seconds."""

    def work() -> int:
        return sum(-(-q * heads // tile_q) * -(-kv // 64) for q, kv in requests)

    while work() > _MOST_WORK:
        request = max(range(len(requests)), key=lambda i: requests[i][0] * requests[i][1])
        q, kv = requests[request]
        requests[request] = (q, kv // 2) if kv > q else (q // 2, kv)
    return requests


def decode_case_plan(case: BatchCase) -> Plan:
    """The plan of batch_decode: the tensor-core planner, or that of CUDA cores."""
    problem = case.problem
    user = problem.variant.user
    if case.cuda_cores and case.split == 0 and (user is None or user.output is None):
        return decode_plan(
            problem.kv_lens, group=case.group, kv_heads=case.kv_heads,
            page_size=max(case.page_size, 1), max_grid=2 * SM_COUNT, graph=case.graph,
        )  # fmt: skip
    return case.plan


def batch_outputs(result: BatchResult) -> dict[str, Array]:
    """What a model leaves, by tensor name."""
    found = {"o": result.o, "lse": result.lse}
    if result.partial_o is not None and result.partial_lse is not None:
        found |= {"partial_o": result.partial_o, "partial_lse": result.partial_lse}
    return found


def batch_expected(gpu: Gpu, case: BatchCase, plan: Plan) -> dict[str, Expected]:
    """The solution in float64 with bounds; nothing follows for a user's own transforms."""
    problem = case.problem
    if not has_bounds(problem):
        return {}
    o, lse = batch_reference(problem)
    bounds = batch_bounds(problem, plan, gpu.arch, case.units)
    return {
        "o": Expected(o, bounds.o, f"P and O in {problem.q.dtype}, all else in float32"),
        "lse": Expected(lse, bounds.lse, "rounding of logits, sums and logarithm"),
    }
