// FlashAttention forward: exact attention, one pass over K and V, no score ever in global memory.
//
// A CTA of four warps computes 64 query rows of one head; a warp owns 16. Per tile of 64 keys:
//   S = Q K^T on tensor cores  ->  online softmax in registers  ->  O = diag(alpha) O + P V.
// While one tile is computed, the next is on its way (two buffers of K and of V).
//
// q [batch, q_len, heads, d], k and v [batch, kv_len, kv_heads, d], o as q: bfloat16, contiguous.
// lse [batch, heads, q_len]: float32, natural logarithm; -inf (and o = 0) for rows without keys.
// Grid (ceil(q_len / 64), heads, batch). Compile with -DHEAD_DIM=64 or 128.
#include "bf16.cuh"
#include "cp_async.cuh"
#include "mma.cuh"
#include "rows.cuh"
#include "softmax.cuh"
#include "stamps.cuh"
#include "swizzle.cuh"
#include "warp.cuh"

enum : int {
  kHeadDim = HEAD_DIM,
  kQueryTile = 64,
  kKeyTile = 64,
  kThreads = 128,
  kWarpRows = 16,                        // rows of one mma
  kScoreTiles = kKeyTile / 8,            // mma accumulators across the keys
  kOutputTiles = kHeadDim / 8,           // mma accumulators across the head dimension
  kHeadSteps = kHeadDim / 16,            // mma steps along the head dimension
  kKeySteps = kKeyTile / 16,             // mma steps along the keys
  kTileBytes = kKeyTile * kHeadDim * 2,  // one tile of Q, K, V or O
  // Dynamic shared memory: Q (later O), two K, two V.
  kKeyOffset = kTileBytes,
  kValueOffset = 3 * kTileBytes,
};
static_assert(kHeadDim == 64 || kHeadDim == 128, "HEAD_DIM is 64 or 128");
static_assert(kQueryTile == kKeyTile, "Q and O tiles have the size of K and V tiles");

// Each lane holds two rows of the warp's 16: `group` and `group` + 8.
struct RowState {
  float maximum[2] = {negative_infinity(), negative_infinity()};  // of raw, unscaled scores
  float sum[2] = {0.0f, 0.0f};                                    // of the lane's own columns only
};

// Which keys a row sees: those that exist and, if causal, lie at or below the diagonal, which ends
// in the bottom right corner of the score matrix.
struct Mask {
  int q_len, kv_len;
  bool causal;

  // May be negative: then the row sees none.
  __device__ __forceinline__ int last_key(int row) const {
    return causal ? min(kv_len - 1, row + kv_len - q_len) : kv_len - 1;
  }
};

// Q of the warp as A fragments, one for each 16 values of the head dimension.
__device__ __forceinline__ void load_queries(FragmentA (&q)[kHeadSteps], unsigned tile, int warp) {
  const unsigned lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int step = 0; step < kHeadSteps; ++step) {
    const unsigned row = warp * kWarpRows + lane % 16;
    ldmatrix_x4(q[step].x, tile + swizzled_offset<kHeadDim>(row, 2 * step + lane / 16));
  }
}

// S = Q K^T: the accumulators start at 0 and take 16 values of the head dimension a step.
__device__ __forceinline__ void scores(float (&s)[kScoreTiles][4], const FragmentA (&q)[kHeadSteps],
                                       unsigned keys) {
  const unsigned lane = threadIdx.x % kWarpSize;
  // Lanes 0-15 address the two halves of eight keys, lanes 16-31 those of the next eight.
  const unsigned row = lane % 8 + lane / 16 * 8;
  const unsigned half = lane / 8 % 2;
#pragma unroll
  for (int pair = 0; pair < kScoreTiles / 2; ++pair) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[2 * pair][i] = s[2 * pair + 1][i] = 0.0f;
#pragma unroll
    for (int step = 0; step < kHeadSteps; ++step) {
      unsigned x[4];
      ldmatrix_x4(x, keys + swizzled_offset<kHeadDim>(pair * 16 + row, 2 * step + half));
      mma_bf16(s[2 * pair], q[step], {x[0], x[1]});
      mma_bf16(s[2 * pair + 1], q[step], {x[2], x[3]});
    }
  }
}

// -inf for the keys that a row does not see.
__device__ __forceinline__ void mask_scores(float (&s)[kScoreTiles][4], const Mask& mask,
                                            int warp_row, int first_key) {
  const FragmentLane lane;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int last_key = mask.last_key(warp_row + lane.row(half));
#pragma unroll
    for (int tile = 0; tile < kScoreTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = first_key + lane.column(tile) + i;
        if (key > last_key) s[tile][2 * half + i] = negative_infinity();
      }
    }
  }
}

// One step of online softmax: turns scores into weights and returns what O is to be scaled by.
__device__ __forceinline__ void online_softmax(float (&s)[kScoreTiles][4], RowState& state,
                                               float (&alpha)[2], float scale) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float maximum = fmaxf(s[0][2 * half], s[0][2 * half + 1]);
#pragma unroll
    for (int tile = 1; tile < kScoreTiles; ++tile) {
      maximum = fmaxf(maximum, fmaxf(s[tile][2 * half], s[tile][2 * half + 1]));
    }
    // The four lanes of a group hold the row together.
    maximum = fmaxf(state.maximum[half], butterfly_max<2>(maximum));
    const float scaled_shift = __fmul_rn(softmax_shift(maximum), scale);
    alpha[half] = softmax_weight(state.maximum[half], scale, scaled_shift);
    state.maximum[half] = maximum;

    float sum = __fmul_rn(state.sum[half], alpha[half]);
#pragma unroll
    for (int tile = 0; tile < kScoreTiles; ++tile) {
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        s[tile][i] = softmax_weight(s[tile][i], scale, scaled_shift);
        sum = __fadd_rn(sum, s[tile][i]);
      }
    }
    state.sum[half] = sum;
  }
}

__device__ __forceinline__ void rescale(float (&o)[kOutputTiles][4], const float (&alpha)[2]) {
#pragma unroll
  for (int tile = 0; tile < kOutputTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) o[tile][i] = __fmul_rn(o[tile][i], alpha[i / 2]);
  }
}

// O += P V, 16 keys a step. Two accumulators of S side by side are, rounded to bfloat16, the A
// fragment of P: lanes hold the same rows and columns in both.
__device__ __forceinline__ void accumulate_output(float (&o)[kOutputTiles][4],
                                                  const float (&p)[kScoreTiles][4],
                                                  unsigned values) {
  const unsigned lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int step = 0; step < kKeySteps; ++step) {
    const float (&left)[4] = p[2 * step];
    const float (&right)[4] = p[2 * step + 1];
    const FragmentA a = {{floats_to_bf16x2(left[0], left[1]), floats_to_bf16x2(left[2], left[3]),
                          floats_to_bf16x2(right[0], right[1]),
                          floats_to_bf16x2(right[2], right[3])}};
#pragma unroll
    for (int pair = 0; pair < kOutputTiles / 2; ++pair) {
      // Lanes 0-15 address 16 keys at eight dimensions, lanes 16-31 at the next eight.
      unsigned x[4];
      ldmatrix_x4_trans(
          x, values + swizzled_offset<kHeadDim>(step * 16 + lane % 16, 2 * pair + lane / 16));
      mma_bf16(o[2 * pair], a, {x[0], x[1]});
      mma_bf16(o[2 * pair + 1], a, {x[2], x[3]});
    }
  }
}

// Divide by the sum of each row and leave O (bfloat16) and LSE in shared memory.
__device__ __forceinline__ void stage_result(char* o_tile, float (&lse_rows)[kQueryTile],
                                             const float (&o)[kOutputTiles][4],
                                             const RowState& state, float scale, int warp) {
  const FragmentLane lane;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = state.sum[half];
    sum = __fadd_rn(sum, shuffle_xor(sum, 1));
    sum = __fadd_rn(sum, shuffle_xor(sum, 2));
    const int row = warp * kWarpRows + lane.row(half);
#pragma unroll
    for (int tile = 0; tile < kOutputTiles; ++tile) {
      const float low = softmax_output(o[tile][2 * half], sum);
      const float high = softmax_output(o[tile][2 * half + 1], sum);
      char* chunk = o_tile + swizzled_offset<kHeadDim>(row, tile);
      reinterpret_cast<unsigned*>(chunk)[lane.member] = floats_to_bf16x2(low, high);
    }
    if (lane.member == 0) {
      const float scaled_maximum = __fmul_rn(state.maximum[half], scale);
      lse_rows[row] = softmax_lse(scaled_maximum, sum);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    flash_attention(const bf16* q, const bf16* k, const bf16* v, bf16* o, float* lse, int q_len,
                    int kv_len, int heads, int kv_heads, int causal, float scale_log2) {
  extern __shared__ __align__(128) char tiles_memory[];
  __shared__ float lse_rows[kQueryTile];
  const unsigned tiles_base = shared_address(tiles_memory);
  STAMPS;

  const int first_row = blockIdx.x * kQueryTile;
  const int head = blockIdx.y;
  const int kv_head = head / (heads / kv_heads);
  const int batch = blockIdx.z;
  const int warp = threadIdx.x / kWarpSize;
  const auto q_rows = head_rows<kHeadDim>(q, batch, q_len, heads, head);
  const auto k_rows = head_rows<kHeadDim>(k, batch, kv_len, kv_heads, kv_head);
  const auto v_rows = head_rows<kHeadDim>(v, batch, kv_len, kv_heads, kv_head);
  const auto o_rows = head_rows<kHeadDim>(o, batch, q_len, heads, head);

  const Mask mask = {q_len, kv_len, causal != 0};
  // Tiles that only rows after the last one see are left out.
  const int visible_keys = max(mask.last_key(first_row + kQueryTile - 1) + 1, 0);
  const int tiles = (visible_keys + kKeyTile - 1) / kKeyTile;

  // Start the copy of K and V tile `tile` to its buffer.
  const auto load_keys_and_values = [&](int tile) {
    const unsigned buffer = tile % 2 * kTileBytes;
    load_tile_async<kKeyTile, kHeadDim, kThreads>(tiles_base + kKeyOffset + buffer, k_rows,
                                                  tile * kKeyTile);
    load_tile_async<kKeyTile, kHeadDim, kThreads>(tiles_base + kValueOffset + buffer, v_rows,
                                                  tile * kKeyTile);
  };

  STAMP_BEGIN(Load);
  load_tile_async<kQueryTile, kHeadDim, kThreads>(tiles_base, q_rows, first_row);
  cp_async_commit();
  if (tiles > 0) load_keys_and_values(0);
  cp_async_commit();
  STAMP_END(Load);
  STAMP_BEGIN(Wait);
  cp_async_wait<1>();
  __syncthreads();  // Q is here; the first K and V need not be
  STAMP_END(Wait);
  FragmentA q_fragments[kHeadSteps];
  load_queries(q_fragments, tiles_base, warp);

  RowState state;
  float output[kOutputTiles][4] = {};
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    STAMP_BEGIN(Wait);
    cp_async_wait<0>();
    __syncthreads();  // the tile is here for every warp, and no warp still reads the one before
    STAMP_END(Wait);
    STAMP_BEGIN(Load);
    if (tile + 1 < tiles) load_keys_and_values(tile + 1);
    cp_async_commit();
    STAMP_END(Load);

    STAMP_BEGIN(Scores);
    const unsigned buffer = tile % 2 * kTileBytes;
    float s[kScoreTiles][4];
    scores(s, q_fragments, tiles_base + kKeyOffset + buffer);
    const int first_key = tile * kKeyTile;
    if (first_key + kKeyTile - 1 > mask.last_key(first_row)) {
      mask_scores(s, mask, first_row + warp * kWarpRows, first_key);
    }
    STAMP_END(Scores);
    STAMP_BEGIN(Softmax);
    float alpha[2];
    online_softmax(s, state, alpha, scale_log2);
    rescale(output, alpha);
    STAMP_END(Softmax);
    STAMP_BEGIN(Values);
    accumulate_output(output, s, tiles_base + kValueOffset + buffer);
    STAMP_END(Values);
  }

  STAMP_BEGIN(Store);
  __syncwarp();  // O takes the place of Q, of which each warp read only the rows it now writes
  stage_result(tiles_memory, lse_rows, output, state, scale_log2, warp);
  __syncthreads();
  store_tile<kQueryTile, kHeadDim, kThreads>(o_rows, first_row, tiles_memory);
  const int row = first_row + threadIdx.x;
  if (threadIdx.x < kQueryTile && row < q_len) {
    lse[(static_cast<long long>(batch) * heads + head) * q_len + row] = lse_rows[threadIdx.x];
  }
  STAMP_END(Store);
}
