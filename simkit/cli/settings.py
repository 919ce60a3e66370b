"""``--set NAME=VALUE``: sizes of a problem, checked against the names that an algorithm has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from simkit.errors import CapacityError, SimkitError
from simkit.layouts.tables import Int64Array

Values = Mapping[str, Any]
"""By name: sizes are int, flags bool, numbers float, words str, lengths `Lengths`."""
Kind = Literal["size", "flag", "lengths", "number", "word", "choice"]

_MOST = 2**31 - 1  # kernels take sizes as int
MOST_REQUESTS, MOST_TOKENS = 2**16, 2**23
"""Of a batch: beyond, counting every access by its address takes minutes."""
_FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class Lengths(tuple[int, ...]):
    """One number for all requests, or one for each; printed as ``--set`` takes it."""

    __slots__ = ()

    def __str__(self) -> str:
        return ",".join(map(str, self))


@dataclass(frozen=True)
class Setting:
    """A setting of some kind: a size, a flag, lengths of requests, a number or a word; or a choice,
    a size or flag (as ``tries`` are) that is "auto" where nobody gives it.

    ``default`` None: the value of the setting ``like``. ``least``: of a size, a number and each
    length; None leaves their range to whoever takes them. ``sets``: other settings that it stands
    for, like n for lengths. ``choices``: words that there are. ``tries``: what a search tries.
    """

    name: str
    default: Any
    help: str
    least: int | None = 1
    kind: Kind = "size"
    like: str = ""
    sets: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    tries: tuple[int | bool, ...] = ()


AUTO = "auto"


def choice(name: str, help: str, tries: tuple[int | bool, ...]) -> Setting:
    """A choice of a kernel, which makes its own where nobody does."""
    return Setting(name, AUTO, help, kind="choice", tries=tries)


def parse_settings(algorithm: str, known: Sequence[Setting], given: Sequence[str]) -> Values:
    """Every setting's value; SimkitError that lists the names for one that there is not.

    A later flag goes before an earlier one.
    """
    by_name = {setting.name: setting for setting in known}
    chosen: dict[str, Any] = {}
    for text in given:
        name, _, value = (part.strip() for part in text.partition("="))
        if name not in by_name:
            listed = ", ".join(f"{setting.name} ({setting.help})" for setting in known)
            raise SimkitError(f"{algorithm} has no setting {name!r}; it has: {listed}")
        setting = by_name[name]
        chosen |= dict.fromkeys(setting.sets or (name,), _READ[setting.kind](setting, value))
    values: dict[str, Any] = {}
    for setting in known:
        if not setting.sets:
            default = values[setting.like] if setting.default is None else setting.default
            values[setting.name] = chosen.get(setting.name, default)
    return values


def settings_text(values: Values) -> str:
    """All values on one line, each as ``--set`` takes it."""
    return " ".join(f"{name}={str(value).lower()}" for name, value in values.items())


def by_request(values: Values, *names: str) -> tuple[Int64Array, ...]:
    """The named lengths, int64 [requests] each. One number stands for all requests, of which there
    are ``batch`` if nobody lists lengths. SimkitError for lists of different lengths.
    """
    lists = {name: values[name] for name in names if len(values[name]) > 1}
    counts = {len(one) for one in lists.values()} or {values["batch"]}
    if len(counts) > 1:
        told = (f"{name} has {len(one)} lengths" for name, one in lists.items())
        raise SimkitError(" and ".join(told))
    requests = counts.pop()
    if requests > MOST_REQUESTS:
        raise CapacityError(f"{requests} requests; this command takes {MOST_REQUESTS} at most")
    lengths = (np.array(values[name], np.int64) for name in names)
    found = tuple(np.repeat(one, requests) if one.size == 1 else one for one in lengths)
    for name, one in zip(names, found, strict=True):
        if one.sum() > MOST_TOKENS:
            raise CapacityError(
                f"{name} of all requests is {one.sum()}; this command takes {MOST_TOKENS} at most"
            )
    return found


def _size(setting: Setting, text: str) -> int:
    return _whole(setting, text, text, "a whole number")


def _flag(setting: Setting, text: str) -> bool:
    if text.lower() not in _FLAGS:
        raise SimkitError(f"--set {setting.name}={text}: it is true or false")
    return _FLAGS[text.lower()]


def _lengths(setting: Setting, text: str) -> Lengths:
    wanted = "a whole number, or some with commas"
    return Lengths(_whole(setting, text, part, wanted) for part in text.split(","))


def _number(setting: Setting, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise SimkitError(f"--set {setting.name}={text}: it must be a number")
    if setting.least is not None and value < setting.least:
        raise SimkitError(f"--set {setting.name}={text}: it must be {setting.least} or more")
    return value


def _word(setting: Setting, text: str) -> str:
    first, *others = setting.choices
    if text not in setting.choices:
        raise SimkitError(
            f"--set {setting.name}={text}: it is {first}, or one of {', '.join(others)}"
        )
    return text


def _choice(setting: Setting, text: str) -> int | bool | str:
    if text.lower() == AUTO:
        return AUTO
    return _flag(setting, text) if isinstance(setting.tries[0], bool) else _size(setting, text)


_READ: dict[Kind, Callable[[Setting, str], Any]] = {
    "size": _size,
    "flag": _flag,
    "lengths": _lengths,
    "number": _number,
    "word": _word,
    "choice": _choice,
}


def _whole(setting: Setting, text: str, part: str, wanted: str) -> int:
    try:
        value = int(part.replace("_", ""))
    except ValueError:
        raise SimkitError(f"--set {setting.name}={text}: it must be {wanted}") from None
    least, most = (-(2**63), 2**63 - 1) if setting.least is None else (setting.least, _MOST)
    if not least <= value <= most:
        raise SimkitError(f"--set {setting.name}={text}: it must be from {least} to {most}")
    return value
