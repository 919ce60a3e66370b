// Reductions over the lanes of a warp by butterflies: every lane ends with the same bits.
#pragma once

enum : unsigned { kAllLanes = 0xffffffffu };
enum : int { kWarpSize = 32 };

// shfl.sync.bfly: the value of lane ^ distance.
__device__ __forceinline__ float shuffle_xor(float value, int distance) {
  return __shfl_xor_sync(kAllLanes, value, distance);
}

// Maximum over groups of `2 * LARGEST` lanes (max.f32: NaN loses against a number).
template <int LARGEST>
__device__ __forceinline__ float butterfly_max(float value) {
#pragma unroll
  for (int distance = LARGEST; distance > 0; distance /= 2) {
    value = fmaxf(value, shuffle_xor(value, distance));
  }
  return value;
}

// Sum over the warp; the distances 16, 8, 4, 2, 1 are the order of the additions.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value = __fadd_rn(value, shuffle_xor(value, distance));
  }
  return value;
}
