// FlashDecoding: attention of one query per sequence, the keys split over CTAs, then combined.
//
// One query leaves most SMs idle if a CTA takes a whole sequence. So each of `splits` CTAs takes a
// run of 64-key tiles and leaves an un-normalised output with its maximum and sum; a second kernel
// merges those. The heads that share a K/V head (GROUP of them) are computed together: K and V are
// read once.
//
// q, o [batch, heads, d]; k, v [batch, kv_len, kv_heads, d]: bfloat16, contiguous.
// m_partial, l_partial [splits, batch, heads], o_partial [splits, batch, heads, d] and
// lse [batch, heads]: float32. m_partial is in base 2 and scaled; lse is a natural logarithm. A split
// without keys has m = -inf and l = 0, and its o_partial is not written.
// Compile with -DHEAD_DIM=64 or 128, and -DGROUP=heads / kv_heads, 1 to 16.
#include "bf16.cuh"
#include "cp_async.cuh"
#include "fma_chain.cuh"
#include "rows.cuh"
#include "softmax.cuh"
#include "stamps.cuh"
#include "swizzle.cuh"
#include "warp.cuh"

enum : int {
  kHeadDim = HEAD_DIM,
  kGroup = GROUP,
  // The work on scores goes two heads at a time: an odd group gets one more head, with q = 0.
  kHeads = (kGroup + 1) / 2 * 2,
  kKeyTile = 64,
  kThreads = 128,
  kWarps = kThreads / kWarpSize,
  kTileBytes = kKeyTile * kHeadDim * 2,
  kValueOffset = 2 * kTileBytes,  // dynamic shared memory: two K tiles, two V tiles
  // Scores: a thread has one key, and every second head.
  kScoreHeads = kThreads / kKeyTile,
  kScoresPerThread = kHeads / kScoreHeads,
  // Softmax: a warp has every fourth head.
  kHeadsPerWarp = (kHeads + kWarps - 1) / kWarps,
  // Output: a thread has one dimension, and every (128 / d)-th head.
  kOutputHeads = kThreads / kHeadDim,
  kOutputsPerThread = (kGroup + kOutputHeads - 1) / kOutputHeads,
};
static_assert(kHeadDim == 64 || kHeadDim == 128, "HEAD_DIM is 64 or 128");
static_assert(1 <= kGroup && kGroup <= 16, "GROUP is 1 to 16");
static_assert(kKeyTile == 2 * kWarpSize, "a lane has two keys in the softmax of a tile");

// Offset of the buffer that a tile of K or V goes to; neighbouring tiles take turns.
__device__ __forceinline__ unsigned tile_buffer(unsigned tile) { return tile % 2 * kTileBytes; }

// Online softmax of one head; every lane of its warp holds the same.
struct HeadState {
  float maximum = negative_infinity();  // of raw, unscaled scores
  float sum = 0.0f;
};

// The queries of the group as float32; zeros for the head that fills up an odd group.
__device__ __forceinline__ void load_queries(float (&queries)[kHeads][kHeadDim], const bf16* q) {
  constexpr int vectors = kHeads * kHeadDim / kBf16PerVector;
  constexpr int existing = kGroup * kHeadDim / kBf16PerVector;
  float4* target = reinterpret_cast<float4*>(queries);
#pragma unroll
  for (int i = 0; i < (vectors + kThreads - 1) / kThreads; ++i) {
    const int index = i * kThreads + threadIdx.x;
    uint4 vector = make_uint4(0, 0, 0, 0);
    if (index < existing) vector = reinterpret_cast<const uint4*>(q)[index];
    float x[kBf16PerVector];
    bf16x8_to_float(vector, x);
    if (index < vectors) {
      target[2 * index] = make_float4(x[0], x[1], x[2], x[3]);
      target[2 * index + 1] = make_float4(x[4], x[5], x[6], x[7]);
    }
  }
}

// Scores of a tile: one chain of fused multiply-adds each; -inf past the last key.
__device__ __forceinline__ void compute_scores(float (&scores)[kHeads][kKeyTile],
                                               const float (&queries)[kHeads][kHeadDim],
                                               const char* keys, int keys_left) {
  const unsigned key = threadIdx.x % kKeyTile;
  const unsigned first_head = threadIdx.x / kKeyTile;
  float sums[kScoresPerThread] = {};
#pragma unroll 1
  for (int chunk = 0; chunk < kHeadDim / kBf16PerVector; ++chunk) {
    float x[kBf16PerVector];
    bf16x8_to_float(*reinterpret_cast<const uint4*>(keys + swizzled_offset<kHeadDim>(key, chunk)),
                    x);
#pragma unroll
    for (int i = 0; i < kScoresPerThread; ++i) {
      const float4* query = reinterpret_cast<const float4*>(queries[first_head + i * kScoreHeads]);
      sums[i] = fma_chain(sums[i], query[2 * chunk], make_float4(x[0], x[1], x[2], x[3]));
      sums[i] = fma_chain(sums[i], query[2 * chunk + 1], make_float4(x[4], x[5], x[6], x[7]));
    }
  }
#pragma unroll
  for (int i = 0; i < kScoresPerThread; ++i) {
    scores[first_head + i * kScoreHeads][key] =
        static_cast<int>(key) < keys_left ? sums[i] : negative_infinity();
  }
}

// One step of online softmax: scores become weights in place; alpha is what O is to be scaled by.
__device__ __forceinline__ void online_softmax(float (&scores)[kHeads][kKeyTile],
                                               float (&alpha)[kHeads],
                                               HeadState (&states)[kHeadsPerWarp], float scale) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int i = 0; i < kHeadsPerWarp; ++i) {
    const int head = threadIdx.x / kWarpSize + i * kWarps;
    if (head >= kHeads) break;
    HeadState& state = states[i];
    const float left = scores[head][lane];
    const float right = scores[head][lane + kWarpSize];

    const float tile_maximum = butterfly_max<kWarpSize / 2>(fmaxf(left, right));
    const float maximum = fmaxf(state.maximum, tile_maximum);
    const float scaled_shift = __fmul_rn(softmax_shift(maximum), scale);
    const float head_alpha = softmax_weight(state.maximum, scale, scaled_shift);
    const float left_weight = softmax_weight(left, scale, scaled_shift);
    const float right_weight = softmax_weight(right, scale, scaled_shift);
    scores[head][lane] = left_weight;
    scores[head][lane + kWarpSize] = right_weight;
    const float tile_sum = warp_sum(__fadd_rn(left_weight, right_weight));
    state.sum = __fadd_rn(__fmul_rn(state.sum, head_alpha), tile_sum);
    state.maximum = maximum;
    if (lane == 0) alpha[head] = head_alpha;
  }
}

// O = alpha O + P V: one chain of fused multiply-adds over the 64 keys for each output.
__device__ __forceinline__ void accumulate_output(float (&output)[kOutputsPerThread],
                                                  const float (&weights)[kHeads][kKeyTile],
                                                  const float (&alpha)[kHeads],
                                                  const char* values) {
  // The swizzle repeats every eight rows, so the offsets within eight keys stay the same.
  constexpr int keys_per_step = 8;
  const unsigned dimension = threadIdx.x % kHeadDim;
  const unsigned first_head = threadIdx.x / kHeadDim;
  const bf16* columns[keys_per_step];
#pragma unroll
  for (int j = 0; j < keys_per_step; ++j) {
    const char* chunk = values + swizzled_offset<kHeadDim>(j, dimension / kBf16PerVector);
    columns[j] = reinterpret_cast<const bf16*>(chunk) + dimension % kBf16PerVector;
  }
#pragma unroll
  for (int i = 0; i < kOutputsPerThread; ++i) {
    output[i] = __fmul_rn(output[i], alpha[first_head + i * kOutputHeads]);
  }
#pragma unroll 1
  for (int key = 0; key < kKeyTile; key += keys_per_step) {
    float x[keys_per_step];
#pragma unroll
    for (int j = 0; j < keys_per_step; ++j) x[j] = bf16_to_float(columns[j][key * kHeadDim]);
#pragma unroll
    for (int i = 0; i < kOutputsPerThread; ++i) {
      const float* row = weights[first_head + i * kOutputHeads];
      const float4* weight = reinterpret_cast<const float4*>(row + key);
      output[i] = fma_chain(output[i], weight[0], make_float4(x[0], x[1], x[2], x[3]));
      output[i] = fma_chain(output[i], weight[1], make_float4(x[4], x[5], x[6], x[7]));
    }
  }
}

// Grid (splits, kv_heads, batch). Dynamic shared memory: four tiles.
extern "C" __global__ void __launch_bounds__(kThreads)
    flash_decoding_split(const bf16* q, const bf16* k, const bf16* v, float* m_partial,
                         float* l_partial, float* o_partial, int kv_len, float scale_log2) {
  extern __shared__ __align__(128) char tiles_memory[];
  __shared__ __align__(kVectorBytes) float queries[kHeads][kHeadDim];
  __shared__ __align__(kVectorBytes) float scores[kHeads][kKeyTile];  // then weights
  __shared__ float alpha[kHeads];
  __shared__ float maxima[kHeads], sums[kHeads];
  const unsigned tiles_base = shared_address(tiles_memory);
  STAMPS;

  const int splits = gridDim.x, kv_heads = gridDim.y, batches = gridDim.z;
  const int split = blockIdx.x, kv_head = blockIdx.y, batch = blockIdx.z;
  // The first head of the group in [batch, heads] and in [splits, batch, heads].
  const long long group_start = (static_cast<long long>(batch) * kv_heads + kv_head) * kGroup;
  const long long partial_start =
      static_cast<long long>(split) * batches * kv_heads * kGroup + group_start;

  // Every split gets as many tiles as any; the last ones may get fewer, or none.
  const int all_tiles = (kv_len + kKeyTile - 1) / kKeyTile;
  const int split_tiles = (all_tiles + splits - 1) / splits;
  const int first_tile = split * split_tiles;
  const int end_tile = min(first_tile + split_tiles, all_tiles);
  if (first_tile >= end_tile) {
    if (threadIdx.x < kGroup) {
      m_partial[partial_start + threadIdx.x] = negative_infinity();
      l_partial[partial_start + threadIdx.x] = 0.0f;
    }
    return;
  }

  const auto k_rows = head_rows<kHeadDim>(k, batch, kv_len, kv_heads, kv_head);
  const auto v_rows = head_rows<kHeadDim>(v, batch, kv_len, kv_heads, kv_head);
  // Start the copy of K and V tile `tile` to its buffer.
  const auto load_keys_and_values = [&](int tile) {
    const unsigned buffer = tiles_base + tile_buffer(tile);
    load_tile_async<kKeyTile, kHeadDim, kThreads>(buffer, k_rows, tile * kKeyTile);
    load_tile_async<kKeyTile, kHeadDim, kThreads>(buffer + kValueOffset, v_rows, tile * kKeyTile);
  };

  STAMP_BEGIN(Load);
  load_keys_and_values(first_tile);
  cp_async_commit();
  load_queries(queries, q + group_start * kHeadDim);
  STAMP_END(Load);

  HeadState states[kHeadsPerWarp];
  float output[kOutputsPerThread] = {};
#pragma unroll 1
  for (int tile = first_tile; tile < end_tile; ++tile) {
    STAMP_BEGIN(Wait);
    cp_async_wait<0>();
    __syncthreads();  // the tile is here for every warp, and no warp still uses the one before
    STAMP_END(Wait);
    STAMP_BEGIN(Load);
    if (tile + 1 < end_tile) load_keys_and_values(tile + 1);
    cp_async_commit();
    STAMP_END(Load);

    STAMP_BEGIN(Scores);
    const char* buffer = tiles_memory + tile_buffer(tile);
    compute_scores(scores, queries, buffer, kv_len - tile * kKeyTile);
    __syncthreads();
    STAMP_END(Scores);
    STAMP_BEGIN(Softmax);
    online_softmax(scores, alpha, states, scale_log2);
    __syncthreads();
    STAMP_END(Softmax);
    STAMP_BEGIN(Values);
    accumulate_output(output, scores, alpha, buffer + kValueOffset);
    STAMP_END(Values);
  }

  STAMP_BEGIN(Store);
  // The warps hold maxima and sums head by head; neighbouring threads write them.
#pragma unroll
  for (int i = 0; i < kHeadsPerWarp; ++i) {
    const int head = threadIdx.x / kWarpSize + i * kWarps;
    if (head < kHeads && threadIdx.x % kWarpSize == 0) {
      maxima[head] = states[i].maximum;
      sums[head] = states[i].sum;
    }
  }
  __syncthreads();
  if (threadIdx.x < kGroup) {
    m_partial[partial_start + threadIdx.x] = __fmul_rn(maxima[threadIdx.x], scale_log2);
    l_partial[partial_start + threadIdx.x] = sums[threadIdx.x];
  }
#pragma unroll
  for (int i = 0; i < kOutputsPerThread; ++i) {
    const int index = i * kThreads + threadIdx.x;
    if (index < kGroup * kHeadDim) o_partial[partial_start * kHeadDim + index] = output[i];
  }
  STAMP_END(Store);
}

// Maximum (scaled, base 2), sum and one un-normalised output of the splits merged so far.
struct MergeState {
  float maximum = negative_infinity();
  float sum = 0.0f;
  float output = 0.0f;
};

__device__ __forceinline__ MergeState merge(const MergeState& a, const MergeState& b) {
  if (a.sum == 0.0f) return b;
  const float maximum = fmaxf(a.maximum, b.maximum);
  const float shift = softmax_shift(maximum);
  const float a_weight = exp2_polynomial(__fsub_rn(a.maximum, shift));
  const float b_weight = exp2_polynomial(__fsub_rn(b.maximum, shift));
  MergeState merged;
  merged.maximum = maximum;
  merged.sum = __fmaf_rn(a.sum, a_weight, __fmul_rn(b.sum, b_weight));
  merged.output = __fmaf_rn(a.output, a_weight, __fmul_rn(b.output, b_weight));
  return merged;
}

// Merge the splits in order and normalise. Grid (heads, batch), one thread for each dimension.
extern "C" __global__ void __launch_bounds__(kHeadDim)
    flash_decoding_combine(const float* m_partial, const float* l_partial, const float* o_partial,
                           bf16* o, float* lse, int splits) {
  const int heads = gridDim.x, batches = gridDim.y;
  const long long head = static_cast<long long>(blockIdx.y) * heads + blockIdx.x;
  const long long split_stride = static_cast<long long>(batches) * heads;
  STAMPS;

  STAMP_BEGIN(Merge);
  MergeState state;
#pragma unroll 1
  for (int split = 0; split < splits; ++split) {
    const long long partial = split * split_stride + head;
    MergeState next;
    next.maximum = m_partial[partial];
    next.sum = l_partial[partial];
    if (next.sum != 0.0f) {  // the output of a split without keys was never written
      next.output = o_partial[partial * kHeadDim + threadIdx.x];
      state = merge(state, next);
    }
  }
  STAMP_END(Merge);
  STAMP_BEGIN(Store);
  o[head * kHeadDim + threadIdx.x] = float_to_bf16(softmax_output(state.output, state.sum));
  if (threadIdx.x == 0) lse[head] = softmax_lse(state.maximum, state.sum);
  STAMP_END(Store);
}
