// Attention of a tile of 16 or 64 query rows on tensor cores, 64 keys a step, by four warps.
//
// With 64 rows a warp owns 16 of them. With 16 all warps share the rows: each computes the scores of
// a quarter of the keys and a quarter of the output's columns; maxima, weights and sums go through
// shared memory.
#pragma once

#include "batch_step.cuh"
#include "batch_tiles.cuh"
#include "element.cuh"
#include "warp.cuh"

struct TensorCoreTile {
  enum : int {
    kWarpRows = 16,
    kRowWarps = TILE_Q / kWarpRows,
    kKeyWarps = kThreads / kWarpSize / kRowWarps,  // warps that share rows
    kWarpKeys = kKeyTile / kKeyWarps,
    kScoreTiles = kWarpKeys / 8,
    kWarpColumns = HEAD_DIM_V / kKeyWarps,
    kOutputTiles = kWarpColumns / 8,
    kHeadSteps = HEAD_DIM / 16,
    kKeySteps = kKeyTile / 16,
  };
  static_assert(TILE_Q == 16 || TILE_Q == 64, "tensor cores take tiles of 16 or 64 query rows");

  // What the warps that share rows tell each other.
  struct Shared {
    float maxima[kKeyWarps][kWarpRows];
    float sums[kKeyWarps][kWarpRows];
    __align__(128) element weights[kWarpRows * kKeyTile];
  };

  // A lane holds two rows of its warp's 16, `group` and `group` + 8.
  float output[kOutputTiles][4] = {};
  float maximum[2] = {negative_infinity(), negative_infinity()};
  float sum[2] = {0.0f, 0.0f};  // of the lane's own keys only
  int row_warp = threadIdx.x / kWarpSize % kRowWarps;
  int key_warp = threadIdx.x / kWarpSize / kRowWarps;

  // A sink is a key with the value 0: one lane of each row begins with its weight, 1.
  __device__ __forceinline__ void begin(const RowPlace (&rows)[TILE_Q], bool sink) {
    const FragmentLane lane;
    if (!SINK || !sink) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      maximum[half] = rows[row_warp * kWarpRows + lane.row(half)].sink;
      sum[half] = key_warp == 0 && lane.member == 0 ? 1.0f : 0.0f;
    }
  }

  // S = Q K^T: the accumulators start at 0 and take 16 values of the head dimension a step.
  __device__ __forceinline__ void scores(float (&s)[kScoreTiles][4], unsigned queries,
                                         unsigned keys) const {
    const unsigned lane = threadIdx.x % kWarpSize;
    // Lanes 0-15 address the two halves of eight keys, lanes 16-31 those of the next eight.
    const unsigned key = key_warp * kWarpKeys + lane % 8 + lane / 16 * 8;
    const unsigned half = lane / 8 % 2;
#pragma unroll
    for (int tile = 0; tile < kScoreTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[tile][i] = 0.0f;
    }
#pragma unroll
    for (int step = 0; step < kHeadSteps; ++step) {
      FragmentA q;
      const unsigned row = row_warp * kWarpRows + lane % 16;
      ldmatrix_x4(q.x, queries + swizzled_offset<HEAD_DIM>(row, 2 * step + lane / 16));
#pragma unroll
      for (int pair = 0; pair < kScoreTiles / 2; ++pair) {
        unsigned x[4];
        ldmatrix_x4(x, keys + swizzled_offset<HEAD_DIM>(pair * 16 + key, 2 * step + half));
        mma_elements(s[2 * pair], q, {x[0], x[1]});
        mma_elements(s[2 * pair + 1], q, {x[2], x[3]});
      }
    }
  }

  // Scores become logits; -inf for the keys that a row does not see.
  __device__ __forceinline__ void transform(float (&s)[kScoreTiles][4], const Step& step) const {
    if (!kTransformsLogits && step.sees_all) return;
    const FragmentLane lane;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowPlace& row = step.rows[row_warp * kWarpRows + lane.row(half)];
#pragma unroll
      for (int tile = 0; tile < kScoreTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = s[tile][2 * half + i];
          score = step.logit(score, row, key_warp * kWarpKeys + lane.column(tile) + i);
        }
      }
    }
  }

  // Of the rows over all keys of the tile.
  __device__ __forceinline__ void tile_maxima(float (&maxima)[2], const float (&s)[kScoreTiles][4],
                                              Shared& shared) const {
    const FragmentLane lane;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      maxima[half] = fmaxf(s[0][2 * half], s[0][2 * half + 1]);
#pragma unroll
      for (int tile = 1; tile < kScoreTiles; ++tile) {
        maxima[half] = fmaxf(maxima[half], fmaxf(s[tile][2 * half], s[tile][2 * half + 1]));
      }
      maxima[half] = butterfly_max<2>(maxima[half]);
      if (kKeyWarps > 1 && lane.member == 0) shared.maxima[key_warp][lane.row(half)] = maxima[half];
    }
    if (kKeyWarps == 1) return;
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int warp = 0; warp < kKeyWarps; ++warp) {
        maxima[half] = fmaxf(maxima[half], shared.maxima[warp][lane.row(half)]);
      }
    }
  }

  // Online softmax: scores become weights, what there is of O is rescaled.
  __device__ __forceinline__ void softmax(float (&s)[kScoreTiles][4], float factor,
                                          Shared& shared) {
    float maxima[2];
    tile_maxima(maxima, s, shared);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float next = fmaxf(maximum[half], maxima[half]);
      const float scaled_shift = __fmul_rn(softmax_shift(next), factor);
      const float alpha = softmax_weight(maximum[half], factor, scaled_shift);
      maximum[half] = next;
      float total = __fmul_rn(sum[half], alpha);
#pragma unroll
      for (int tile = 0; tile < kScoreTiles; ++tile) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          s[tile][i] = softmax_weight(s[tile][i], factor, scaled_shift);
          total = __fadd_rn(total, s[tile][i]);
        }
      }
      sum[half] = total;
#pragma unroll
      for (int tile = 0; tile < kOutputTiles; ++tile) {
        output[tile][2 * half] = __fmul_rn(output[tile][2 * half], alpha);
        output[tile][2 * half + 1] = __fmul_rn(output[tile][2 * half + 1], alpha);
      }
    }
  }

  // P of all 64 keys as A fragments, rounded to elements. Two accumulators of S side by side are
  // one: lanes hold the same rows and columns in both.
  __device__ __forceinline__ void weights(FragmentA (&p)[kKeySteps],
                                          const float (&s)[kScoreTiles][4], Shared& shared) const {
    if constexpr (kKeyWarps == 1) {
#pragma unroll
      for (int step = 0; step < kKeySteps; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* pair = s[2 * step + i / 2] + i % 2 * 2;
          p[step].x[i] = floats_to_elements(pair[0], pair[1]);
        }
      }
    } else {
      const FragmentLane lane;
      char* tile_memory = reinterpret_cast<char*>(shared.weights);
#pragma unroll
      for (int tile = 0; tile < kScoreTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          char* chunk = tile_memory + swizzled_offset<kKeyTile>(lane.row(half),
                                                               key_warp * kScoreTiles + tile);
          reinterpret_cast<unsigned*>(chunk)[lane.member] =
              floats_to_elements(s[tile][2 * half], s[tile][2 * half + 1]);
        }
      }
      __syncthreads();
      const unsigned row = threadIdx.x % 16, right = threadIdx.x % kWarpSize / 16;
      const unsigned base = shared_address(tile_memory);
#pragma unroll
      for (int step = 0; step < kKeySteps; ++step) {
        ldmatrix_x4(p[step].x, base + swizzled_offset<kKeyTile>(row, 2 * step + right));
      }
    }
  }

  // One tile of keys and values.
  __device__ __forceinline__ void advance(const Step& step, Shared& shared) {
    float s[kScoreTiles][4];
    scores(s, shared_address(step.queries), shared_address(step.keys));
    transform(s, step);
    softmax(s, step.factor, shared);
    FragmentA p[kKeySteps];
    weights(p, s, shared);
    const unsigned lane = threadIdx.x % kWarpSize;
    const unsigned values = shared_address(step.values);
    // O += P V, 16 keys a step.
#pragma unroll
    for (int k = 0; k < kKeySteps; ++k) {
#pragma unroll
      for (int pair = 0; pair < kOutputTiles / 2; ++pair) {
        // Lanes 0-15 address 16 keys at eight dimensions, lanes 16-31 at the next eight.
        unsigned x[4];
        const unsigned chunk = key_warp * kOutputTiles + 2 * pair + lane / 16;
        ldmatrix_x4_trans(x, values + swizzled_offset<HEAD_DIM_V>(k * 16 + lane % 16, chunk));
        mma_elements(output[2 * pair], p[k], {x[0], x[1]});
        mma_elements(output[2 * pair + 1], p[k], {x[2], x[3]});
      }
    }
  }

  // Sums over the lanes and warps that share a row.
  __device__ __forceinline__ void add_sums(Shared& shared) {
    const FragmentLane lane;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] = __fadd_rn(sum[half], shuffle_xor(sum[half], 1));
      sum[half] = __fadd_rn(sum[half], shuffle_xor(sum[half], 2));
      if (kKeyWarps > 1 && lane.member == 0) shared.sums[key_warp][lane.row(half)] = sum[half];
    }
    if (kKeyWarps == 1) return;
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] = shared.sums[0][lane.row(half)];
#pragma unroll
      for (int warp = 1; warp < kKeyWarps; ++warp) {
        sum[half] = __fadd_rn(sum[half], shared.sums[warp][lane.row(half)]);
      }
    }
  }

  // Hands over two neighbouring values of O at a time, and the LSE of each row once.
  template <typename OUTPUT, typename LSE>
  __device__ __forceinline__ void finish(float factor, Shared& shared, OUTPUT store_pair,
                                         LSE store_lse) {
    add_sums(shared);
    const FragmentLane lane;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_warp * kWarpRows + lane.row(half);
#pragma unroll
      for (int tile = 0; tile < kOutputTiles; ++tile) {
        store_pair(row, key_warp * kWarpColumns + lane.column(tile),
                   softmax_output(output[tile][2 * half], sum[half]),
                   softmax_output(output[tile][2 * half + 1], sum[half]));
      }
      if (key_warp == 0 && lane.member == 0) {
        store_lse(row, softmax_lse(__fmul_rn(maximum[half], factor), sum[half]));
      }
    }
  }
};
