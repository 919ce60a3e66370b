"""The catalogue: names that are alike in all four places, and look-ups that fail readably."""

from __future__ import annotations

import subprocess
import sys

import pytest

from simkit.catalog import ALGORITHMS, algorithm
from simkit.errors import SimkitError

WITHOUT_OWN_KERNEL = {"cascade_attention": "batch_prefill_paged"}
"""Levels of a cascade are batches with K and V in pages like any other."""


KINDS_WITHOUT_HOST = ("study", "simulator", "schedule")
FOLDERS = {"planner": "planning", "simulator": "schedules", "schedule": "schedules"}


def test_one_name_everywhere() -> None:
    for row in ALGORITHMS:
        folder = FOLDERS.get(row.kind, "algorithms")
        assert row.model.startswith(f"simkit.{folder}.{row.name}:")
        # Schedules have the laws of all launches.
        assert row.laws == f"properties.{'grid' if row.kind == 'schedule' else row.name}"
        assert row.title
        assert row.section


def test_kernels_have_all_parts_studies_and_planners_no_kernel() -> None:
    assert {row.kind for row in ALGORITHMS} == {"kernel", "study", "planner", *KINDS_WITHOUT_HOST}
    for row in ALGORITHMS:
        if row.kind in KINDS_WITHOUT_HOST:
            assert (row.kernel, row.host, row.trace) == (None, None, None)
            continue
        assert row.trace is not None
        assert row.trace.endswith(f":{row.name}")
        if row.kind == "planner":
            assert (row.kernel, row.host) == (None, None)
            continue
        assert row.kernel == f"gpu/kernels/{WITHOUT_OWN_KERNEL.get(row.name, row.name)}.cu"
        assert row.host is not None
        assert row.host.startswith(f"gpu.kernels.{row.name}:")


def test_names_are_unique() -> None:
    assert len({row.name for row in ALGORITHMS}) == len(ALGORITHMS)


def test_lookup() -> None:
    assert algorithm("flash_decoding").kernel == "gpu/kernels/flash_decoding.cu"
    with pytest.raises(SimkitError, match=r"no algorithm 'flash'.*it has naive_attention, flash_"):
        algorithm("flash")


def test_the_model_imports_neither_kernels_nor_laws() -> None:
    schedules = {row.trace.partition(":")[0] for row in ALGORITHMS if row.trace}
    code = f"import sys, simkit.catalog, {', '.join(sorted(schedules))};"
    code += "print([name for name in sys.modules if name.split('.')[0] in ('gpu', 'properties')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
