"""What the wgmma tests share: a kernel for any shape and type, operands laid out as the ISA says.

Layouts and fragments are written down once more here, from PTX ISA 8.8, 9.7.15.5.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from hopper_kernels import CUDA

from gpu.device import Device

DTYPES: dict[str, Any] = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
# Chunks of 16 bytes in a row of the swizzle atom, and the mode's number in a descriptor.
ATOMS = {"none": (1, 0), "32B": (2, 3), "64B": (4, 2), "128B": (8, 1)}


@dataclass(frozen=True)
class Laid:
    """An operand in shared memory: its bytes, a descriptor without its address, and how far the
    address moves from one step along K to the next.
    """

    image: np.ndarray
    descriptor: int
    step: int


def lay_out(matrix: np.ndarray, swizzle: str, is_k_major: bool) -> Laid:
    """A matrix (M or N, K) in the canonical layout of a swizzle mode.

    K-major: ((8,m),(T,2k)):((WT,SBO),(1,LBO)), MN-major: ((T,W,m),(8,k)):((1,T,LBO),(WT,SBO)), or
    without a swizzle ((T,1,m),(8,k)):((1,T,SBO),(1T,LBO)); W chunks in a row of the atom, T
    elements in a chunk.
    """
    rows, depth = matrix.shape
    size = matrix.itemsize
    t, (w, mode) = 16 // size, ATOMS[swizzle]
    row, k = np.ogrid[:rows, :depth]
    if is_k_major and w == 1:
        sbo, lbo = 8 * t, 8 * t * (rows // 8)  # in elements
        offset = row % 8 * t + row // 8 * sbo + k % t + k // t * lbo
        step = 2 * lbo * size
    elif is_k_major:
        # Wider than a row of the atom: the atoms after one another along K.
        sbo, lbo = 8 * w * t, 0
        atom = rows * w * t
        inside = k % (w * t)
        offset = (
            row % 8 * w * t + row // 8 * sbo + inside % t + inside // t * t + k // (w * t) * atom
        )
        step = 32
    elif w == 1:
        sbo, lbo = 8 * t, 8 * t * (rows // t)
        offset = row % t + row // t * sbo + k % 8 * t + k // 8 * lbo
        step = 2 * lbo * size
    else:
        lbo = 8 * w * t * (depth // 8)
        sbo = 8 * w * t
        offset = row % t + row // t % w * t + row // (w * t) * lbo + k % 8 * w * t + k // 8 * sbo
        step = 2 * sbo * size
    place = np.broadcast_to(offset * size, matrix.shape).astype(np.int64)
    # Swizzle<B, 4, 3>: B bits from bit 4 up are exclusive-ored with those 3 higher.
    place = place ^ (place >> 3 & (w - 1) << 4)
    image = np.zeros(-(-(int(place.max()) + size) // 1024) * 1024, np.uint8)
    data = np.ascontiguousarray(matrix).view(np.uint8).reshape(rows, depth, size)
    for byte in range(size):
        image[place + byte] = data[:, :, byte]
    fields = (lbo * size >> 4 & 0x3FFF) << 16 | (sbo * size >> 4 & 0x3FFF) << 32 | mode << 62
    return Laid(image, fields, step)


def k_steps_of(swizzle: str, laid: Laid, step: int, rows: int) -> int:
    """The byte offset of a step along K from the operand's start."""
    span = ATOMS[swizzle][0] * 16
    if laid.step != 32 or span < 32:
        return step * laid.step
    per_atom = span // 32
    return step // per_atom * rows * span + step % per_atom * 32


@dataclass(frozen=True)
class Instruction:
    """One form of wgmma.mma_async."""

    n: int
    d: str = "f32"
    a: str = "bf16"
    b: str = "bf16"
    trans_a: int = 0
    trans_b: int = 0
    from_registers: bool = False
    sign_a: int = 1
    sign_b: int = 1

    @property
    def k(self) -> int:
        return 32 // np.dtype(DTYPES[self.a]).itemsize

    @property
    def count(self) -> int:
        return self.n // (2 if self.d == "f32" else 4)

    def function(self, name: str = "mma") -> str:
        """A CUDA function ``name(u32 (&d)[count], a, b, accumulate)``."""
        count = self.count
        registers = ", ".join(f"%{i}" for i in range(count))
        if self.from_registers:
            left = "{" + ", ".join(f"%{count + 2 + i}" for i in range(4)) + "}"
            inputs = '"l"(b), "r"(accumulate), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])'
            parameter = "const u32 (&a)[4]"
        else:
            left, inputs, parameter = f"%{count + 2}", '"l"(b), "r"(accumulate), "l"(a)', "u64 a"
        transposes = ""
        if DTYPES[self.a] in (DTYPES["bf16"], DTYPES["f16"]):
            transposes = (
                f", {self.trans_a}" if not self.from_registers else ""
            ) + f", {self.trans_b}"
        outputs = ", ".join(f'"+r"(d[{i}])' for i in range(count))
        return f"""
__device__ __forceinline__ void {name}(u32 (&d)[{count}], {parameter}, u64 b, u32 accumulate) {{
    asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 1}, 0; wgmma.mma_async.sync.aligned"
        ".m64n{self.n}k{self.k}.{self.d}.{self.a}.{self.b} {{{registers}}}, {left}, %{count},"
        " p, {self.sign_a}, {self.sign_b}{transposes}; }}" : {outputs} : {inputs});
}}
"""


WARPGROUP = (
    CUDA
    + r"""
__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N> __device__ __forceinline__ void wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Row and first column of register i of an accumulator.
__device__ __forceinline__ int row_of(int i, int per) {
    int t = threadIdx.x % 128;
    return 16 * (t / 32) + t % 32 / 4 + 8 * (per == 2 ? i % 2 : i / 2 % 2);
}
__device__ __forceinline__ int column_of(int i, int per) {
    return 8 * (i / (per == 2 ? 2 : 4)) + 2 * (threadIdx.x % 4) + (per == 2 ? 0 : i % 2);
}
__device__ __forceinline__ u64 descriptor(const void* p, u64 form, u32 offset) {
    return form | ((sa(p) + offset & 0x3FFFF) >> 4);
}
"""
)

PRODUCT = r"""
struct Steps { int count, a[8], b[8]; };
extern "C" __global__ void product(const uint4* a, const uint4* b, u32* d, const u32* a_rows,
    u64 form_a, u64 form_b, Steps steps, int bytes_a, int bytes_b, int accumulate) {
    extern __shared__ __align__(1024) char memory[];
    for (int i = threadIdx.x; i < bytes_a / 16; i += 128) ((uint4*)memory)[i] = a[i];
    for (int i = threadIdx.x; i < bytes_b / 16; i += 128) ((uint4*)(memory + bytes_a))[i] = b[i];
    fence_async();
    __syncthreads();
    u32 acc[COUNT];
    for (int i = 0; i < COUNT; i++) acc[i] = d[128 * i + threadIdx.x];
    int t = threadIdx.x, first = 16 * (t / 32) + t % 32 / 4;
#ifdef REGISTERS
    u32 regs[8][4];
    for (int s = 0; s < steps.count; s++)
        for (int r = 0; r < 4; r++)
            regs[s][r] = a_rows[(first + r % 2 * 8) * 8 * steps.count + 8 * s + t % 4 + r / 2 * 4];
#endif
    fence();
#pragma unroll 1
    for (int s = 0; s < steps.count; s++) {
        u64 right = descriptor(memory + bytes_a, form_b, steps.b[s]);
#ifdef REGISTERS
        u32 left[4] = {regs[s][0], regs[s][1], regs[s][2], regs[s][3]};
        // Loaded by here: the fence orders these registers before the wgmma that reads them.
        for (int r = 0; r < 4; r++) asm volatile("" : "+r"(left[r]));
        fence();
        mma(acc, left, right, s || accumulate);
        commit();
        wait_group<0>();
#else
        mma(acc, descriptor(memory, form_a, steps.a[s]), right, s || accumulate);
#endif
    }
    commit();
    wait_group<0>();
    for (int i = 0; i < COUNT; i++) d[128 * i + threadIdx.x] = acc[i];
}
"""


def to_registers(matrix: np.ndarray, is_half: bool) -> np.ndarray:
    """A 64 x n accumulator as registers (count, 128) of 32 bits."""
    n = matrix.shape[1]
    parts = matrix.reshape(4, 2, 8, n // 8, 4, 2)  # warp, half, row, tile, quad, place
    if is_half:
        whole = parts.astype(np.float16).transpose(3, 1, 0, 2, 4, 5)
        return np.ascontiguousarray(whole).view(np.uint32).reshape(n // 4, 128)
    whole = parts.astype(np.float32).transpose(3, 1, 5, 0, 2, 4)
    return np.ascontiguousarray(whole).view(np.uint32).reshape(n // 2, 128)


def from_registers(registers: np.ndarray, is_half: bool) -> np.ndarray:
    """The inverse of to_registers, float32."""
    if is_half:
        n = 4 * len(registers)
        whole = (
            registers.view(np.float16).reshape(n // 8, 2, 4, 8, 4, 2).transpose(2, 1, 3, 0, 4, 5)
        )
    else:
        n = 2 * len(registers)
        whole = (
            registers.view(np.float32).reshape(n // 8, 2, 2, 4, 8, 4).transpose(3, 1, 4, 0, 5, 2)
        )
    return whole.reshape(64, n).astype(np.float32)


STEPS = np.dtype([("count", "<i4"), ("a", "<i4", 8), ("b", "<i4", 8)])


def multiply(
    device: Device,
    form: Instruction,
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    layouts: tuple[str, str] = ("128B", "128B"),
    accumulate: bool = True,
) -> np.ndarray:
    """``a`` (64, K) @ ``b`` (n, K).T + ``c`` by one warpgroup, float32."""
    left = lay_out(a, layouts[0], not form.trans_a)
    right = lay_out(b, layouts[1], not form.trans_b)
    is_half = form.d == "f16"
    steps = np.zeros((), STEPS)
    steps["count"] = count = a.shape[1] // form.k
    for s in range(count):
        steps["a"][s] = k_steps_of(layouts[0], left, s, 64) if not form.trans_a else s * left.step
        steps["b"][s] = (
            k_steps_of(layouts[1], right, s, form.n) if not form.trans_b else s * right.step
        )
    source = WARPGROUP + form.function() + f"#define COUNT {form.count}\n" + PRODUCT
    options = ("-DREGISTERS",) if form.from_registers else ()
    d = device.array(to_registers(c, is_half))
    rows = device.array(np.ascontiguousarray(a).view(np.uint32))
    device.compile(source, options=options, arch="sm_90a").kernel("product").launch(
        (1,),
        (128,),
        [
            device.array(left.image), device.array(right.image), d, rows, left.descriptor,
            right.descriptor, steps[()], len(left.image), len(right.image), int(accumulate),
        ],
        shared_bytes=len(left.image) + len(right.image),
    )  # fmt: skip
    return from_registers(d.to_numpy(), is_half)
