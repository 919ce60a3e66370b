"""Resolves the references of the catalogue: "module:function", "module", or "package/file"."""

from __future__ import annotations

import importlib
from importlib import resources
from typing import Any

from simkit.errors import SimkitError


def resolve(reference: str) -> Any:
    """The function or module that a reference names; SimkitError if there is none."""
    module, _, attribute = reference.partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise SimkitError(f"catalogue: {reference!r} does not import: {error}") from error
    if not attribute:
        return found
    if not callable(getattr(found, attribute, None)):
        raise SimkitError(f"catalogue: {reference!r}: the module has no function {attribute!r}")
    return getattr(found, attribute)


def check_file(reference: str) -> None:
    """SimkitError if the file of "package/file" does not exist."""
    folder, _, name = reference.rpartition("/")
    package = folder.replace("/", ".")
    try:
        exists = resources.files(package).joinpath(name).is_file()
    except ImportError as error:
        raise SimkitError(f"catalogue: {reference!r}: no package {package!r}: {error}") from error
    if not exists:
        raise SimkitError(f"catalogue: {reference!r} does not exist")
