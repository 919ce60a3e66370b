"""mbarrier objects and cluster barriers.  Source: PTX ISA 8.8, 9.7.13.4, 9.7.13.15."""

from __future__ import annotations

from collections.abc import Mapping

from gpu.ptx.emit import Emitter
from gpu.ptx.registry import ptx
from gpu.ptx.syntax import Immediate, Instruction, Operand, Register, Sink

Modifiers = Mapping[str, str]

_SPACES = "shared shared::cta shared::cluster"
# Only arrivals and transactions reach another CTA's objects.
_OWN_SPACES = "shared shared::cta"
_SEMANTICS = "release relaxed acquire"
_SCOPES = "cta cluster"
_TAIL = "{.<semantics>}{.<scope>}{.<space>}.b64"


def _space(m: Modifiers) -> str:
    return "shared" if "space" in m else "generic"


def _object(e: Emitter, operand: Operand, m: Modifiers) -> str:
    base, offset = e.address(operand)
    return f"{_space(m)!r}, {base}, {offset}"


def _phase(e: Emitter, operand: Operand, is_parity: bool) -> str:
    """The phase to wait for: its parity, or a state that an arrival has given."""
    if is_parity and isinstance(operand, Immediate) and operand.value not in (0, 1):
        raise e.error("a parity is 0 or 1")
    return e.read(operand, "u4" if is_parity else "u8")


@ptx("mbarrier.init{.<space>}.b64", operands=2, results=0, pure=False, space=_OWN_SPACES)
def initialise(e: Emitter, i: Instruction, m: Modifiers) -> None:
    count = e.read(i.operands[1], "u4")
    e.line(f"x.mbarrier_init({_object(e, i.operands[0], m)}, {count}, {e.mask}, {e.site})")


@ptx("mbarrier.inval{.<space>}.b64", operands=1, results=0, pure=False, space=_OWN_SPACES)
def invalidate(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.line(f"x.mbarrier_invalidate({_object(e, i.operands[0], m)}, {e.mask}, {e.site})")


@ptx(
    f"mbarrier.expect_tx{_TAIL}",
    f"mbarrier.complete_tx{_TAIL}",
    operands=2,
    results=0,
    pure=False,
    semantics=_SEMANTICS,
    scope=_SCOPES,
    space=_SPACES,
)
def transaction(e: Emitter, i: Instruction, m: Modifiers) -> None:
    size = e.read(i.operands[1], "u4")
    counts = f"0, {size}, 0" if "expect_tx" in m else f"0, 0, {size}"
    e.line(
        f"x.mbarrier_change({_object(e, i.operands[0], m)}, {counts}, False, True, {e.mask},"
        f" {e.site})"
    )


@ptx(
    f"mbarrier.<kind>{{.noComplete}}{_TAIL}",
    operands=(2, 3),
    pure=False,
    kind="arrive arrive_drop",
    semantics=_SEMANTICS,
    scope=_SCOPES,
    space=_SPACES,
)
@ptx(
    f"mbarrier.<kind>.expect_tx{_TAIL}",
    operands=3,
    pure=False,
    kind="arrive arrive_drop",
    semantics=_SEMANTICS,
    scope=_SCOPES,
    space=_SPACES,
)
def arrive(e: Emitter, i: Instruction, m: Modifiers) -> None:
    target, place = i.operands[:2]
    third = e.read(i.operands[2], "u4") if len(i.operands) == 3 else "1"
    counts = f"1, {third}, 0" if "expect_tx" in m else f"{third}, 0, 0"
    drops = m["kind"] == "arrive_drop"
    if m.get("semantics") == "relaxed":
        e.line("x.order = 'relaxed'")
    value = (
        f"x.mbarrier_change({_object(e, place, m)}, {counts}, {drops}, {'noComplete' not in m},"
        f" {e.mask}, {e.site})"
    )
    if isinstance(target, Sink):
        e.line(value)
    elif m.get("space") == "shared::cluster":
        raise e.error("an arrival at another CTA's mbarrier has no result, only _")
    else:
        e.write(target, "u8", value)


@ptx(
    f"mbarrier.test_wait{{.parity}}{_TAIL}",
    operands=3,
    pure=False,
    semantics=_SEMANTICS,
    scope=_SCOPES,
    space=_OWN_SPACES,
)
def test(e: Emitter, i: Instruction, m: Modifiers) -> None:
    target, place, phase = i.operands
    is_parity = "parity" in m
    value = _phase(e, phase, is_parity)
    e.write(
        target,
        "b1",
        f"x.mbarrier_test({_object(e, place, m)}, {value}, {is_parity}, {e.mask}, {e.site})",
    )


@ptx(
    f"mbarrier.try_wait{{.parity}}{_TAIL}",
    operands=(3, 4),
    pure=False,
    ends_block=True,
    semantics=_SEMANTICS,
    scope=_SCOPES,
    space=_OWN_SPACES,
)
def wait(e: Emitter, i: Instruction, m: Modifiers) -> None:
    target, place, phase = i.operands[:3]
    is_parity = "parity" in m
    value = _phase(e, phase, is_parity)
    # The predicate exists when the warp goes on: the scheduler writes it then.
    name = target.name if isinstance(target, Register) else ""
    e.line(
        f"return x.mbarrier_wait({_object(e, place, m)}, {value}, {is_parity}, {name!r},"
        f" {e.mask}, {e.site})"
    )


@ptx("mbarrier.pending_count.b64", operands=2)
def pending(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.write(i.operands[0], "u4", f"x.pending_count({e.read(i.operands[1], 'u8')})")


@ptx(
    "cp.async.mbarrier.arrive{.noinc}{.<space>}.b64",
    operands=1,
    results=0,
    pure=False,
    space="shared shared::cta",
)
def arrive_after_copies(e: Emitter, i: Instruction, m: Modifiers) -> None:
    place = _object(e, i.operands[0], m)
    e.line(f"x.arrive_after_copies({place}, {'noinc' not in m}, {e.mask}, {e.site})")


@ptx(
    "barrier.cluster.arrive{.<semantics>}{.aligned}",
    operands=0,
    results=0,
    pure=False,
    semantics="release relaxed",
)
def cluster_arrive(e: Emitter, i: Instruction, m: Modifiers) -> None:
    if m.get("semantics") == "relaxed":
        e.line("x.order = 'relaxed'")
    e.line(f"x.cluster_arrive({e.mask}, {e.site})")


@ptx(
    "barrier.cluster.wait{.acquire}{.aligned}",
    operands=0,
    results=0,
    pure=False,
    ends_block=True,
)
def cluster_wait(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.line(f"return x.cluster_wait({e.mask}, {e.site})")
