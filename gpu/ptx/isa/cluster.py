"""Clusters, register budgets, dependent launches, cache policies and proxy fences.

Source: PTX ISA 8.8, 9.7.9.22-23 (mapa, getctarank), 9.7.13.5 (fences), 9.7.13.16, 9.7.19
(setmaxnreg).
"""

from __future__ import annotations

from collections.abc import Mapping

from gpu.ptx.emit import Emitter
from gpu.ptx.registry import ptx
from gpu.ptx.syntax import Immediate, Instruction

Modifiers = Mapping[str, str]


@ptx("mapa{.shared::cluster}.<type>", operands=3, type="u32 u64")
def map_address(e: Emitter, i: Instruction, m: Modifiers) -> None:
    """The address of a shared variable in the CTA of another rank."""
    code = "u4" if m["type"] == "u32" else "u8"
    target, address, rank = i.operands
    e.write(
        target,
        code,
        f"x.map_address({e.read(address, code)}, {e.read(rank, 'u4')}, {e.mask}, {e.site})",
    )


@ptx("getctarank{.shared::cluster}.<type>", operands=2, type="u32 u64")
def cta_rank(e: Emitter, i: Instruction, m: Modifiers) -> None:
    code = "u4" if m["type"] == "u32" else "u8"
    e.write(i.operands[0], "u4", f"x.rank_of({e.read(i.operands[1], code)})")


@ptx("setmaxnreg.<kind>.sync.aligned.u32", operands=1, results=0, pure=False, kind="inc dec")
def set_registers(e: Emitter, i: Instruction, m: Modifiers) -> None:
    """Changes how many registers a warp may use: nothing that a program can see."""
    count = i.operands[0]
    if not isinstance(count, Immediate) or not (
        24 <= int(count.value) <= 256 and int(count.value) % 8 == 0
    ):
        raise e.error("setmaxnreg takes a multiple of 8 from 24 to 256")


@ptx("griddepcontrol.launch_dependents", operands=0, results=0, pure=False, ends_block=True)
def allow_dependents(e: Emitter, i: Instruction, m: Modifiers) -> None:
    # The block ends, so that the dependent launch can start before anything that follows.
    e.line(f"return x.allow_dependents({e.mask})")


@ptx("griddepcontrol.wait", operands=0, results=0, pure=False, ends_block=True)
def wait_for_primary(e: Emitter, i: Instruction, m: Modifiers) -> None:
    e.line(f"return x.wait_for_primary({e.site})")


@ptx(
    "createpolicy.fractional.<primary>{.<secondary>}.b64",
    operands=(1, 2),
    pure=False,
    primary="L2::evict_last L2::evict_normal L2::evict_first L2::evict_unchanged",
    secondary="L2::evict_first L2::evict_unchanged",
)
@ptx(
    "createpolicy.range{.global}.<primary>{.<secondary>}.b64",
    operands=4,
    pure=False,
    primary="L2::evict_last L2::evict_normal L2::evict_first L2::evict_unchanged",
    secondary="L2::evict_first L2::evict_unchanged",
)
@ptx("createpolicy.cvt.L2.b64", operands=2, pure=False)
def cache_policy(e: Emitter, i: Instruction, m: Modifiers) -> None:
    """A policy is an opaque hint; all are alike here."""
    e.write(i.operands[0], "u8", e.constant(0, "u8"))


@ptx(
    "fence.proxy.async{.<space>}",
    "fence.proxy.<kind>",
    operands=0,
    results=0,
    pure=False,
    space="global shared::cta shared::cluster",
    kind="alias",
)
@ptx(
    "fence.mbarrier_init.release.cluster",
    "fence.<semantics>.<restriction>.cluster",
    operands=0,
    results=0,
    pure=False,
    semantics="acquire release",
    restriction="sync_restrict::shared::cta sync_restrict::shared::cluster",
)
@ptx("fence.proxy.tensormap::generic.release.<scope>", operands=0, results=0, pure=False,
     scope="cta cluster gpu sys")  # fmt: skip
def fence(e: Emitter, i: Instruction, m: Modifiers) -> None:
    """Memory is sequentially consistent here; the hazard detector listens."""
    if "async" in m:
        e.line(f"x.proxy_fence({e.mask})")
    elif "mbarrier_init" in m:
        e.line(f"x.mbarrier_fence({e.mask})")


@ptx("fence.proxy.tensormap::generic.acquire.<scope>", operands=2, results=0, pure=False,
     scope="cta cluster gpu sys")  # fmt: skip
def acquire_map(e: Emitter, i: Instruction, m: Modifiers) -> None:
    base, offset = e.address(i.operands[0])
    e.line(f"x.tensormap_fence({base}, {offset}, {e.mask})")
