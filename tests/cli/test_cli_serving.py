"""The commands on the serving algorithms: batches of requests, pages, variants, cascades, merging
and appending.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simkit.catalog import ALGORITHMS
from simkit.cli.evaluation import MOST_MULTIPLICATIONS
from simkit.cli.settings import Lengths, parse_settings
from simkit.cli.subjects import SUBJECTS
from simkit.cli.subjects.subject import Workload
from simkit.machine.gpus import gpu
from simkit.machine.machine import Machine

H100 = gpu("h100")

SMALL = ("d=64", "heads=2", "kv_heads=1", "page_size=7")
"""Of what the executor runs in a second."""

SERVING = (
    "kv_append", "batch_decode", "batch_prefill_paged", "batch_prefill_ragged",
    "block_sparse_attention", "merge_states", "cascade_attention",
)  # fmt: skip


def settings(*given: str) -> list[str]:
    return [part for one in given for part in ("--set", one)]


def run(cli: Any, path: Path, *words: object) -> tuple[str, list[dict[str, Any]]]:
    """What a run prints, and the runs of its JSON."""
    output = cli("run", *words, "--json", path).stdout
    return output, json.loads(path.read_text())["runs"]


def work(algorithm: str, *given: str, seed: int | None = None) -> Workload:
    chosen = SUBJECTS[algorithm]
    return chosen.workload(H100, parse_settings(algorithm, chosen.settings, given), seed)


def test_every_kernel_of_the_catalogue_has_a_subject() -> None:
    assert list(SUBJECTS) == [row.name for row in ALGORITHMS if row.kind == "kernel"]
    assert set(SERVING) < set(SUBJECTS)


@pytest.mark.parametrize(
    ("algorithm", "given"),
    [
        ("kv_append", ("kv_len=0,17,40", "append=3,0,9", "kv_heads=2", "d=64", "page_size=7")),
        ("kv_append", ("kv_len=20", "batch=2", "fp8=true", "hnd=true", "kv_heads=3", "d=64")),
        ("batch_decode", ("kv_len=0,17,300", *SMALL, "hnd=true", "sink=true")),
        ("batch_decode", ("kv_len=90", "batch=2", *SMALL, "heads=1", "dv=128", "rope=true")),
        ("batch_decode", ("kv_len=90,40", *SMALL, "units=cuda", "fp8=true", "split=64")),
        ("batch_decode", ("kv_len=200", "batch=3", *SMALL, "prefix=70", "graph=true", "window=80")),
        (
            "batch_prefill_paged",
            ("q_len=20,0,3", "kv_len=70,9,130", *SMALL, "causal=true", "fp8=true", "soft_cap=9.5"),
        ),
        (
            "batch_prefill_ragged",
            ("q_len=5", "kv_len=70,0,9", *SMALL[:3], "alibi=true", "split=-1", "tile_q=16"),
        ),
        (
            "block_sparse_attention",
            ("queries=50", "keys=150", "block_columns=40", *SMALL[:3], "elements=true"),
        ),
        ("merge_states", ("rows=3", "states=5", "heads=2", "d=64", "state=float16")),
        (
            "cascade_attention",
            ("prefix=70,9", "kv_len=5,2,30", "q_len=1,2,1", *SMALL, "causal=true", "sink=true"),
        ),
    ],
)
def test_kernel_does_what_was_predicted(
    cli, tmp_path: Path, algorithm: str, given: tuple[str, ...]
) -> None:
    path, words = tmp_path / "run.json", (algorithm, *settings(*given))
    _, predicted = run(cli, path, *words)
    _, measured = run(cli, path, *words, "--on", "ptx")
    assert predicted[0]["algorithm"] == algorithm
    for model, kernel in zip(predicted, measured, strict=True):
        assert kernel["traffic"]
        for row in kernel["traffic"]:
            assert row["measured_requested"] == row["requested"], row
            assert row["measured_sectors"] == row["sectors"], row
        # The same bits have the same errors.
        assert kernel["errors"] == model["errors"]
        assert all(np.isfinite(error["rmse"]) for error in kernel["errors"])
        assert all(row["registers"] for row in kernel["resources"])


def test_run_shows_configuration_plan_and_load(cli, tmp_path: Path) -> None:
    """The published decode step of 64, 128, 256 and 512 pages of 16, 32 heads on 8: chunks of 512
    keys, 30 items.
    """
    given = settings("kv_len=1024,2048,4096,8192", "heads=32", "kv_heads=8", "fp8=true")
    output, (found,) = run(cli, tmp_path / "run.json", "batch_decode", *given)
    assert "The kernel is compiled as batch_decode-d128-q16-bf16-kv_e4m3." in output
    assert "Plan of batch_decode" in output
    (plan,) = found["plans"]
    assert plan["key"] == "batch_decode-d128-q16-bf16-kv_e4m3"
    facts = plan["facts"]
    assert (facts["kv_chunk"], facts["grid"], facts["is_split"]) == (512, 30, True)
    assert len(plan["items"]["cost"]) == 30 * 8
    main, merge = found["resources"]
    assert (main["kernel"], main["ctas"]) == ("batch_decode", 240)
    assert (merge["kernel"], merge["ctas"]) == ("merge_states_variable", 4 * 32 // 4)
    # As many CTAs at a time as the GPU holds of this kernel.
    assert plan["load"]["workers"] == main["occupancy"]["ctas_per_sm"] * 132
    assert plan["load"]["total"] == 8 * (15_360 + 30 * 32)
    assert found["units"] == "tensor cores"
    assert found["settings"]["kv_len"] == [1024, 2048, 4096, 8192]


def test_units_follow_the_group(cli, tmp_path: Path) -> None:
    """Without grouping, 15 of 16 rows of a tensor-core tile would be padding."""
    given = settings("heads=2", "kv_heads=2", "d=64", "kv_len=100")
    output, runs = run(cli, tmp_path / "run.json", "batch_decode", *given)
    assert runs[0]["units"] == "fp32 lanes"
    assert "batch_decode-d64-q1-bf16-cuda_cores" in output
    output, runs = run(
        cli, tmp_path / "run.json", "batch_decode", *given, *settings("units=tensor")
    )
    assert runs[0]["units"] == "tensor cores"


def test_cascade_beside_the_same_without(cli, tmp_path: Path) -> None:
    given = settings("prefix=512", "kv_len=64", "batch=16", "heads=4", "kv_heads=1", "d=64")
    output, runs = run(cli, tmp_path / "run.json", "cascade_attention", *given)
    cascade, flat, naive = runs
    assert [one["algorithm"] for one in runs] == [
        "cascade_attention", "batch_prefill_paged", "naive_attention",
    ]  # fmt: skip
    assert cascade["place"]["flops"] == flat["place"]["flops"] == naive["place"]["flops"]
    assert flat["settings"]["kv_len"] == [576]
    assert flat["settings"]["prefix"] == 512

    def reads(found: dict[str, Any], *names: str) -> int:
        return sum(row["sectors"] for row in found["traffic"] if row["tensor"] in names)

    # All 64 packed rows are one tile: the prefix is read once, and once a request without.
    token = 64 * 2
    assert reads(cascade, "k_0", "k_1") == (512 + 16 * 64) * token
    assert reads(flat, "k") == 16 * (512 + 64) * token
    # The flat one has the same pages, so that a cache could do as much.
    assert flat["place"]["hbm_bytes"] < 1.1 * cascade["place"]["hbm_bytes"]
    assert [plan["planner"] for plan in cascade["plans"]] == ["level 0", "level 1"]
    assert "Plan of level 1" in output


@pytest.mark.parametrize(
    ("algorithm", "given", "reason"),
    [
        ("batch_decode", ("kv_len=64,65",), "its sequences have one length"),
        ("batch_decode", ("soft_cap=5", "window=9"), "it knows no soft_cap, window"),
        ("batch_decode", ("fp8=true",), "it knows no fp8"),
        ("batch_decode", ("dv=64",), "its K and V have one head dimension"),
        ("batch_prefill_ragged", ("d=256",), "its head dimensions are (64, 128)"),
        ("batch_prefill_ragged", ("q_len=0,0",), "it needs a query"),
        ("block_sparse_attention", (), "it knows no mask of blocks"),
        ("merge_states", (), "there is no attention from Q, K and V to O here"),
        ("kv_append", (), "there is no attention from Q, K and V to O here"),
    ],
)
def test_why_naive_attention_is_not_beside_it(
    algorithm: str, given: tuple[str, ...], reason: str
) -> None:
    chosen = SUBJECTS[algorithm]
    values = parse_settings(algorithm, chosen.settings, given)
    assert chosen.beside(values) == {"naive_attention": reason}


def test_naive_attention_solves_the_same_problem() -> None:
    chosen = SUBJECTS["batch_prefill_paged"]
    values = parse_settings("batch_prefill_paged", chosen.settings, ["n=32", "causal=true"])
    beside = chosen.beside(values)["naive_attention"]
    assert beside == {
        "batch": 4, "q_len": 32, "kv_len": 32, "heads": 8, "kv_heads": 2, "d": 128, "causal": True,
    }  # fmt: skip
    naive = SUBJECTS["naive_attention"]
    assert naive.flops(naive.workload(H100, beside, None)) == chosen.flops(
        chosen.workload(H100, values, None)
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("batch_decode", "q_len=3"), "no setting 'q_len'; it has: n (keys), kv_len"),
        (("batch_decode", "kv_len=1,x"), "a whole number, or some with commas"),
        (("batch_decode", "units=fp64"), "--set units=fp64: it is auto, or one of tensor, cuda"),
        (("batch_decode", "heads=3"), "heads must be a multiple of kv_heads, got 3 and 2"),
        (("batch_decode", "d=192"), "the kernels are built for (64, 128, 256)"),
        (("batch_decode", "heads=64", "units=cuda"), "tiles of 32 query rows; cuda_cores take"),
        (("batch_decode", "alibi=true", "rope=true"), "two encodings of position"),
        (("batch_prefill_paged", "q_len=1,2", "kv_len=1,2,3"), "q_len has 2 lengths and kv_len"),
        (("batch_prefill_paged", "tile_q=32"), "tiles of 32 query rows; tensor_cores take [16,"),
        (("batch_prefill_paged", "page_size=0"), "--set page_size=0: it must be from 1"),
        (("batch_prefill_ragged", "page_size=4"), "no setting 'page_size'"),
        (("batch_prefill_ragged", "soft_cap=-1"), "--set soft_cap=-1: it must be 0 or more"),
        (("block_sparse_attention", "density=x"), "it must be a number"),
        (("merge_states", "d=96"), "it must be a multiple of 64 up to 1024"),
        (("merge_states", "state=fp8"), "it is float32, or one of bfloat16, float16"),
        (("cascade_attention", "window=3"), "no setting 'window'"),
        (("cascade_attention", "causal=true", "q_len=9", "kv_len=8"), "request 0 has 9 queries"),
        (("kv_append", "append=0"), "kv_append has nothing to do: no byte moves"),
        (("kv_append", "d=96"), "supported are (64, 128, 192, 256)"),
    ],
)
def test_run_refuses(cli, words: tuple[str, ...], message: str) -> None:
    algorithm, *given = words
    error = cli("run", algorithm, *settings(*given), code=2).stderr
    assert error.startswith("error: ")
    assert message in error


@pytest.mark.parametrize("algorithm", SERVING)
def test_large_problems_get_smaller_until_they_are_affordable(algorithm: str) -> None:
    """The error of a large problem is that of a small one, which is still a problem."""
    chosen = SUBJECTS[algorithm]
    known = {setting.name for setting in chosen.settings}
    large = {
        "kv_len": "4096,100_000", "append": "5000,3", "prefix": "50_000", "queries": "5000",
        "keys": "9000", "rows": "100_000", "kv_heads": "8", "heads": "32", "fp8": "true",
    }  # fmt: skip
    given = [f"{name}={value}" for name, value in large.items() if name in known]
    values = parse_settings(algorithm, chosen.settings, given)
    sizes = []
    for _ in range(60):
        found = chosen.workload(H100, values, None)
        sizes.append(chosen.multiplications(found))
        if sizes[-1] <= MOST_MULTIPLICATIONS:
            break
        values = chosen.smaller(values)
    assert sizes[-1] <= MOST_MULTIPLICATIONS
    assert sizes == sorted(sizes, reverse=True)
    assert chosen.flops(found) > 0
    # What cannot get any smaller stays as it is.
    for _ in range(60):
        values = chosen.smaller(values)
    assert chosen.smaller(values) == values


def test_requests_share_the_pages_of_a_prefix() -> None:
    """Full pages of the prefix are one page each: 3 of 16 keys, and what is behind them of each of
    four requests, 52 keys in four pages.
    """
    shared = work("batch_decode", "kv_len=100", "prefix=50").data.problem
    alone = work("batch_decode", "kv_len=100").data.problem
    assert len(shared.k) == 3 + 4 * 4
    assert len(alone.k) == 4 * 7
    drawn = work("batch_decode", "kv_len=100", "prefix=50", seed=3).data.problem
    keys = [drawn.gathered(request)[0] for request in range(4)]
    assert all(np.array_equal(keys[0][:50], other[:50]) for other in keys)
    assert not np.array_equal(keys[0][50:], keys[1][50:])


def test_fp8_takes_the_range_that_it_has() -> None:
    """The largest magnitude of K becomes 448, the largest of e4m3, and scales bring it back."""
    fp8 = work("batch_decode", "kv_len=100", "fp8=true", seed=1).data.problem
    same = work("batch_decode", "kv_len=100", seed=1).data.problem
    for name in ("k", "v"):
        stored, before = (getattr(p, name).astype(np.float64) for p in (fp8, same))
        used = np.isfinite(before)
        assert np.abs(stored[used]).max() == 448
        back = stored[used] * getattr(fp8, f"{name}_scale")
        assert np.abs(back - before[used]).max() <= 2.0**-4 * np.abs(before[used]).max()


def test_levels_of_a_cascade() -> None:
    """All requests share the first prefix, halves of them the second, nobody the last keys."""
    levels = work("cascade_attention", "prefix=64,32", "batch=5", "q_len=2").data
    assert [level.problem.queries.lens.tolist() for level in levels] == [[10], [6, 4], [2] * 5]
    assert [level.problem.kv_lens.tolist() for level in levels] == [[64], [32, 32], [64] * 5]
    assert not any(level.problem.variant.causal for level in levels)
    causal = work("cascade_attention", "causal=true", "sink=true", "batch=1").data
    assert [level.problem.variant.causal for level in causal] == [False, True]
    assert [level.problem.variant.sinks is None for level in causal] == [True, False]


def test_counting_needs_no_memory() -> None:
    """A problem without values has the bytes of one with values."""
    chosen = SUBJECTS["batch_decode"]
    given = ("kv_len=70,0,33", "heads=2", "d=64", "hnd=true", "fp8=true")
    traffic = [
        chosen.model(lambda: Machine(H100, "none"), work("batch_decode", *given, seed=seed))
        .machines[0]
        .traffic
        for seed in (None, 1)
    ]
    assert traffic[0] == traffic[1]
    cache = work("kv_append", "kv_len=100_000", "batch=4", "kv_heads=64", "d=256").data.k_cache
    assert cache.values.nbytes > 12e9


@pytest.mark.parametrize(
    ("algorithm", "given", "messages"),
    [
        ("batch_decode", ("kv_len=0,17,2048",), ("batch_decode CTA: request 2", "merge_states_v")),
        ("cascade_attention", ("prefix=512,64",), ("level 0", "level 2", "merge_states_variable")),
        ("batch_prefill_ragged", ("q_len=9", "rope=true", "split=-1"), ("keys 0 to 512",)),
    ],
)
def test_trace_draws_what_happens(
    cli, algorithm: str, given: tuple[str, ...], messages: tuple[str, ...]
) -> None:
    output = cli("trace", algorithm, *settings(*given)).stdout
    for message in messages:
        assert message in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("batch_prefill_paged", "q_len=0,0"), "there is no query, so there is no CTA to show"),
        (("batch_decode", f"kv_len={64 * 20_001}", "split=-1"), "a timeline shows 20000 at most"),
        (("kv_append", "append=0"), "no token is appended, so there is no CTA to show"),
    ],
)
def test_trace_refuses(cli, words: tuple[str, ...], message: str) -> None:
    algorithm, *given = words
    assert message in cli("trace", algorithm, *settings(*given), code=2).stderr


def test_smaller_problems_keep_lists_together() -> None:
    chosen = SUBJECTS["batch_prefill_paged"]
    known = chosen.settings
    values = parse_settings("batch_prefill_paged", known, ["q_len=9", "kv_len=5,900,70,3"])
    halved = chosen.smaller(values)
    assert halved["kv_len"] == (5, 450, 70, 3)
    short = {**values, "kv_len": Lengths((5, 64, 64, 3))}
    assert (chosen.smaller(short)["kv_len"], chosen.smaller(short)["batch"]) == ((5, 64), 2)
    one = chosen.smaller({**values, "kv_len": Lengths((64,)), "batch": 1})
    assert (one["heads"], one["kv_heads"]) == (4, 1)


@pytest.mark.parametrize("algorithm", ["kv_append", "merge_states"])
def test_laws_are_verified(cli, tmp_path: Path, algorithm: str) -> None:
    path = tmp_path / "v.json"
    words = ("--on", "ptx", "--law", "traffic", "--examples", 0, "--json", path)
    assert "laws hold" in cli("verify", algorithm, *words).stdout
    rows = json.loads(path.read_text())["traffic"]
    assert rows
    assert all(row["predicted"] == row["measured"] for row in rows)


def test_fuzzing_shows_lengths_of_requests(cli, tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    words = ("--minutes", 0, "--law", "alone", "--on", "ptx", "--json", path)
    output = cli("fuzz", "batch_prefill_ragged", *words).stdout
    assert "q_lens: how many" in output
    assert "kv_lens" in json.loads(path.read_text())["coverage"]["fields"]
