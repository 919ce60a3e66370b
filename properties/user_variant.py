"""Laws of a user's own variant of attention: its CUDA C++ against its NumPy counterpart, in every
kernel that variants are compiled into.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

from properties import batch_decode, batch_prefill_paged, batch_prefill_ragged
from properties.batch_case import FEATURES, USER_VARIANTS, BatchCase, batch_cases
from properties.law import Law
from properties.subject import Subject, kernel_laws
from simkit.algorithms.variant import UserVariant
from simkit.errors import SimkitError

# Laws that need nothing but the two counterparts. Its error against float64 is its own affair.
_LAWS = ("bits", "traffic", "schedules", "hazards")

_PREFILL: tuple[dict[str, Any], ...] = (
    {"tile_q": 16},
    {"tile_q": 64, "variant": "causal"},
    {"tile_q": 16, "variant": "causal+soft_cap+sink", "window": True, "element": "f16"},
    {"tile_q": 16, "variant": "custom_mask", "kv": "e4m3", "d": 128, "dv": 64},
)
_DECODE: tuple[dict[str, Any], ...] = (
    {"tile_q": 16, "variant": "causal", "window": True},
    {"cuda_cores": True, "group": 2, "variant": "alibi"},
)


def variant_laws(variant: UserVariant, examples: int = 20) -> list[Law]:
    """The laws of a variant in batch_prefill_ragged, batch_prefill_paged and batch_decode.

    It is known to cases by its name from now on. `SimkitError` for a name that is taken.
    """
    known = USER_VARIANTS.get(variant.name, variant)
    if known.cuda != variant.cuda or variant.name in FEATURES:
        raise SimkitError(f"there is a variant {variant.name!r} already; choose another name")
    USER_VARIANTS[variant.name] = variant
    subjects = (
        _with(variant, batch_prefill_ragged.SUBJECT, _PREFILL, paged=False),
        _with(variant, batch_prefill_paged.SUBJECT, _PREFILL),
        _with(variant, batch_decode.SUBJECT, _DECODE, decode=True),
    )
    found = [law for subject in subjects for law in kernel_laws(subject, examples)]
    return [law for law in found if law.name in _LAWS]


def _with(
    variant: UserVariant, subject: Subject, configurations: tuple[dict[str, Any], ...], **how: Any
) -> Subject:
    own = tuple({**fields, "variant": _joined(fields, variant)} for fields in configurations)
    thorough: BatchCase = subject.thorough
    fields = {"variant": thorough.variant}
    return replace(
        subject,
        strategy=batch_cases(own, **how),
        corners=(replace(thorough, variant=_joined(fields, variant)),),
        large=(),
        thorough=replace(thorough, variant=_joined(fields, variant)),
        expected=None,
        has_lse=False,
        uncounted=frozenset({"variant_values"}),
    )


def _joined(fields: dict[str, Any], variant: UserVariant) -> str:
    return "+".join(filter(None, (fields.get("variant", ""), variant.name)))


def load_variant(path: Path) -> UserVariant:
    """The `UserVariant` that a Python file calls ``VARIANT``. `SimkitError` for a file without."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SimkitError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise SimkitError(f"{path} does not run: {type(error).__name__}: {error}") from error
    variant = getattr(module, "VARIANT", None)
    if not isinstance(variant, UserVariant):
        raise SimkitError(
            f"{path} must define VARIANT, a simkit.algorithms.variant.UserVariant; it has "
            f"{type(variant).__name__}"
        )
    return variant
