"""Kernels broken by one edit of their source text, or of the text of headers that they include."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import gpu
from gpu.compile import INCLUDE_DIRECTORY
from gpu.kernels.build import kernel_source
from properties.catalog import law
from properties.law import Context, Law, case_to_json
from simkit.machine.gpus import gpu as find_gpu

_INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)
# Algorithms that run another one's kernel.
_KERNELS = {"cascade_attention": "batch_prefill_paged"}


@dataclass(frozen=True)
class Mutant:
    """One edit: ``old`` becomes ``new`` wherever it stands in the kernel's file and the project's
    headers.  At least one of ``laws`` must see it; those that see it soonest come first.  ``shows``
    is in the JSON of cases in which the edit shows: these are tried first.
    """

    algorithm: str
    name: str
    old: str
    new: str
    laws: tuple[str, ...] = ("bits",)
    shows: str = ""

    @property
    def text(self) -> str:
        """The kernel's text with the edit."""
        kernel = _KERNELS.get(self.algorithm, self.algorithm)
        return edited_source(kernel, self.old, self.new)

    def context(self) -> Context:
        """What laws are checked on when this mutant stands for its kernel."""
        device = gpu.open("ptx", options=gpu.Options(budget=2_000_000))
        return Context(device, find_gpu("h100"), sources={self.algorithm: self.text})

    def law(self, name: str) -> Law:
        """A law of the algorithm, corners in which the edit shows first."""
        one = law(self.algorithm, name)
        corners = sorted(one.corners, key=lambda case: self.shows not in case_to_json(case))
        return replace(one, corners=tuple(corners))


def mutant(algorithm: str, name: str, old: str, new: str, *laws: str, shows: str = "") -> Mutant:
    return Mutant(algorithm, name, old, new, laws or ("bits",), shows)


def edited_source(kernel: str, old: str, new: str) -> str:
    """A kernel's text with ``old`` replaced by ``new``, there and in its headers: those that change,
    and those that include them, stand in the places of their includes.
    """
    file = f"{kernel}.cu"
    texts = _source_files(kernel)
    edited = {name: text.replace(old, new) for name, text in texts.items()}
    changed = {name for name in texts if texts[name] != edited[name]}
    assert changed, "the edit no longer applies"

    def reaches(name: str) -> bool:
        return name in changed or any(reaches(one) for one in _INCLUDE.findall(texts[name]))

    return _with_headers(file, edited, {name for name in texts if reaches(name)})


def _source_files(kernel: str) -> dict[str, str]:
    """Texts of a kernel's file and of all headers below it, by file name."""
    found: dict[str, str] = {}
    pending = {f"{kernel}.cu": kernel_source(kernel)}
    while pending:
        name, text = pending.popitem()
        found[name] = text
        for header in set(_INCLUDE.findall(text)) - set(found):
            pending[header] = (INCLUDE_DIRECTORY / header).read_text(encoding="utf-8")
    return found


def _with_headers(name: str, texts: dict[str, str], inlined: set[str]) -> str:
    """The text of file ``name``, in which the headers ``inlined`` stand instead of their includes;
    lines keep their numbers and files.
    """
    text = texts[name].replace("#pragma once\n", "\n")

    def put(include: re.Match[str]) -> str:
        header = include[1]
        if header not in inlined:
            return include[0]
        guard = "INLINED_" + re.sub(r"\W", "_", header)
        after = text.count("\n", 0, include.end()) + 2
        return (
            f'#ifndef {guard}\n#define {guard}\n#line 1 "{header}"\n'
            f'{_with_headers(header, texts, inlined)}\n#endif\n#line {after} "{name}"'
        )

    return _INCLUDE.sub(put, text)
