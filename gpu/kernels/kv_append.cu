// Appends new tokens' K and V to a paged cache, as they are or as FP8.
//
// k_new [tokens, heads, HEAD_DIM_K], v_new [tokens, heads, HEAD_DIM_V]: bfloat16, or float16 with
// -DELEMENT_FP16. The caches have the same type, or with -DCACHE_E4M3 codes of value * (1 / scale).
// Token i goes to position positions[i] of the pages of request batch_indices[i]; nothing else is
// touched. Pages as in kv_rows.cuh: -DKV_HND for pages by head, -DINDEX_64 for tables of 64 bits.
// A warp works on one token. Grid (ceil(tokens / 4)), 128 threads.
#include "element.cuh"
#include "fp8.cuh"
#include "kv_rows.cuh"
#include "warp.cuh"

enum : int {
  kThreads = 128,
  kTokensPerCta = kThreads / kWarpSize,
  kHeadDimK = HEAD_DIM_K,
  kHeadDimV = HEAD_DIM_V,
  kLargerHeadDim = kHeadDimK > kHeadDimV ? kHeadDimK : kHeadDimV,
};
static_assert(kHeadDimK % kElementsPerVector == 0, "heads are whole vectors");
static_assert(kHeadDimV % kElementsPerVector == 0, "heads are whole vectors");

// Eight values of a new token as the cache holds them.
#ifdef CACHE_E4M3
using CacheVector = uint2;

__device__ __forceinline__ CacheVector to_cache(uint4 vector, float inverse_scale) {
  float x[kElementsPerVector];
  elements_to_floats(vector, x);
  return floats_to_e4m3x8(x, inverse_scale);
}
#else
using CacheVector = uint4;

__device__ __forceinline__ CacheVector to_cache(uint4 vector, float) { return vector; }
#endif

// Where a token's heads lie in a cache, in head vectors from its start.
struct Slot {
  long long first_head, next_head;
};

// One token's K or V, contiguous, to its slot.
template <int HEAD_DIM>
__device__ __forceinline__ void append(const uint4* token, CacheVector* cache, const Slot& slot,
                                       int heads, int lane, float inverse_scale) {
  constexpr int vectors_per_head = HEAD_DIM / kElementsPerVector;
  // Many warps hide the latency; one that loads ahead of its stores need not.
#pragma unroll 1
  for (int i = lane; i < heads * vectors_per_head; i += kWarpSize) {
    const long long row = slot.first_head + i / vectors_per_head * slot.next_head;
    cache[row * vectors_per_head + i % vectors_per_head] = to_cache(token[i], inverse_scale);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    kv_append(const uint4* k_new, const uint4* v_new, const int* batch_indices,
              const int* positions, const index* indptr, const index* indices,
              CacheVector* k_cache, CacheVector* v_cache, int tokens, int heads, int page_size,
              float k_inverse_scale, float v_inverse_scale) {
  const long long token = blockIdx.x * kTokensPerCta + threadIdx.x / kWarpSize;
  // Lanes without a vector of the token leave, and read no tables.
  const int lane = threadIdx.x % kWarpSize;
  if (token >= tokens || lane >= heads * (kLargerHeadDim / kElementsPerVector)) return;
  const int position = positions[token];
  const index* pages = indices + indptr[batch_indices[token]];
  const long long page = pages[position / page_size];
  const int offset = position % page_size;
#ifdef KV_HND
  const Slot slot = {page * heads * page_size + offset, page_size};
#else
  const Slot slot = {(page * page_size + offset) * heads, 1};
#endif
  append<kHeadDimK>(k_new + token * heads * (kHeadDimK / kElementsPerVector), k_cache, slot, heads,
                    lane, k_inverse_scale);
  append<kHeadDimV>(v_new + token * heads * (kHeadDimV / kElementsPerVector), v_cache, slot, heads,
                    lane, v_inverse_scale);
}
