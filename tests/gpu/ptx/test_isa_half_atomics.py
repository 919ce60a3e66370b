"""Atomics and reductions: order of modifiers, half precision, vectors.

Source: PTX ISA 8.8, 9.7.13.15.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from lanes import run

DTYPES: dict[str, Any] = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
FUNCTIONS = {"add": np.add, "min": np.fmin, "max": np.fmax}


@pytest.mark.parametrize(
    "modifiers",
    [
        "acq_rel.gpu.global.add.u32",
        "global.gpu.acq_rel.add.u32",
        "global.acq_rel.gpu.add.u32",
        "global.add.u32",
        "gpu.add.u32",
    ],
)
def test_modifiers_in_the_orders_that_compilers_write(modifiers: str) -> None:
    body = f"""
        atom.{modifiers} %r1, [%cell], 3;
        mad.wide.u32 %rd1, %t5, 4, %old; st.global.u32 [%rd1], %r1;
        red.{modifiers} [%cell], 1;
    """
    got = run(body, {"cell": np.array([5], np.uint32), "old": np.zeros(32, np.uint32)}).arrays
    assert got["old"].tolist() == [5 + 3 * lane for lane in range(32)]
    assert got["cell"][0] == 5 + 4 * 32


def test_compare_and_swap_in_the_order_that_triton_writes() -> None:
    body = "atom.global.acq_rel.gpu.cas.b32 %r1, [%cell], 0, 9; st.global.u32 [%cell+4], %r1;"
    got = run(body, {"cell": np.zeros(2, np.uint32)}).arrays
    assert got["cell"].tolist() == [9, 9]


def in_lane_order(function: Any, start: Any, values: np.ndarray) -> tuple[list[Any], Any]:
    """What each lane finds, and what remains, rounding after each."""
    found, current = [], start
    for value in values:
        found.append(current)
        current = function(current, value).astype(values.dtype)
    return found, current


@pytest.mark.parametrize("kind", DTYPES)
def test_half_precision_rounds_after_each_lane(kind: str) -> None:
    dtype = DTYPES[kind]
    values = np.random.default_rng(1).standard_normal(32).astype(dtype)
    start = dtype.type(0.1)
    body = f"""
        mad.wide.u32 %rd1, %t5, 2, %x; ld.global.b16 %h1, [%rd1];
        atom.global.add.noftz.{kind} %h2, [%cell], %h1;
        mad.wide.u32 %rd2, %t5, 2, %old; st.global.b16 [%rd2], %h2;
        red.global.add.noftz.{kind} [%cell+2], %h1;
    """
    cell = np.array([start, start])
    got = run(body, {"x": values, "cell": cell, "old": np.zeros(32, dtype)}).arrays
    found, last = in_lane_order(np.add, start, values)
    assert got["old"].tolist() == found
    assert got["cell"].tolist() == [last, last]


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("operation", FUNCTIONS)
def test_vectors_of_packed_pairs(operation: str, kind: str) -> None:
    dtype = DTYPES[kind]
    generator = np.random.default_rng(2)
    values = generator.standard_normal((32, 4)).astype(dtype)
    cells = generator.standard_normal(4).astype(dtype)
    body = f"""
        mad.wide.u32 %rd1, %t5, 8, %x; ld.global.v2.b32 {{%r1, %r2}}, [%rd1];
        red.relaxed.gpu.global.{operation}.noftz.v2.{kind}x2 [%cell], {{%r1, %r2}};
    """
    got = run(body, {"x": values, "cell": cells}).arrays
    for column in range(4):
        _, last = in_lane_order(FUNCTIONS[operation], cells[column], values[:, column])
        assert got["cell"][column] == last


def test_a_vector_of_floats_gives_the_old_values_even_into_its_operands() -> None:
    body = """
        cvt.rn.f32.u32 %f1, %t5; mov.f32 %f2, 0f3f800000;
        atom.global.add.v2.f32 {%f2, %f1}, [%cell], {%f1, %f2};
        mad.wide.u32 %rd1, %t5, 8, %old; st.global.v2.f32 [%rd1], {%f2, %f1};
    """
    arrays = {"cell": np.zeros(2, np.float32), "old": np.zeros((32, 2), np.float32)}
    got = run(body, arrays).arrays
    lanes = np.arange(32)
    assert got["old"][:, 0].tolist() == (lanes * (lanes - 1) / 2).tolist()
    assert got["old"][:, 1].tolist() == lanes.tolist()
    assert got["cell"].tolist() == [496, 32]
