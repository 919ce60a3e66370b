// Attention of a few query rows, those of one K/V head's group, on CUDA cores, 64 keys a step: chains
// of fused multiply-adds, weights kept in float32.
#pragma once

#include "batch_step.cuh"
#include "batch_tiles.cuh"
#include "element.cuh"
#include "fma_chain.cuh"
#include "warp.cuh"

struct CudaCoreTile {
  enum : int {
    kWarps = kThreads / kWarpSize,
    // The work on scores goes two rows at a time: an odd number gets one more, with q = 0.
    kRows = (TILE_Q + 1) / 2 * 2,
    // Scores: a thread has one key, and every second row.
    kScoreRows = kThreads / kKeyTile,
    kScoresPerThread = kRows / kScoreRows,
    // Softmax: a warp has every fourth row.
    kRowsPerWarp = (kRows + kWarps - 1) / kWarps,
    // Output: value `i` of a thread is number i * 128 + threadIdx.x of [rows, head dimension].
    kOutputsPerThread = (TILE_Q * HEAD_DIM_V + kThreads - 1) / kThreads,
  };
  static_assert(1 <= TILE_Q && TILE_Q <= 16, "CUDA cores take 1 to 16 query rows");

  struct Shared {
    __align__(16) float queries[kRows][HEAD_DIM];
    __align__(16) float scores[kRows][kKeyTile];  // then weights
    float alpha[kRows];
    float maxima[kRows], sums[kRows];
  };

  float output[kOutputsPerThread] = {};
  float maximum[kRowsPerWarp];
  float sum[kRowsPerWarp];

  static __device__ __forceinline__ int output_row(int i) {
    return (i * kThreads + threadIdx.x) / HEAD_DIM_V;
  }
  static __device__ __forceinline__ int output_column(int i) {
    return (i * kThreads + threadIdx.x) % HEAD_DIM_V;
  }

  __device__ __forceinline__ void begin(const RowPlace (&rows)[TILE_Q], bool sink) {
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) {
      const int row = threadIdx.x / kWarpSize + i * kWarps;
      const bool has_sink = SINK && sink && row < TILE_Q;
      maximum[i] = has_sink ? rows[has_sink ? row : 0].sink : negative_infinity();
      sum[i] = has_sink ? 1.0f : 0.0f;
    }
  }

  // Queries as float32, zeros in the row that fills up an odd number.
  __device__ __forceinline__ void decode_queries(const char* tile, Shared& shared) const {
    constexpr int chunks_per_row = HEAD_DIM / kElementsPerVector;
    for (int index = threadIdx.x; index < kRows * chunks_per_row; index += kThreads) {
      const unsigned row = index / chunks_per_row, chunk = index % chunks_per_row;
      uint4 vector = make_uint4(0, 0, 0, 0);
      if (row < TILE_Q) {
        vector = *reinterpret_cast<const uint4*>(tile + swizzled_offset<HEAD_DIM>(row, chunk));
      }
      float x[kElementsPerVector];
      elements_to_floats(vector, x);
      float4* target = reinterpret_cast<float4*>(shared.queries[row]) + 2 * chunk;
      target[0] = make_float4(x[0], x[1], x[2], x[3]);
      target[1] = make_float4(x[4], x[5], x[6], x[7]);
    }
  }

  __device__ __forceinline__ void scores(const Step& step, Shared& shared) const {
    const unsigned key = threadIdx.x % kKeyTile;
    const unsigned first_row = threadIdx.x / kKeyTile;
    float sums[kScoresPerThread] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < HEAD_DIM / kElementsPerVector; ++chunk) {
      float x[kElementsPerVector];
      elements_to_floats(
          *reinterpret_cast<const uint4*>(step.keys + swizzled_offset<HEAD_DIM>(key, chunk)), x);
#pragma unroll
      for (int i = 0; i < kScoresPerThread; ++i) {
        const float4* query =
            reinterpret_cast<const float4*>(shared.queries[first_row + i * kScoreRows]);
        sums[i] = fma_chain(sums[i], query[2 * chunk], make_float4(x[0], x[1], x[2], x[3]));
        sums[i] = fma_chain(sums[i], query[2 * chunk + 1], make_float4(x[4], x[5], x[6], x[7]));
      }
    }
#pragma unroll
    for (int i = 0; i < kScoresPerThread; ++i) {
      const int row = first_row + i * kScoreRows;
      const bool exists = row < TILE_Q;
      const float logit = step.logit(sums[i], step.rows[exists ? row : 0], key);
      shared.scores[row][key] = exists ? logit : negative_infinity();
    }
  }

  // One step of online softmax: scores become weights in place.
  __device__ __forceinline__ void softmax(float factor, Shared& shared) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) {
      const int row = threadIdx.x / kWarpSize + i * kWarps;
      if (row >= kRows) break;
      float* scores = shared.scores[row];
      const float left = scores[lane], right = scores[lane + kWarpSize];
      const float next = fmaxf(maximum[i], butterfly_max<kWarpSize / 2>(fmaxf(left, right)));
      const float scaled_shift = __fmul_rn(softmax_shift(next), factor);
      const float alpha = softmax_weight(maximum[i], factor, scaled_shift);
      const float left_weight = softmax_weight(left, factor, scaled_shift);
      const float right_weight = softmax_weight(right, factor, scaled_shift);
      scores[lane] = left_weight;
      scores[lane + kWarpSize] = right_weight;
      sum[i] = __fadd_rn(__fmul_rn(sum[i], alpha), warp_sum(__fadd_rn(left_weight, right_weight)));
      maximum[i] = next;
      if (lane == 0) shared.alpha[row] = alpha;
    }
  }

  // O = alpha O + P V: one chain over the 64 keys for each output.
  __device__ __forceinline__ void accumulate(const char* values, const Shared& shared) {
    constexpr int keys_per_step = 4;
#pragma unroll
    for (int i = 0; i < kOutputsPerThread; ++i) {
      const int row = output_row(i), column = output_column(i);
      if (row >= TILE_Q) break;
      output[i] = __fmul_rn(output[i], shared.alpha[row]);
#pragma unroll 1
      for (int key = 0; key < kKeyTile; key += keys_per_step) {
        float x[keys_per_step];
#pragma unroll
        for (int j = 0; j < keys_per_step; ++j) {
          const char* chunk =
              values + swizzled_offset<HEAD_DIM_V>(key + j, column / kElementsPerVector);
          x[j] = element_to_float(
              reinterpret_cast<const element*>(chunk)[column % kElementsPerVector]);
        }
        const float4 weight = *reinterpret_cast<const float4*>(shared.scores[row] + key);
        output[i] = fma_chain(output[i], weight, make_float4(x[0], x[1], x[2], x[3]));
      }
    }
  }

  __device__ __forceinline__ void advance(const Step& step, Shared& shared) {
    if (step.is_first) {
      decode_queries(step.queries, shared);
      __syncthreads();
    }
    scores(step, shared);
    __syncthreads();
    softmax(step.factor, shared);
    __syncthreads();
    accumulate(step.values, shared);
  }

  // As that of TensorCoreTile, but values of O come one at a time.
  template <typename OUTPUT, typename LSE>
  __device__ __forceinline__ void finish(float factor, Shared& shared, OUTPUT store, LSE store_lse) {
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) {
      const int row = threadIdx.x / kWarpSize + i * kWarps;
      if (row < kRows && threadIdx.x % kWarpSize == 0) {
        shared.maxima[row] = maximum[i];
        shared.sums[row] = sum[i];
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kOutputsPerThread; ++i) {
      const int row = output_row(i);
      if (row < TILE_Q) store(row, output_column(i), softmax_output(output[i], shared.sums[row]));
    }
    if (threadIdx.x < TILE_Q) {
      const float scaled_maximum = __fmul_rn(shared.maxima[threadIdx.x], factor);
      store_lse(threadIdx.x, softmax_lse(scaled_maximum, shared.sums[threadIdx.x]));
    }
  }
};
