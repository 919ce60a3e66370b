"""How ``simkit check`` launches a kernel: described by flags, a TOML file, or both."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simkit.cli.arguments import Argument, argument_from_table, check_keys, parse_argument
from simkit.errors import SimkitError

_KEYS: dict[str, Any] = {
    "kernel": str,
    "grid": (int, list),
    "block": (int, list),
    "cluster": (int, list),
    "shared": int,
    "arch": str,
    "options": list,
    "define": dict,
    "args": list,
}


@dataclass(frozen=True)
class LaunchPlan:
    """One launch.

    ``kernel``: entry name, None for the only one. ``grid``, ``block``: one to three extents.
    ``shared``: dynamic shared memory in bytes. ``arch``, ``options``: of the compiler.
    """

    kernel: str | None = None
    grid: tuple[int, ...] = (1,)
    block: tuple[int, ...] | None = None
    cluster: tuple[int, ...] = (1,)
    shared: int = 0
    arch: str | None = None
    options: tuple[str, ...] = ()
    args: tuple[Argument, ...] = ()


def load_plan(path: Path) -> LaunchPlan:
    """The launch that a TOML file describes; SimkitError that names the key that is wrong."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SimkitError(f"{path} is not TOML: {error}") from error
    check_keys(str(path), data, _KEYS)
    defines = tuple(f"-D{name}={value}" for name, value in data.get("define", {}).items())
    return LaunchPlan(
        kernel=data.get("kernel"),
        grid=_extents(f"{path}: grid", data.get("grid", 1)),
        block=_extents(f"{path}: block", data["block"]) if "block" in data else None,
        cluster=_extents(f"{path}: cluster", data.get("cluster", 1)),
        shared=data.get("shared", 0),
        arch=data.get("arch"),
        options=(*map(str, data.get("options", [])), *defines),
        args=tuple(
            argument_from_table(f"{path}: args[{index}]", row, path.parent)
            for index, row in enumerate(data.get("args", []))
        ),
    )


def override_plan(
    plan: LaunchPlan,
    *,
    kernel: str | None,
    grid: str | None,
    block: str | None,
    cluster: str | None,
    shared: int | None,
    arch: str | None,
    defines: Sequence[str],
    arguments: Sequence[str],
) -> LaunchPlan:
    """``plan`` with what flags say in place of what it says; defines are added to its options."""
    changes: dict[str, Any] = {"kernel": kernel, "shared": shared, "arch": arch}
    changes["grid"] = None if grid is None else _parse_extents("--grid", grid)
    changes["block"] = None if block is None else _parse_extents("--block", block)
    changes["cluster"] = None if cluster is None else _parse_extents("--cluster", cluster)
    changes["args"] = tuple(map(parse_argument, arguments)) or None
    changes["options"] = (*plan.options, *(f"-D{define}" for define in defines))
    return replace(plan, **{name: value for name, value in changes.items() if value is not None})


def _parse_extents(place: str, text: str) -> tuple[int, ...]:
    try:
        return _extents(place, [int(part) for part in text.split(",")])
    except ValueError:
        raise SimkitError(f"{place} {text!r} must be one to three numbers, such as 8,1,1") from None


def _extents(place: str, value: int | list[Any]) -> tuple[int, ...]:
    extents = [value] if isinstance(value, int) else value
    if not 1 <= len(extents) <= 3 or not all(isinstance(n, int) and n > 0 for n in extents):
        raise SimkitError(f"{place} {value!r} must be one to three positive numbers, as in 8,1,1")
    return tuple(extents)
