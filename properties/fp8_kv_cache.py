"""Laws of the FP8 KV cache: the number formats, the 656-byte record, and the kernels that write and
read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from gpu.device import Device
from gpu.kernels import fp8_kv_cache as host
from gpu.kernels.result import KernelResult
from properties.compare import bits_equal, within
from properties.data import BF16, values
from properties.law import Context, Law, LawSkipped, LawViolation, Tier
from properties.subject import Array, Subject, kernel_laws
from simkit.algorithms.fp8_kv_cache import fp8_kv_dequantize, fp8_kv_quantize
from simkit.layouts.fp8_record import RECORD_BYTES, TOKEN_VALUES
from simkit.machine.machine import Machine
from simkit.numerics import formats
from simkit.numerics.bounds import e4m3_error

E4M3 = ml_dtypes.float8_e4m3fn
KINDS = ("normal", "large", "ties", "zeros", "subnormal", "mixed", "all_codes")
"""all_codes: every one of the 65,536 bfloat16 codes, NaNs and infinities too, over 128 tokens; the
others as in properties.data.
"""


@dataclass(frozen=True)
class CacheCase:
    """``tokens`` records; the values and the seed they are drawn by."""

    tokens: int = 1
    data: str = "normal"
    seed: int = 0

    def kv(self) -> Array:
        if self.data == "all_codes":
            codes = np.arange(1 << 16, dtype=np.uint16).view(BF16).reshape(128, 512)
            rope = codes[:, :64][::-1]
            return np.concatenate((codes, rope), axis=1)[: max(self.tokens, 1)]
        return values(self.data, np.random.default_rng(self.seed), (self.tokens, TOKEN_VALUES))

    def cache(self) -> Array:
        """Records with codes and scales that no quantiser need have made."""
        rng = np.random.default_rng(self.seed)
        record = rng.integers(0, 256, (self.tokens, RECORD_BYTES)).astype(np.uint8)
        scales = np.exp2(rng.integers(-14, 10, (self.tokens, 4))).astype(np.float32)
        if self.data == "mixed":
            scales *= rng.uniform(1, 2, scales.shape).astype(np.float32)
        record[:, 512:528] = scales.view(np.uint8)
        return record


CASES = st.builds(
    CacheCase,
    tokens=st.integers(1, 11),
    data=st.sampled_from(KINDS),
    seed=st.integers(0, 2**16 - 1),
)
CORNERS = (CacheCase(128, "all_codes"), CacheCase(5, "mixed"), CacheCase(1, "zeros"))


def _model(machine: Machine, case: CacheCase) -> Mapping[str, Array]:
    quantized = fp8_kv_quantize(machine, case.kv()).cache
    return {"cache": quantized}


def _model_back(machine: Machine, case: CacheCase) -> Mapping[str, Array]:
    return {"out": fp8_kv_dequantize(machine, case.cache()).out}


FIRST_ARCH = 89


def _check_arch(device: Device) -> None:
    arch = int(device.arch.removeprefix("sm_").rstrip("af"))
    if arch < FIRST_ARCH:
        raise LawSkipped(f"sm_{arch} has no FP8 conversions; they start with sm_{FIRST_ARCH}")


def _kernel(device: Device, case: CacheCase, source: str | None) -> KernelResult:
    _check_arch(device)
    return host.fp8_kv_quantize(device, case.kv(), source=source)


def _kernel_back(device: Device, case: CacheCase, source: str | None) -> KernelResult:
    _check_arch(device)
    return host.fp8_kv_dequantize(device, case.cache(), source=source)


QUANTIZE = Subject("fp8_kv_cache", CASES, CacheCase, CORNERS, _model, _kernel)
DEQUANTIZE = Subject(
    "fp8_kv_cache",
    CASES,
    CacheCase,
    (CacheCase(5, "mixed"), CacheCase(3)),
    _model_back,
    _kernel_back,
)


def _codes(name: str, ours: Array, theirs: Array) -> None:
    different = np.flatnonzero(ours.reshape(-1) != theirs.reshape(-1))
    if len(different):
        raise LawViolation(
            f"{name}: {len(different)} codes differ from ml_dtypes, first input {int(different[0])}"
        )


def check_codecs(context: Context, case: None) -> None:
    """Every code and every bfloat16 value through our codecs and through ml_dtypes."""
    codes = np.arange(256, dtype=np.uint8)
    bits_equal("decode_e4m3", codes.view(E4M3).astype(np.float32), formats.decode_e4m3(codes))
    bits_equal(
        "decode_ue8m0",
        codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32),
        formats.decode_ue8m0(codes),
    )
    all_bf16 = np.arange(1 << 16, dtype=np.uint16)
    wide = all_bf16.view(BF16).astype(np.float32)
    bits_equal("decode_bf16", wide, formats.decode_bf16(all_bf16))
    with np.errstate(all="ignore"):
        # ml_dtypes does not saturate, the hardware's conversion always does.
        saturated = np.where(np.isnan(wide), wide, np.clip(wide, -448.0, 448.0))
        expected = np.where(np.isnan(wide), np.uint8(0x7F), saturated.astype(E4M3).view(np.uint8))
    _codes("encode_e4m3 of every bfloat16", formats.encode_e4m3(wide), expected)
    back = formats.encode_e4m3(formats.decode_e4m3(codes))
    _codes("encode_e4m3 of every e4m3", back, np.where(codes & 0x7F == 0x7F, 0x7F, codes))
    numbers = ~np.isnan(wide)
    _codes("encode_bf16 of every bfloat16", formats.encode_bf16(wide)[numbers], all_bf16[numbers])


def check_layout(context: Context, case: CacheCase) -> None:
    """The record's bytes, put together from the published layout and ml_dtypes alone."""
    kv = case.kv()
    kernel = QUANTIZE.run_kernel(context, case).outputs["cache"]
    wide = kv.astype(np.float64)
    for token in range(len(kv)):
        record = bytearray()
        scales = []
        for tile in range(4):
            x = wide[token, 128 * tile : 128 * tile + 128]
            with np.errstate(invalid="ignore"):
                largest = np.float32(np.nanmax(np.abs(np.append(x, 0.0))))
                ratio = max(largest / np.float32(448), np.float32(1e-4))
                exponent = (
                    128
                    if np.isinf(ratio)
                    else int(np.frexp(ratio)[1]) - (np.frexp(ratio)[0] == 0.5)
                )
                scale = (
                    np.float32(2.0) ** np.float32(exponent)
                    if exponent < 128
                    else np.float32(np.inf)
                )
                scaled = (x.astype(np.float32) * (np.float32(1) / scale)).astype(np.float64)
                codes = np.clip(scaled, -448, 448).astype(np.float32).astype(E4M3).view(np.uint8)
            record += np.where(np.isnan(scaled), np.uint8(0x7F), codes).tobytes()
            scales.append(scale)
        record += np.array(scales, np.float32).tobytes() + kv[token, 512:].tobytes()
        if len(record) != RECORD_BYTES:
            raise LawViolation(f"the published layout has {len(record)} bytes, ours {RECORD_BYTES}")
        ours = np.frombuffer(bytes(record), np.uint8)
        different = np.flatnonzero(ours != kernel[token])
        if len(different):
            place = int(different[0])
            raise LawViolation(
                f"token {token}: {len(different)} bytes differ, first at byte {place}:"
                f" kernel 0x{int(kernel[token, place]):02x}, layout 0x{int(ours[place]):02x}"
            )


def _finite_case(case: CacheCase) -> CacheCase:
    return CacheCase(case.tokens, "mixed", case.seed) if case.data == "all_codes" else case


def check_round_trip(context: Context, case: CacheCase) -> None:
    """Quantise and dequantise on the device.  A tile's scale s has 448 s >= amax, so that nothing
    saturates, and is a power of two.  RoPE is a copy.
    """
    case = _finite_case(case)
    kv = case.kv()
    cache = QUANTIZE.run_kernel(context, case).outputs["cache"]
    source = context.sources.get("fp8_kv_cache")
    out = host.fp8_kv_dequantize(context.device, cache, source=source).outputs["out"]
    x = kv[:, :512].astype(np.float64)
    scales = np.repeat(
        np.ascontiguousarray(cache[:, 512:528]).view(np.float32).astype(np.float64), 128, axis=1
    )
    within(
        "nope",
        out[:, :512],
        x,
        e4m3_error(x, scales),
        "half a step of e4m3",
    )
    bits_equal("rope", kv[:, 512:], out[:, 512:])


def check_idempotent(context: Context, case: CacheCase) -> None:
    """What came out of a cache goes into it and out again unchanged."""
    _check_arch(context.device)
    source = context.sources.get("fp8_kv_cache")

    def through(kv: Array) -> Array:
        cache = host.fp8_kv_quantize(context.device, kv, source=source).outputs["cache"]
        return host.fp8_kv_dequantize(context.device, cache, source=source).outputs["out"]

    once = through(_finite_case(case).kv())
    bits_equal("second pass", once, through(once))


def _prefixed(prefix: str, laws: list[Law]) -> list[Law]:
    return [replace(law, name=f"{prefix}_{law.name}") for law in laws]


def _law(name: str, tier: Tier, statement: str, check: Callable[[Context, CacheCase], None]) -> Law:
    return Law(
        algorithm="fp8_kv_cache",
        name=name,
        tier=tier,
        statement=statement,
        check=check,
        strategy=CASES,
        case_type=CacheCase,
        corners=CORNERS,
        examples=10,
    )


LAWS = [
    Law(
        algorithm="fp8_kv_cache",
        name="codecs",
        tier="exact",
        statement="all codes and all 65,536 bfloat16 inputs convert as in ml_dtypes",
        check=check_codecs,
        uses_device=False,
    ),
    _law("layout", "exact", "records equal the published layout byte for byte", check_layout),
    *_prefixed("quantize", kernel_laws(QUANTIZE, examples=15)),
    *_prefixed("dequantize", kernel_laws(DEQUANTIZE, examples=15)),
    _law(
        "round_trip",
        "bounded",
        "quantising loses at most half a step of e4m3; RoPE is unchanged",
        check_round_trip,
    ),
    _law(
        "idempotent", "exact", "a second pass through the cache changes nothing", check_idempotent
    ),
]
