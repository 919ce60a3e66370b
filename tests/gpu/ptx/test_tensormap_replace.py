"""Tensor maps that a kernel makes in shared memory: tensormap.replace and tensormap.cp_fenceproxy.

Source: PTX ISA 8.8, 9.7.9.28 and 9.7.13.16.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from lanes import device, run

import gpu
from gpu.tensor_map import decode, usable
from simkit.errors import LaunchError, SimkitError

ZERO = "mov.u32 %r40, 0; " + " ".join(
    f"st.shared.v4.u32 [map+{16 * k}], {{%r40, %r40, %r40, %r40}};" for k in range(8)
)


def replace(field: str, *values: object, size: int = 32) -> str:
    operands = ", ".join(str(v) for v in values)
    return f"tensormap.replace.tile.{field}.shared::cta.b1024.b{size} [map], {operands};"


def matrix(rows: int, columns: int, box: tuple[int, int]) -> str:
    """An f16 matrix at %x whose boxes are swizzled by 128 bytes."""
    return "\n".join(
        [
            replace("global_address", "%x", size=64),
            replace("rank", 1),
            *(replace("box_dim", axis, extent) for axis, extent in enumerate(box[::-1])),
            replace("global_dim", 0, columns),
            replace("global_dim", 1, rows),
            f"mov.u64 %rd30, {2 * columns};",
            replace("global_stride", 0, "%rd30", size=64),
            replace("element_stride", 0, 1),
            replace("element_stride", 1, 1),
            replace("elemtype", 6),
            replace("interleave_layout", 0),
            replace("swizzle_mode", 3),
            replace("fill_mode", 0),
        ]
    )


def made(statements: str, x: np.ndarray) -> bytes:
    """The 128 bytes that the first thread leaves in global memory."""
    body = f"""
        .shared .align 128 .b8 map[128];
        setp.ne.u32 %p1, %t5, 0;
        @%p1 bra wait;
        {statements}
        wait: bar.warp.sync -1;
        mov.u64 %rd1, map;
        tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned
            [%out], [%rd1], 128;
    """
    got = run(body, {"x": x, "out": np.zeros(128, np.uint8)}).arrays
    return got["out"].tobytes()


def test_a_map_made_from_zeros_is_the_one_that_the_host_makes() -> None:
    x = np.zeros((96, 64), np.float16)
    fields = decode(made(ZERO + matrix(96, 64, (32, 64)), x))
    wanted = gpu.TensorMap(device().array(x), (32, 64), swizzle="128B").fields
    assert fields.address % 256 == 0
    for name in ("element", "dims", "strides", "box", "element_strides", "swizzle", "oob_fill"):
        assert getattr(fields, name) == getattr(wanted, name), name


def test_bf16_and_f32_by_their_numbers() -> None:
    x = np.zeros((96, 64), np.float16)
    text = ZERO + matrix(96, 64, (32, 64))
    assert decode(made(text + replace("elemtype", 10), x)).element.name == "bf16"
    four = text + replace("elemtype", 7) + replace("box_dim", 0, 32) + replace("fill_mode", 1)
    fields = decode(made(four, x))
    assert (fields.element.name, fields.box, fields.oob_fill) == ("f32", (32, 32), "nan")


@pytest.mark.parametrize(
    ("last", "problem"),
    [
        (replace("box_dim", 0, 100), "box"),
        (replace("rank", 2), "element_strides"),
        (replace("element_stride", 0, 0), "element_strides"),
    ],
)
def test_a_map_that_the_driver_would_refuse_is_refused_when_used(last: str, problem: str) -> None:
    raw = made(ZERO + matrix(96, 64, (32, 64)) + last, np.zeros((96, 64), np.float16))
    with pytest.raises(SimkitError, match=problem):
        usable(raw)


@pytest.mark.parametrize(
    ("statements", "problem"),
    [
        (replace("rank", 1), "neither a tensor map nor zeros: it begins with ff ff"),
        (ZERO + replace("rank", 5), "rank 5 is not known"),
        (ZERO + replace("elemtype", 40), "elemtype 40 is not known"),
        (ZERO + replace("box_dim", 5, 8), "box_dim has no dimension 5"),
        (ZERO + replace("interleave_layout", 1), "interleave_layout 1 is not known"),
    ],
)
def test_what_replace_refuses(statements: str, problem: str) -> None:
    with pytest.raises(LaunchError, match=rf"PTX line \d+.*{problem}"):
        made(statements, np.zeros((96, 64), np.float16))


def test_tensor_reductions_of_bf16_add_numbers() -> None:
    """cp.reduce.async.bulk.tensor takes the type from the map."""
    bf16 = np.dtype(ml_dtypes.bfloat16)
    generator = np.random.default_rng(3)
    x, y = (generator.standard_normal((8, 64)).astype(bf16) for _ in range(2))
    dev = device()
    target, source = dev.array(x, "x"), dev.array(y, "y")
    boxes = gpu.TensorMap(target, (8, 64))
    body = """
        .visible .entry k(.param .align 64 .b8 map[128], .param .u64 y) {
        .reg .b64 %rd<8>; .reg .b32 %r<8>; .reg .pred %p1;
        .shared .align 128 .b8 tile[1024];
        mov.u32 %r0, %tid.x; ld.param.u64 %rd0, [y]; mov.u64 %rd1, tile;
        mad.wide.u32 %rd2, %r0, 8, %rd0; mad.wide.u32 %rd3, %r0, 8, %rd1;
        ld.global.u64 %rd4, [%rd2]; st.shared.u64 [%rd3], %rd4; bar.sync 0;
        setp.ne.u32 %p1, %r0, 0; @%p1 ret;
        mov.u64 %rd5, map; cvta.param.u64 %rd5, %rd5;
        cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group
            [%rd5, {0, 0}], [tile];
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; ret; }
    """
    header = ".version 8.5\n.target sm_90a\n.address_size 64\n"
    dev.load(header + body).kernel("k").launch((1,), (128,), [boxes, source])
    wanted = (x.astype(np.float32) + y.astype(np.float32)).astype(bf16)
    assert np.array_equal(target.to_numpy(), wanted)
