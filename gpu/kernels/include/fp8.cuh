// FP8 e4m3 conversions (sm_89 and later), two values at a time, and power-of-two scales.
#pragma once

// cvt.rn.satfinite.e4m3x2.f32: round to nearest even, clamp to +-448, NaN to 0x7f. Its first source
// operand goes to the high byte.
__device__ __forceinline__ unsigned short floats_to_e4m3x2(float low, float high) {
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// Eight values times `scale`, each product rounded to float32 first; the first one in the low byte.
__device__ __forceinline__ uint2 floats_to_e4m3x8(const float (&x)[8], float scale) {
  unsigned pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[i] = floats_to_e4m3x2(__fmul_rn(x[2 * i], scale), __fmul_rn(x[2 * i + 1], scale));
  }
  return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

// cvt.rn.f16x2.e4m3x2, then cvt.f32.f16: both exact, as float16 has every e4m3 value.
__device__ __forceinline__ void e4m3x2_to_floats(unsigned short pair, float& low, float& high) {
  asm("{\n\t"
      ".reg .b32 halves;\n\t"
      ".reg .b16 half_low, half_high;\n\t"
      "cvt.rn.f16x2.e4m3x2 halves, %2;\n\t"
      "mov.b32 {half_low, half_high}, halves;\n\t"
      "cvt.f32.f16 %0, half_low;\n\t"
      "cvt.f32.f16 %1, half_high;\n\t"
      "}"
      : "=f"(low), "=f"(high)
      : "h"(pair));
}

// The smallest power of two that is at least `x`, for normal x > 0: the mantissa, unless it is 0,
// is carried into the exponent.
__device__ __forceinline__ float round_up_to_power_of_two(float x) {
  constexpr unsigned mantissa_mask = (1u << 23) - 1;
  return __uint_as_float((__float_as_uint(x) + mantissa_mask) & ~mantissa_mask);
}
