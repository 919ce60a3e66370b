"""``--set NAME=VALUE``: sizes of a problem, checked against the names that an algorithm has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simkit.errors import SimkitError

Values = Mapping[str, int]  # flags are bools

_MOST = 2**31 - 1  # kernels take sizes as int
_FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True)
class Setting:
    """A size, or a flag (a bool). ``sets``: other settings that it stands for, like n for lengths.

    ``default`` None: the value of the setting ``like``.
    """

    name: str
    default: int | None
    help: str
    least: int = 1
    is_flag: bool = False
    like: str = ""
    sets: tuple[str, ...] = ()


def parse_settings(algorithm: str, known: Sequence[Setting], given: Sequence[str]) -> Values:
    """Every setting's value; SimkitError that lists the names for one that there is not.

    A later flag goes before an earlier one.
    """
    by_name = {setting.name: setting for setting in known}
    chosen: dict[str, int] = {}
    for text in given:
        name, _, value = (part.strip() for part in text.partition("="))
        if name not in by_name:
            listed = ", ".join(f"{setting.name} ({setting.help})" for setting in known)
            raise SimkitError(f"{algorithm} has no setting {name!r}; it has: {listed}")
        number = _value(by_name[name], value)
        chosen |= dict.fromkeys(by_name[name].sets or (name,), number)
    values: dict[str, int] = {}
    for setting in known:
        if not setting.sets:
            default = values[setting.like] if setting.default is None else setting.default
            values[setting.name] = chosen.get(setting.name, default)
    return values


def settings_text(values: Values) -> str:
    """All values on one line, each as ``--set`` takes it."""
    return " ".join(f"{name}={str(value).lower()}" for name, value in values.items())


def _value(setting: Setting, text: str) -> int:
    if setting.is_flag:
        if text.lower() not in _FLAGS:
            raise SimkitError(f"--set {setting.name}={text}: it is true or false")
        return _FLAGS[text.lower()]
    try:
        value = int(text.replace("_", ""))
    except ValueError:
        raise SimkitError(f"--set {setting.name}={text}: it must be a whole number") from None
    if not setting.least <= value <= _MOST:
        raise SimkitError(
            f"--set {setting.name}={text}: it must be from {setting.least} to {_MOST}"
        )
    return value
