"""A decode step of a serving engine on the executor: time and memory that users may expect."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

SECONDS, MEMORY = 10.0, 4 << 30

# In a process of its own: memory is the whole process's, loading and compiling count.
DECODE = """
import json, resource, time
import numpy as np, ml_dtypes
import gpu
from gpu.kernels.batch_decode import batch_decode
from simkit.algorithms.batch_problem import BatchProblem
from simkit.layouts.block_sparse import from_lengths
from simkit.layouts.ragged import Ragged
from simkit.planning.prefill import prefill_plan

bf16 = np.dtype(ml_dtypes.bfloat16)
rng = np.random.default_rng(0)
lengths = np.full(32, 2048)
order = rng.permutation(32 * 128)
keys = from_lengths(lengths, 16, order=order)
k, v = (rng.standard_normal((4096, 16, 8, 128), np.float32).astype(bf16) for _ in range(2))
problem = BatchProblem(
    q=rng.standard_normal((32, 32, 128), np.float32).astype(bf16), k=k, v=v,
    queries=Ragged.from_lengths(np.ones(32, np.int64)), keys=keys,
)
plan = prefill_plan(
    problem.queries.indptr, problem.kv_lens, group=4, kv_heads=8, head_dim_v=128, page_size=16,
    sm_count=132, tile_q=16,
)
start = time.perf_counter()
batch_decode(gpu.open("ptx"), problem, plan)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": time.perf_counter() - start, "bytes": peak}))
"""


def test_batch_decode(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Batch 32, 8 K/V heads, group 4, 2,048 tokens, pages of 16, d = 128."""
    found: list[dict[str, float]] = []

    def run() -> None:
        done = subprocess.run(
            [sys.executable, "-c", DECODE], capture_output=True, text=True, check=True
        )
        found.append(json.loads(done.stdout))

    benchmark.pedantic(run, rounds=2)
    seconds, peak = (min(one[name] for one in found) for name in ("seconds", "bytes"))
    with capsys.disabled():
        print(f"\nbatch_decode: {seconds:.2f} s, {peak / 2**30:.2f} GiB")
    assert seconds <= SECONDS
    assert peak <= MEMORY
