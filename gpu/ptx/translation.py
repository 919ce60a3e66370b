"""PTX text made ready to run and kept: parsed and translated once, whoever loads it again."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from gpu.ptx import isa
from gpu.ptx.check import check
from gpu.ptx.emit import Code, generate
from gpu.ptx.parser import parse
from gpu.ptx.program import Program, lower
from gpu.ptx.syntax import Label, Position

assert isa  # importing it registers every instruction


class KernelCode:
    """The generated code of a kernel whose variables lie at given addresses.

    Every block is translated at once, so that what cannot run is refused before anything does;
    versions for diverged warps are added when they are first needed.
    """

    def __init__(
        self, program: Program, symbols: Mapping[str, int], shared: frozenset[str]
    ) -> None:
        self.program = program
        self._symbols = dict(symbols)
        self._shared = shared
        self._codes: dict[tuple[int, bool, bool], Code] = {}
        for block in program.blocks:
            self.of(block.index, False, False)

    def of(self, block: int, is_masked: bool, is_clustered: bool) -> Code:
        """The code of a block.  In a cluster, the addresses of ``shared`` variables carry the rank
        of the CTA.
        """
        key = (block, is_masked, is_clustered)
        if key not in self._codes:
            ranked = self._shared if is_clustered else frozenset()
            self._codes[key] = generate(
                self.program.blocks[block], self.program, self._symbols, is_masked, ranked
            )
        return self._codes[key]


class Translation:
    """A parsed text and what has been made of it: programs by kernel, code by addresses too."""

    def __init__(self, ptx: str) -> None:
        self.syntax = parse(ptx)
        self.positions: dict[int, Position] = {
            s.position.line: s.position
            for f in self.syntax.functions.values()
            for s in f.body
            if not isinstance(s, Label)
        }
        self._programs: dict[str, Program] = {}
        self._codes: dict[tuple[str, frozenset[tuple[str, int]]], KernelCode] = {}

    def program(self, kernel: str) -> Program:
        if kernel not in self._programs:
            program = lower(self.syntax, kernel)
            inner = (f.variables for f in self.syntax.functions.values())
            check(program, {v.name for part in (self.syntax.variables, *inner) for v in part})
            program.decoded = []
            self._programs[kernel] = program
        return self._programs[kernel]

    def code(self, kernel: str, symbols: Mapping[str, int], shared: frozenset[str]) -> KernelCode:
        key = (kernel, frozenset(symbols.items()))
        if key not in self._codes:
            self._codes[key] = KernelCode(self.program(kernel), symbols, shared)
        return self._codes[key]


@lru_cache(maxsize=64)
def translate(ptx: str) -> Translation:
    """The translation of a text.  PtxError where it is malformed."""
    return Translation(ptx)
