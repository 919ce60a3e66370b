"""All laws by algorithm."""

from __future__ import annotations

from properties import (
    batch_decode,
    batch_prefill_paged,
    batch_prefill_ragged,
    block_sparse_attention,
    cascade_attention,
    engine,
    flash_attention,
    flash_decoding,
    fp8_error_study,
    fp8_kv_cache,
    grid,
    kv_append,
    launches,
    merge_states,
    naive_attention,
    prefill_planner,
    split_planner,
)
from properties.law import Law
from simkit.errors import SimkitError

_LAWS: dict[str, list[Law]] = {
    "naive_attention": naive_attention.LAWS,
    "flash_attention": flash_attention.LAWS,
    "flash_decoding": flash_decoding.LAWS,
    "fp8_kv_cache": fp8_kv_cache.LAWS,
    "fp8_error_study": fp8_error_study.LAWS,
    "kv_append": kv_append.LAWS,
    "batch_decode": batch_decode.LAWS,
    "batch_prefill_paged": batch_prefill_paged.LAWS,
    "batch_prefill_ragged": batch_prefill_ragged.LAWS,
    "block_sparse_attention": block_sparse_attention.LAWS,
    "merge_states": merge_states.LAWS,
    "cascade_attention": cascade_attention.LAWS,
    "split_planner": split_planner.LAWS,
    "prefill_planner": prefill_planner.LAWS,
    "engine": engine.LAWS,
    "grid": grid.LAWS,
    "launches": launches.LAWS,
}


def algorithms() -> list[str]:
    """Names of the algorithms that have laws."""
    return list(_LAWS)


def laws(algorithm: str | None = None) -> list[Law]:
    """The laws of one algorithm, or all.  SimkitError for a name that there is not."""
    if algorithm is None:
        return [law for found in _LAWS.values() for law in found]
    if algorithm not in _LAWS:
        raise SimkitError(f"no algorithm {algorithm!r}; there are {', '.join(_LAWS)}")
    return list(_LAWS[algorithm])


def law(algorithm: str, name: str) -> Law:
    """One law.  SimkitError lists what there is."""
    found = laws(algorithm)
    for one in found:
        if one.name == name:
            return one
    raise SimkitError(
        f"{algorithm} has no law {name!r}; it has {', '.join(one.name for one in found)}"
    )
