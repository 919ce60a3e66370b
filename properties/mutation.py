"""Mutation of shipped kernels at the level of PTX: does a law notice what matters?

Each mutant removes or weakens a synchronisation, turns a comparison into its neighbour, or moves an
address constant by the size of the access.  What no law notices is either equivalent, for a reason
that can be said (SURVIVORS), or a hole in the laws.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gpu.kernels
from gpu.ptx.executor import PtxDevice
from gpu.ptx.launch import Options
from properties.catalog import laws
from properties.law import Context
from properties.run import replay, run_law
from simkit.machine.gpus import gpu as find_gpu

Operator = Literal["synchronisation", "comparison", "address"]

# Array instructions after which a mutant counts as endless: shipped kernels take far fewer.
_BUDGET = 400_000
# Laws that cost little and see much go first.
_ORDER = ("bits", "hazards", "traffic", "layout", "schedules")

_REMOVED = re.compile(
    r"(bar\.sync|bar\.warp\.sync|barrier\.sync|bar\.arrive|cp\.async\.wait_group|"
    r"cp\.async\.wait_all|cp\.async\.commit_group|fence|membar|mbarrier|wgmma\.(fence|wait|commit))"
)
_WAIT = re.compile(r"(cp\.async\.wait_group\s+)(\d+)")
_COMPARISON = re.compile(r"(setp|set)\.(lt|le|gt|ge|eq|ne|lo|ls|hi|hs)(u?)\b")
_NEIGHBOUR = {
    "lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq",
    "lo": "ls", "ls": "lo", "hi": "hs", "hs": "hi",
}  # fmt: skip
_ADDRESS = re.compile(r"\[(%\w+)([+-]\d+)\]")
_MEMORY = re.compile(r"^(@!?%\w+\s+)?(ld|st|ldmatrix|stmatrix|cp|atom|red)\.")
_LOCATION = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_KERNELS = Path(gpu.kernels.__file__).parent
_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}


@dataclass(frozen=True)
class Mutant:
    """Line ``line`` of a kernel's PTX, ``before``, becomes ``after``; ``source`` is the text of the
    CUDA line that it comes from.
    """

    algorithm: str
    operator: Operator
    line: int
    before: str
    after: str
    source: str = ""


@dataclass(frozen=True)
class Outcome:
    """``law`` noticed a mutant; or none did (empty), and ``reason`` says why, if anything can."""

    mutant: Mutant
    law: str
    reason: str = ""
    is_equivalent: bool = False


@dataclass(frozen=True)
class Survivor:
    """Mutants of an operator whose CUDA line, or PTX line, has ``text`` in it, and why they may
    survive.  ``is_equivalent``: they change no result, no byte and no order.
    """

    operator: Operator
    text: str
    reason: str
    is_equivalent: bool = True


_NO_KEYS = "without keys the maximum is -inf, and so is the LSE that is computed with it"
_NOT_HIDDEN = "a tile that every row sees is masked, which hides nothing"
_STATES = "the levels of a cascade leave states, not O"
_BATCH = (
    Survivor("comparison", "find_rows(", "a tile that is not there has no keys to find"),
    Survivor("comparison", "end_key <= stop", _NOT_HIDDEN),
    Survivor("comparison", "first_key >= last_band.first", _NOT_HIDDEN),
    Survivor(
        "comparison",
        "bool visible = at.key >= band.first",
        "keys begin with 0 and end with the chunk; rows that fill up a tile are not stored",
    ),
    Survivor(
        "comparison",
        "lane.member == 0",
        "the four lanes of a row have the same maximum, sum and LSE",
    ),
    Survivor("comparison", "if (sum > 0.0f) return lse", _NO_KEYS),
    Survivor(
        "comparison",
        "index < TILE_Q * row_chunks",
        "a tile of 16 rows has no fewer chunks than there are threads",
    ),
    Survivor(
        "synchronisation",
        "O takes the place of K and V",
        "with 16 rows the barrier before the sums are read comes first",
    ),
    Survivor(
        "address",
        "rows[threadIdx.x] = place",
        "without ALiBi and sink nobody reads a row's slope and sink",
    ),
)
"""Of the body that the kernels of batched attention share, in the build that is changed by default:
16 rows, tensor cores, no variant or a causal one.
"""

SURVIVORS: dict[str, tuple[Survivor, ...]] = {
    "naive_attention": (
        Survivor(
            "comparison",
            "first_key < kv_len; first_key += kTile",
            "one turn more, or one for no keys at all, loads nothing and adds nothing",
        ),
        Survivor(
            "synchronisation",
            "the tile of O is complete",
            "a warp stores just the rows that it has put into the tile itself",
        ),
    ),
    "flash_attention": (
        Survivor(
            "comparison", "const int tiles = (visible_keys", "no visible keys are none either way"
        ),
        # The smaller of two bounds of the mask; compilers give it the line before.
        Survivor("comparison", "a.x[0]", "of two equal bounds either is the smaller one"),
        Survivor(
            "comparison",
            "if (first_key + kKeyTile - 1 > mask.last_key(first_row))",
            "a tile that ends with the last key is masked, which hides nothing",
        ),
        Survivor("comparison", "lane.member == 0", "the four lanes of a row have the same LSE"),
        Survivor("comparison", "if (sum > 0.0f) return lse", _NO_KEYS),
        Survivor(
            "synchronisation",
            "O takes the place of Q",
            "a warp counts as one thread: what its lanes do to each other is not looked at",
            is_equivalent=False,
        ),
    ),
    "flash_decoding": (
        Survivor("comparison", "lane == 0", "every lane has the same value to store"),
        Survivor("comparison", "split < splits; ++split", "there is always a split"),
        Survivor("comparison", "if (sum > 0.0f) return lse", _NO_KEYS),
    ),
    "kv_append": (
        Survivor("comparison", "lane >= heads *", "a V of 256 values has a vector for every lane"),
    ),
    "merge_states": (
        Survivor(
            "comparison", "pair / heads", "a quotient of 64 bits is that of 32 where both fit"
        ),
        Survivor(
            "synchronisation",
            "every lane has read lse",
            "a warp counts as one thread: what its lanes do to each other is not looked at",
            is_equivalent=False,
        ),
    ),
    "batch_decode": _BATCH,
    "batch_prefill_paged": _BATCH,
    "batch_prefill_ragged": (
        *_BATCH,
        Survivor(
            "comparison",
            "key < stop ? keys.number(key)",
            "a number that no table gives, of a key that is not loaded",
        ),
    ),
    "block_sparse_attention": _BATCH,
    "cascade_attention": (
        *_BATCH,
        Survivor("address", "float_to_element(x)", _STATES),
        Survivor("address", "(queries.start + place.row) * a.heads", _STATES),
        Survivor("address", "reinterpret_cast<uint4*>(a.o)", _STATES),
        Survivor("address", "a.is_split ? a.partial_lse : a.lse", _STATES),
    ),
}


def texts(algorithm: str) -> list[str]:
    """The PTX that the laws of an algorithm run, each text once."""
    return list(builds(algorithm))


def builds(algorithm: str) -> Iterator[str]:
    """`texts`, as laws come to them: the first one costs a single case."""
    new: list[str] = []
    seen: set[str] = set()

    def note(ptx: str) -> str:
        if ptx not in seen:
            seen.add(ptx)
            new.append(ptx)
        return ptx

    context = Context(PtxDevice(edit=note), find_gpu("h100"))
    for law in laws(algorithm):
        for case in law.corners if law.uses_device else ():
            replay(law, context, case)
            yield from new
            new.clear()


def mutants(algorithm: str, ptx: str) -> list[Mutant]:
    """Every mutant of a text, in its order."""
    lines = ptx.splitlines()
    addresses = _address_arithmetic(lines)
    sources = _sources(ptx)
    found = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        edits = [*_edits(text), *(_moved(text) if number in addresses else ())]
        source = sources[_decides(lines, number) - 1]
        found += [Mutant(algorithm, op, number, text, new, source) for op, new in edits]
    return found


def _decides(lines: list[str], number: int) -> int:
    """The line that says what a line is for: of a comparison, where its result is first used."""
    target = re.match(r"\s*setp?\.\S+\s+(%p\w+)", lines[number - 1])
    if target:
        used = re.compile(rf"{target[1]}\b")
        for later in range(number, len(lines)):
            if used.search(lines[later]):
                return later + 1
    return number


def _sources(ptx: str) -> list[str]:
    """For each line, the text of the CUDA line that it comes from."""
    known = _source_lines(ptx)
    found, source = [], ""
    for line in ptx.splitlines():
        location = _LOCATION.match(line.strip())
        if location:
            source = known.get((int(location[1]), int(location[2])), "")
        found.append(source)
    return found


def _source_lines(ptx: str) -> dict[tuple[int, int], str]:
    """Texts of CUDA lines by file number and line, of the files that are at hand."""
    found = {}
    for number, name in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', ptx, re.MULTILINE):
        matches = [p for p in _KERNELS.rglob("*.cu*") if p.name == name.rpartition("/")[2]]
        for path in matches[:1]:
            for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                found[int(number), line] = text.strip()
    return found


def _address_arithmetic(lines: list[str]) -> set[int]:
    """Lines that add a constant to what becomes an address at once, or by one step more."""
    wanted = {
        register
        for line in lines
        if _MEMORY.match(line.strip())
        for register in re.findall(r"\[(%\w+)", line)
    }
    found: set[int] = set()
    for _ in range(2):
        more = set()
        for number, line in enumerate(lines, 1):
            target = re.match(r"\s*(?:add|xor|or|mad\.\w+)\.\w+\s+(%\w+),\s*(.*);", line)
            if target and target[1] in wanted:
                found.add(number)
                more |= set(re.findall(r"%\w+", target[2]))
        wanted |= more
    return found


def _moved(text: str) -> Iterator[tuple[Operator, str]]:
    """A constant that is added to an address, one vector further."""
    constant = re.search(r"(,\s*)(\d+);$", text)
    if constant:
        yield "address", f"{text[: constant.start()]}{constant[1]}{int(constant[2]) + 16};"


def _edits(text: str) -> Iterator[tuple[Operator, str]]:
    if _REMOVED.match(text):
        yield "synchronisation", "// removed"
        wait = _WAIT.match(text)
        if wait:
            yield "synchronisation", f"{wait[1]}{int(wait[2]) + 1};"
    comparison = _COMPARISON.search(text)
    if comparison:
        new = f"{comparison[1]}.{_NEIGHBOUR[comparison[2]]}{comparison[3]}"
        yield "comparison", text[: comparison.start()] + new + text[comparison.end() :]
    address = _ADDRESS.search(text)
    if address and _MEMORY.match(text) and not text.startswith("ld.param"):
        moved = f"[{address[1]}+{int(address[2]) + _size(text)}]"
        yield "address", text[: address.start()] + moved + text[address.end() :]


def _size(text: str) -> int:
    """Bytes of an access: a mutant of an aligned address stays aligned."""
    if text.startswith(("ldmatrix", "stmatrix", "cp.")):
        return 16
    kind = re.search(r"\.[a-z](8|16|32|64)\b", text)
    width = re.search(r"\.v([248])\b", text)
    return _SIZES[kind[1]] * (int(width[1]) if width else 1) if kind else 4


def run(mutant: Mutant, ptx: str) -> Outcome:
    """Checks the laws of a mutant's algorithm until one fails."""

    def edit(text: str) -> str:
        if text != ptx:
            return text
        lines = text.splitlines()
        lines[mutant.line - 1] = mutant.after
        return "\n".join(lines) + "\n"

    device = PtxDevice(options=Options(budget=_BUDGET), edit=edit)
    context = Context(device, find_gpu("h100"))
    chosen = [law for law in laws(mutant.algorithm) if law.uses_device]

    def rank(name: str) -> int:
        kind = name.rpartition("_")[2]
        return _ORDER.index(kind) if kind in _ORDER else len(_ORDER)

    chosen.sort(key=lambda law: rank(law.name))

    def noticed(*, corners: bool, examples: int | None) -> str:
        for law in chosen:
            result = run_law(law, context, examples=examples, shrink=False, corners=corners)
            if result.status == "fail":
                return law.name
        return ""

    # Corners notice most mutants; what nobody can say a reason for gets all that verify tries.
    law = noticed(corners=True, examples=0)
    if law:
        return Outcome(mutant, law)
    survivor = _known(mutant)
    if survivor:
        return Outcome(mutant, "", survivor.reason, survivor.is_equivalent)
    return Outcome(mutant, noticed(corners=False, examples=None))


def _known(mutant: Mutant) -> Survivor | None:
    for survivor in SURVIVORS.get(mutant.algorithm, ()):
        texts_ = mutant.source, mutant.before
        if survivor.operator == mutant.operator and any(survivor.text in t for t in texts_):
            return survivor
    return None


LEAST_CAUGHT = 0.95
"""Part of the mutants that change something which the laws have to notice."""


def caught(outcomes: list[Outcome]) -> float:
    """The part of the mutants that are not equivalent which some law noticed."""
    counted = [o for o in outcomes if not o.is_equivalent]
    return sum(bool(o.law) for o in counted) / len(counted) if counted else 1.0
