"""Mutation of PTX: what is changed, and that the laws notice it in the smallest kernel."""

from __future__ import annotations

import pytest

from properties import mutation
from properties.mutation import Outcome, caught, mutants

TEXT = """.version 8.6
.target sm_90
.address_size 64
.visible .entry k(.param .u64 p) {
    .reg .b64 %rd<4>; .reg .b32 %r<4>; .reg .pred %p<2>;
    ld.param.u64 %rd1, [p];
    add.s64 %rd2, %rd1, 64;
    setp.lt.s32 %p1, %r1, 7;
    ld.global.v2.u32 {%r1, %r2}, [%rd2+8];
    cp.async.wait_group 1;
    bar.sync 0;
    ret;
}
"""


def test_every_kind_of_change() -> None:
    found = {(m.operator, m.line, m.after) for m in mutants("flash_attention", TEXT)}
    assert found == {
        ("address", 7, "add.s64 %rd2, %rd1, 80;"),
        ("comparison", 8, "setp.le.s32 %p1, %r1, 7;"),
        ("address", 9, "ld.global.v2.u32 {%r1, %r2}, [%rd2+16];"),
        ("synchronisation", 10, "// removed"),
        ("synchronisation", 10, "cp.async.wait_group 2;"),
        ("synchronisation", 11, "// removed"),
    }


def test_every_mutant_of_the_cache_is_noticed() -> None:
    (text,) = mutation.texts("fp8_kv_cache")
    outcomes = [mutation.run(mutant, text) for mutant in mutants("fp8_kv_cache", text)]
    assert len(outcomes) >= 10
    assert [o.mutant for o in outcomes if not o.law] == []
    assert caught(outcomes) == 1


@pytest.mark.parametrize("algorithm", mutation.SURVIVORS)
def test_known_survivors_are_lines_of_their_kernel(algorithm: str) -> None:
    """A reason whose line is gone would excuse nothing, or something else one day."""
    missing = set(mutation.SURVIVORS[algorithm])
    for text in mutation.builds(algorithm):
        for one in mutants(algorithm, text):
            missing -= {
                survivor
                for survivor in missing
                if survivor.operator == one.operator and survivor.text in one.source + one.before
            }
        if not missing:
            break
    assert not missing


def test_equivalent_mutants_do_not_count() -> None:
    mutant = mutants("flash_attention", TEXT)[0]
    outcomes = [Outcome(mutant, "bits"), Outcome(mutant, "", "why", is_equivalent=True)]
    assert caught(outcomes) == 1
    assert caught([*outcomes, Outcome(mutant, "")]) == 0.5
