// bfloat16 as its bit pattern: decoding is a shift, encoding is one conversion instruction.
//
// A value is kept as the 16 bits it has in memory, so that no arithmetic can happen in bfloat16 by
// accident: every kernel decodes to float32, computes there, and rounds once.
#pragma once

using bf16 = unsigned short;  // bits of a bfloat16

// Sizes are enumerators, here and in all device code: NVRTC puts every namespace-scope constexpr
// into the PTX as a global variable.
enum : int { kVectorBytes = 16, kBf16PerVector = 8 };  // the widest access, and what it holds

// A bfloat16 is the upper half of the float32 of the same value.
__device__ __forceinline__ float bf16_to_float(bf16 bits) {
  return __uint_as_float(static_cast<unsigned>(bits) << 16);
}

// The two values of a packed pair; the first one in memory is in the low half.
__device__ __forceinline__ float bf16_low_to_float(unsigned pair) {
  return __uint_as_float(pair << 16);
}
__device__ __forceinline__ float bf16_high_to_float(unsigned pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

// The eight values of a 16-byte vector, in memory order.
__device__ __forceinline__ void bf16x8_to_float(uint4 vector, float (&values)[kBf16PerVector]) {
  const unsigned pairs[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = bf16_low_to_float(pairs[i]);
    values[2 * i + 1] = bf16_high_to_float(pairs[i]);
  }
}

// cvt.rn.bf16.f32: round to nearest even; any NaN becomes 0x7fff.
__device__ __forceinline__ bf16 float_to_bf16(float value) {
  bf16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// cvt.rn.bf16x2.f32: two values at once; its first source operand goes to the high half.
__device__ __forceinline__ unsigned floats_to_bf16x2(float low, float high) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
