"""The catalogue: names that are alike in all four places, and look-ups that fail readably."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict

import pytest

from simkit.catalog import ALGORITHMS, algorithm
from simkit.errors import SimkitError


def test_one_name_in_four_places() -> None:
    for row in ALGORITHMS:
        assert row.model.startswith(f"simkit.algorithms.{row.name}:")
        assert row.kernel == f"gpu/kernels/{row.name}.cu"
        assert row.host.startswith(f"gpu.kernels.{row.name}:")
        assert row.laws == f"properties.{row.name}"
        assert row.trace.endswith(f":{row.name}")
        assert all(asdict(row).values())


def test_names_are_unique() -> None:
    assert len({row.name for row in ALGORITHMS}) == len(ALGORITHMS)


def test_lookup() -> None:
    assert algorithm("flash_decoding").kernel == "gpu/kernels/flash_decoding.cu"
    with pytest.raises(SimkitError, match=r"no algorithm 'flash'.*it has naive_attention, flash_"):
        algorithm("flash")


def test_the_model_imports_neither_kernels_nor_laws() -> None:
    code = "import sys, simkit.catalog, simkit.schedules.tile_timeline;"
    code += "print([name for name in sys.modules if name.split('.')[0] in ('gpu', 'properties')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
