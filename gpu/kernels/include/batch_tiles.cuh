// Tiles of rows gathered from global memory, and what is done to them before they are multiplied:
// FP8 decoded, rotary embedding applied.
#pragma once

#include "cp_async.cuh"
#include "element.cuh"
#include "fp8.cuh"
#include "swizzle.cuh"

enum : int { kThreads = 128, kKeyTile = 64 };

// cp.async of 64 rows of ROW_BYTES, row i from row `numbers[i]`; rows from `count` on become zeros.
// Without SWIZZLED rows follow each other plainly.
template <int ROW_BYTES, bool SWIZZLED>
__device__ __forceinline__ void gather_tile_async(unsigned tile, const void* source,
                                                  const long long (&numbers)[kKeyTile], int count) {
  constexpr int chunks_per_row = ROW_BYTES / kVectorBytes;
  constexpr int chunks = kKeyTile * chunks_per_row;
  static_assert(chunks % kThreads == 0, "every thread copies as many chunks");
#pragma unroll
  for (int i = 0; i < chunks / kThreads; ++i) {
    const unsigned index = i * kThreads + threadIdx.x;
    const unsigned row = index / chunks_per_row;
    const unsigned chunk = index % chunks_per_row;
    const char* row_source = static_cast<const char*>(source) + numbers[row] * ROW_BYTES;
    unsigned offset = index * kVectorBytes;
    if constexpr (SWIZZLED) offset = swizzled_offset<ROW_BYTES / kElementBytes>(row, chunk);
    cp_async_16(tile + offset, row_source + chunk * kVectorBytes,
                static_cast<int>(row) < count ? kVectorBytes : 0);
  }
}

// A plain tile of e4m3 rows as a swizzled tile of elements, which hold every e4m3 value exactly.
template <int COLUMNS>
__device__ __forceinline__ void decode_tile(char* target, const char* source) {
  constexpr int chunks_per_row = COLUMNS / kVectorBytes;  // 16 values each
  constexpr int chunks = kKeyTile * chunks_per_row;
#pragma unroll 1
  for (int index = threadIdx.x; index < chunks; index += kThreads) {
    const unsigned row = index / chunks_per_row;
    const unsigned chunk = index % chunks_per_row;
    const uint4 packed = reinterpret_cast<const uint4*>(source)[index];
    const unsigned words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x[kElementsPerVector];
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const unsigned word = words[2 * half + pair / 2];
        e4m3x2_to_floats(static_cast<unsigned short>(word >> (pair % 2 * 16)), x[2 * pair],
                         x[2 * pair + 1]);
      }
      *reinterpret_cast<uint4*>(target + swizzled_offset<COLUMNS>(row, 2 * chunk + half)) =
          floats_to_vector(x);
    }
  }
}

// Rotary embedding in place: element i of the first half and i of the second are turned together,
// by the angle of their row, float32 throughout, then rounded to elements. `angles` has a row of
// COLUMNS / 2 cosines and as many sines for every position; `position(row)` < 0: a row to be left.
template <int ROWS, int COLUMNS, typename POSITION>
__device__ __forceinline__ void rotate_tile(char* tile, const float* angles, POSITION position) {
  constexpr int chunks_per_half = COLUMNS / 2 / kElementsPerVector;
#pragma unroll 1
  for (int index = threadIdx.x; index < ROWS * chunks_per_half; index += kThreads) {
    const unsigned row = index / chunks_per_half;
    const unsigned chunk = index % chunks_per_half;
    const int place = position(row);
    if (place < 0) continue;
    const float4* cosines = reinterpret_cast<const float4*>(
        angles + static_cast<long long>(place) * COLUMNS + chunk * kElementsPerVector);
    const float4* sines = cosines + COLUMNS / 2 / 4;
    const float4 c[2] = {cosines[0], cosines[1]};
    const float4 s[2] = {sines[0], sines[1]};
    uint4* low = reinterpret_cast<uint4*>(tile + swizzled_offset<COLUMNS>(row, chunk));
    uint4* high =
        reinterpret_cast<uint4*>(tile + swizzled_offset<COLUMNS>(row, chunk + chunks_per_half));
    float a[kElementsPerVector], b[kElementsPerVector];
    elements_to_floats(*low, a);
    elements_to_floats(*high, b);
    float turned_a[kElementsPerVector], turned_b[kElementsPerVector];
#pragma unroll
    for (int i = 0; i < kElementsPerVector; ++i) {
      const float4& cs = c[i / 4];
      const float4& ss = s[i / 4];
      const float cosine = i % 4 == 0 ? cs.x : i % 4 == 1 ? cs.y : i % 4 == 2 ? cs.z : cs.w;
      const float sine = i % 4 == 0 ? ss.x : i % 4 == 1 ? ss.y : i % 4 == 2 ? ss.z : ss.w;
      turned_a[i] = __fmaf_rn(a[i], cosine, -__fmul_rn(b[i], sine));
      turned_b[i] = __fmaf_rn(b[i], cosine, __fmul_rn(a[i], sine));
    }
    *low = floats_to_vector(turned_a);
    *high = floats_to_vector(turned_b);
  }
}
