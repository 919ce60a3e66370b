"""The device table, occupancy and roofline against published figures."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest

from simkit.errors import CapacityError, DtypeError, SimkitError
from simkit.machine.gpus import GPUS, Gpu, gpu
from simkit.machine.occupancy import occupancy
from simkit.machine.roofline import arithmetic_intensity, attainable_flops, bound, roofline

KIB = 1024


@pytest.mark.parametrize(
    ("name", "arch", "sms", "bf16", "fp8", "ridge"),
    [
        ("a100", "sm_80", 108, 311.9, None, 153),
        ("h100", "sm_90", 132, 989.2, 1978, 295),
        ("h200", "sm_90", 132, 989.2, 1978, 206),
        ("b200", "sm_100", 148, 2225, 4450, 290),
    ],
)
def test_peaks_and_ridge_points(
    name: str, arch: str, sms: int, bf16: float, fp8: float | None, ridge: int
) -> None:
    row = gpu(name)
    assert (row.arch, row.sm_count) == (arch, sms)
    assert row.peak_flops / 1e12 == pytest.approx(bf16, abs=0.5 if bf16 > 1000 else 0.06)
    assert round(row.ridge_point) == ridge
    if fp8 is None:
        with pytest.raises(DtypeError, match="fp8"):
            row.peak_flops_of("fp8")
    else:
        assert row.peak_flops_of("fp8") / 1e12 == pytest.approx(fp8, abs=0.6)


def test_h800_sustains_what_flashmla_reports() -> None:
    h800 = gpu("H800")
    assert h800.sustained_flops / 1e12 == pytest.approx(865, abs=0.5)
    # Compute-bound from h_q × s_q = 128 on: half the FLOP per byte.
    assert h800.sustained_flops / h800.hbm_bytes_per_s / 2 == pytest.approx(129, abs=1)


@pytest.mark.parametrize(
    ("name", "per_sm", "optin"),
    [("a100", 164, 163), ("h100", 228, 227), ("h800", 228, 227), ("h200", 228, 227)],
)
def test_shared_memory_sizes(name: str, per_sm: int, optin: int) -> None:
    row = gpu(name)
    assert (row.smem_per_sm, row.smem_per_block_optin) == (per_sm * KIB, optin * KIB)


@pytest.mark.parametrize("row", GPUS.values(), ids=GPUS)
def test_rows_are_consistent(row: Gpu) -> None:
    assert row.smem_per_sm - row.smem_per_block_optin == row.smem_reserved_per_block
    assert max(row.smem_carveouts) == row.smem_per_sm
    assert row.max_warps_per_sm == 64
    assert row.l2_bytes % (16 * 128) == 0
    assert row.arch == f"sm_{row.capability[0]}{row.capability[1]}"


def test_every_figure_has_a_source() -> None:
    assert all(field.metadata["source"] for field in fields(Gpu))


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(SimkitError, match=r"'v100'.*a100, h100, h800, h200, b200"):
        gpu("v100")


@pytest.mark.parametrize(
    ("name", "threads", "registers", "shared", "barriers", "ctas", "limiters"),
    [
        # 255 registers: 8192 a warp, 2 warps a sub-partition, 8 warps
        ("h100", 256, 255, 0, 1, 1, ("registers",)),
        ("h100", 128, 32, 0, 1, 16, ("warps", "registers")),
        # 64 threads: 32 CTAs fill the warps, the CTAs and, at 2 each, the barriers
        ("h100", 64, 32, 0, 2, 32, ("warps", "CTAs", "registers", "barriers")),
        ("h100", 64, 0, 0, 2, 32, ("warps", "CTAs", "barriers")),
        ("a100", 64, 32, 0, 16, 32, ("warps", "CTAs", "registers")),
        ("h100", 32, 16, 0, 16, 4, ("barriers",)),
        # The reserved KiB: 227 KiB fills an H100 SM, 113 KiB fits twice, one byte more does not
        ("h100", 128, 32, 227 * KIB, 1, 1, ("shared memory",)),
        ("h100", 128, 32, 113 * KIB, 1, 2, ("shared memory",)),
        ("h100", 128, 32, 113 * KIB + 1, 1, 1, ("shared memory",)),
        ("a100", 128, 32, 81 * KIB, 1, 2, ("shared memory",)),
        # Registers round up to 256 a warp: 33 × 32 = 1056 -> 1280, 12 warps a sub-partition
        ("a100", 128, 33, 0, 1, 12, ("registers",)),
        # FlashAttention-3: 384 threads of 168 registers: 5376 a warp, 3 a sub-partition
        ("h100", 384, 168, 200 * KIB, 1, 1, ("shared memory", "registers")),
        # A warp that is not full is a whole warp
        ("h100", 33, 0, 0, 0, 32, ("warps", "CTAs")),
    ],
)
def test_occupancy_golden_values(
    name: str,
    threads: int,
    registers: int,
    shared: int,
    barriers: int,
    ctas: int,
    limiters: tuple[str, ...],
) -> None:
    found = occupancy(gpu(name), threads, registers, shared, barriers)
    assert (found.ctas_per_sm, found.limiters) == (ctas, limiters)
    assert found.warps == ctas * -(-threads // 32)
    assert found.fraction == found.warps / 64


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "barriers", "message"),
    [
        (0, 32, 0, 1, "threads per CTA: 0"),
        (1025, 32, 0, 1, "1025 is outside 1 to 1024 on h100"),
        (128, 256, 0, 1, "256 is outside 0 to 255"),
        (128, 32, 227 * KIB + 1, 1, "232449 is outside 0 to 232448"),
        (128, 32, 0, 17, "barriers per CTA: 17"),
        (1024, 255, 0, 1, "1024 threads of 255 registers take 262144 registers"),
        # 9 warps of 7168 would fit, but the file is dealt out in rounds of 4 warps
        (288, 224, 0, 1, "take 86016 registers"),
    ],
)
def test_impossible_ctas(
    threads: int, registers: int, shared: int, barriers: int, message: str
) -> None:
    with pytest.raises(CapacityError, match=message):
        occupancy(gpu("h100"), threads, registers, shared, barriers)


def test_roofline() -> None:
    h100 = gpu("h100")
    assert arithmetic_intensity(300, 100) == 3
    assert arithmetic_intensity(1, 0) == math.inf
    # At intensity 1 the bandwidth is the bound: 3352.32 GFLOP/s.
    assert attainable_flops(h100, 1) == pytest.approx(3352.32e9)
    assert attainable_flops(h100, 1000) == h100.peak_flops
    assert (bound(h100, 294), bound(h100, 296)) == ("memory", "compute")
    assert bound(h100, 500, "fp8") == "memory"
    place = roofline(h100, flops=2e12, hbm_bytes=3352.32e9)
    assert place.bound == "memory"
    assert place.seconds == pytest.approx(1.0)
    for flops, moved in ((0, 0), (-1, 1), (1, -1)):
        with pytest.raises(SimkitError, match="intensity"):
            arithmetic_intensity(flops, moved)
