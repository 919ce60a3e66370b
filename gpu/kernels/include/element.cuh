// The 16-bit type of Q, K, V and O: bfloat16, or float16 with -DELEMENT_FP16.
//
// Values are kept as their 16 bits, as in bf16.cuh: decoding is exact, encoding rounds once.
#pragma once

#include "bf16.cuh"
#include "mma.cuh"

using element = unsigned short;

enum : int { kElementBytes = 2, kElementsPerVector = kVectorBytes / kElementBytes };

#ifdef ELEMENT_FP16

__device__ __forceinline__ float element_to_float(element bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// cvt.rn.f16.f32: round to nearest even; beyond the largest number is infinity.
__device__ __forceinline__ element float_to_element(float value) {
  element bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// cvt.rn.f16x2.f32: two values at once; its first source operand goes to the high half.
__device__ __forceinline__ unsigned floats_to_elements(float low, float high) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ void mma_elements(float (&c)[4], const FragmentA& a, const FragmentB& b) {
  mma_fp16(c, a, b);
}

#else

__device__ __forceinline__ float element_to_float(element bits) { return bf16_to_float(bits); }
__device__ __forceinline__ element float_to_element(float value) { return float_to_bf16(value); }
__device__ __forceinline__ unsigned floats_to_elements(float low, float high) {
  return floats_to_bf16x2(low, high);
}
__device__ __forceinline__ void mma_elements(float (&c)[4], const FragmentA& a, const FragmentB& b) {
  mma_bf16(c, a, b);
}

#endif

// The values of a 16-byte vector, in memory order.
__device__ __forceinline__ void elements_to_floats(uint4 vector, float (&x)[kElementsPerVector]) {
  const unsigned pairs[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = element_to_float(static_cast<element>(pairs[i]));
    x[2 * i + 1] = element_to_float(static_cast<element>(pairs[i] >> 16));
  }
}

__device__ __forceinline__ uint4 floats_to_vector(const float (&x)[kElementsPerVector]) {
  return make_uint4(floats_to_elements(x[0], x[1]), floats_to_elements(x[2], x[3]),
                    floats_to_elements(x[4], x[5]), floats_to_elements(x[6], x[7]));
}
