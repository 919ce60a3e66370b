// The values of a head, float32, bfloat16 or float16, shared by the lanes of a warp.
#pragma once

#include "bf16.cuh"
#include "warp.cuh"

// Element types, as words of 32 bits in memory.
struct Float32 {
  using Bits = float;
  enum : int { kPerWord = 1 };
  __device__ __forceinline__ static void decode(unsigned word, float* values) {
    values[0] = __uint_as_float(word);
  }
  __device__ __forceinline__ static unsigned encode(const float* values) {
    return __float_as_uint(values[0]);
  }
};
struct BFloat16 {
  using Bits = bf16;
  enum : int { kPerWord = 2 };
  __device__ __forceinline__ static void decode(unsigned word, float* values) {
    values[0] = bf16_low_to_float(word);
    values[1] = bf16_high_to_float(word);
  }
  __device__ __forceinline__ static unsigned encode(const float* values) {
    return floats_to_bf16x2(values[0], values[1]);
  }
};
struct Float16 {
  using Bits = unsigned short;
  enum : int { kPerWord = 2 };
  // cvt.f32.f16 of both halves: exact.
  __device__ __forceinline__ static void decode(unsigned word, float* values) {
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2;"
        "  cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
        : "=f"(values[0]), "=f"(values[1])
        : "r"(word));
  }
  // cvt.rn.f16x2.f32: to nearest even; its first source operand goes to the high half.
  __device__ __forceinline__ static unsigned encode(const float* values) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(values[1]), "f"(values[0]));
    return word;
  }
};

// One access of 4, 8 or 16 bytes.
__device__ __forceinline__ void load_words(unsigned (&words)[1], const void* source) {
  words[0] = *static_cast<const unsigned*>(source);
}
__device__ __forceinline__ void load_words(unsigned (&words)[2], const void* source) {
  const uint2 pair = *static_cast<const uint2*>(source);
  words[0] = pair.x, words[1] = pair.y;
}
__device__ __forceinline__ void load_words(unsigned (&words)[4], const void* source) {
  const uint4 four = *static_cast<const uint4*>(source);
  words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
}
// st.global by name: from values that come out of conversions the compiler makes several stores.
__device__ __forceinline__ void store_words(void* target, const unsigned (&words)[1]) {
  *static_cast<unsigned*>(target) = words[0];
}
__device__ __forceinline__ void store_words(void* target, const unsigned (&words)[2]) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};"
               :
               : "l"(__cvta_generic_to_global(target)), "r"(words[0]), "r"(words[1])
               : "memory");
}
__device__ __forceinline__ void store_words(void* target, const unsigned (&words)[4]) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(__cvta_generic_to_global(target)), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3])
               : "memory");
}

// How the lanes of a warp share the values of a head: chunk by chunk, `kVector` neighbouring values
// a lane, as many as one access of elements of `WIDEST` bytes moves.
template <int HEAD_SIZE, int WIDEST>
struct HeadLanes {
  enum : int {
    kPerLane = HEAD_SIZE / kWarpSize,
    kMost = kVectorBytes / WIDEST,
    kVector = kPerLane % 8 == 0 && kMost == 8 ? 8 : kPerLane % 4 == 0 ? 4 : 2,
    kChunks = kPerLane / kVector,
  };
  static_assert(HEAD_SIZE % (2 * kWarpSize) == 0, "a lane has pairs of values");

  // The first value of a lane's part of a chunk.
  __device__ __forceinline__ static int first(int chunk) {
    return (chunk * kWarpSize + threadIdx.x % kWarpSize) * kVector;
  }
};

template <typename ELEMENT, int COUNT>
__device__ __forceinline__ void load_values(float (&values)[COUNT],
                                            const typename ELEMENT::Bits* source) {
  unsigned words[COUNT / ELEMENT::kPerWord];
  load_words(words, source);
#pragma unroll
  for (int i = 0; i < COUNT / ELEMENT::kPerWord; ++i) {
    ELEMENT::decode(words[i], values + i * ELEMENT::kPerWord);
  }
}

template <typename ELEMENT, int COUNT>
__device__ __forceinline__ void store_values(typename ELEMENT::Bits* target,
                                             const float (&values)[COUNT]) {
  unsigned words[COUNT / ELEMENT::kPerWord];
#pragma unroll
  for (int i = 0; i < COUNT / ELEMENT::kPerWord; ++i) {
    words[i] = ELEMENT::encode(values + i * ELEMENT::kPerWord);
  }
  store_words(target, words);
}
