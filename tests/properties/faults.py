"""All that is broken on purpose, kernels by one edit, models and planners by a patch, and the law
that notices each.
"""

from __future__ import annotations

import broken_attention
import broken_batch_attention
import broken_kv_append
import broken_merge_states
import broken_planners
import broken_schedules
from mutants import Mutant

_PARTS = (broken_attention, broken_batch_attention, broken_kv_append, broken_merge_states)

MUTANTS: list[Mutant] = [mutant for part in _PARTS for mutant in part.MUTANTS]

BROKEN_KERNELS = {name: broken for part in _PARTS for name, broken in part.BROKEN_KERNELS.items()}
"""The name of a mutant that a law notices, by algorithm and law."""

BROKEN_MODELS = {name: faults for part in _PARTS for name, faults in part.BROKEN_MODELS.items()}
BROKEN_MODELS |= broken_planners.BROKEN_PLANNERS | broken_schedules.BROKEN_SCHEDULES
"""Patches that a law notices, each one by itself, by algorithm and law."""


def find(algorithm: str, name: str) -> Mutant:
    """The mutant of that name."""
    (found,) = (m for m in MUTANTS if (m.algorithm, m.name) == (algorithm, name))
    return found
