"""What a trace shows of a block: stretches of instructions of one kind, named by the commonest.

Nothing is recorded while a block runs: that a warp has run it says all of this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpu.ptx.blocks import Block
from gpu.ptx.syntax import Instruction


@dataclass(frozen=True, slots=True)
class Segment:
    """Instructions ``first`` to before ``end`` of a block; ``site``: of the one that names them."""

    first: int
    end: int
    kind: str
    name: str
    site: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A block's segments, its length in steps, and at which step each site stands with what."""

    segments: tuple[Segment, ...]
    length: int
    step_of_site: dict[int, int]
    name_of_site: dict[int, str]

    def segment_at(self, site: int) -> Segment:
        """The segment in which a site stands."""
        step = self.step_of_site[site]
        return next(segment for segment in self.segments if step < segment.end)


@dataclass(frozen=True, slots=True)
class Role:
    """The kind that an instruction shows as (traces.events.KINDS).  What is not ``major`` shows
    only where nothing major is near.
    """

    kind: str
    major: bool = True


_WAIT, _BARRIER, _MMA = Role("wait"), Role("barrier"), Role("mma")
_LOAD, _STORE = Role("load"), Role("store")
# Registers and on-chip memory of the warp itself.
_FETCH, _PUT, _COMPUTE = Role("load", False), Role("store", False), Role("compute", False)
_NEAR = ("shared", "shared::cta", "shared::cluster", "local")

# By opcode: the first of the modifiers that the instruction has decides; "" is any.
_ROLES: dict[str, tuple[tuple[str, Role], ...]] = {
    "cp": (
        ("wait_group", _WAIT),
        ("wait_all", _WAIT),
        ("commit_group", _COMPUTE),
        ("mbarrier", _BARRIER),
        ("bulk_group", _STORE),
        ("", _LOAD),
    ),
    "mbarrier": (
        ("try_wait", _WAIT),
        ("test_wait", _WAIT),
        *((what, _BARRIER) for what in ("arrive", "arrive_drop", "expect_tx", "complete_tx")),
    ),
    "bar": (("arrive", _BARRIER), ("sync", _WAIT), ("red", _WAIT)),
    "griddepcontrol": (("wait", _WAIT), ("", _BARRIER)),
    "wgmma": (("mma_async", _MMA), ("commit_group", _MMA), ("", _WAIT)),
    "mma": (("", _MMA),),
    "wmma": (("mma", _MMA), ("load", _LOAD), ("store", _STORE)),
    "ld": (*((near, _FETCH) for near in _NEAR), ("param", _COMPUTE), ("const", _COMPUTE),
           ("", _LOAD)),
    "st": (("async", _STORE), *((near, _PUT) for near in _NEAR), ("", _STORE)),
    "ldmatrix": (("", _FETCH),),
    "stmatrix": (("", _PUT),),
    "cvt": (("", Role("convert", False)),),
    "ex2": (("", Role("softmax", False)),),
}  # fmt: skip
_ROLES["barrier"] = (*_ROLES["bar"], ("wait", _WAIT))
_ROLES["red"] = _ROLES["atom"] = _ROLES["st"]
_ROLES["ldu"] = _ROLES["ld"]

# Major instructions of these kinds are one segment if there are at most so many others in between;
# fewer others than _SHORT beside one belong to it (they make its addresses).
_JOINED = frozenset(("load", "store", "mma"))
_GAP = 16
_SHORT = 8
# Stretches of minor instructions are of a kind that makes up this part of them.
_SHARE = 0.25
_WORDS = 5
_DULL = frozenset(("sync", "aligned", "row", "col", "weak"))


def layout_of(block: Block) -> Layout:
    """The segments of a block, one step for each instruction."""
    instructions = [item.instruction for item in block.items]
    steps: dict[int, int] = {}
    # A line of inline PTX may hold several: what is major stands for it.
    for step in sorted(range(len(instructions)), key=lambda k: not role_of(instructions[k]).major):
        steps.setdefault(instructions[step].position.line, step)
    names = {site: short_name(instructions[step]) for site, step in steps.items()}
    return Layout(tuple(_segments(instructions)), len(instructions), steps, names)


def role_of(instruction: Instruction) -> Role:
    """How an instruction shows."""
    for modifier, role in _ROLES.get(instruction.opcode, ()):
        if not modifier or modifier in instruction.modifiers:
            return role
    return _COMPUTE


def short_name(instruction: Instruction) -> str:
    """The opcode and the modifiers that tell most: ``wgmma.mma_async.m64n128k16.f32.bf16``."""
    dull = _DULL - {"sync"} if instruction.opcode in ("bar", "barrier") else _DULL
    words = [instruction.opcode, *(m for m in instruction.modifiers if m not in dull)]
    return ".".join(words[:_WORDS])


def _segments(instructions: Sequence[Instruction]) -> Iterator[Segment]:
    roles = [role_of(instruction) for instruction in instructions]
    length = len(roles)

    def segment(first: int, end: int, role: Role) -> Segment:
        named = _commonest([instructions[k] for k in range(first, end) if roles[k] == role])
        return Segment(first, end, role.kind, short_name(named), named.position.line)

    covered = 0
    stretches = _stretches(roles)
    followers = [*(first for first, _, _ in stretches), length][1:]
    for (first, end, role), following in zip(stretches, followers, strict=True):
        is_joined = role.kind in _JOINED
        if first - covered >= (_SHORT if is_joined else 1):
            yield segment(covered, first, _minor(roles[covered:first]))
            covered = first
        if is_joined and following - end < _SHORT:
            end = following
        yield segment(covered, end, role)
        covered = end
    if covered < length:
        yield segment(covered, length, _minor(roles[covered:]))


def _stretches(roles: Sequence[Role]) -> list[tuple[int, int, Role]]:
    """First, end and role of what is major."""
    found: list[tuple[int, int, Role]] = []
    for step, role in enumerate(roles):
        if not role.major:
            continue
        if found and found[-1][2] == role and role.kind in _JOINED and step - found[-1][1] <= _GAP:
            found[-1] = found[-1][0], step + 1, role
        else:
            found.append((step, step + 1, role))
    return found


def _minor(roles: Sequence[Role]) -> Role:
    """The role of a stretch without anything major."""
    others = Counter(role for role in roles if role != _COMPUTE)
    role, count = others.most_common(1)[0] if others else (_COMPUTE, 0)
    return role if count >= _SHARE * len(roles) else _COMPUTE


def _commonest(instructions: Sequence[Instruction]) -> Instruction:
    """The first of the instructions of which there are most."""
    counts = Counter(short_name(i) for i in instructions)
    return max(instructions, key=lambda i: counts[short_name(i)])
