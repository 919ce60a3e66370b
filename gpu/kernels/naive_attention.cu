// Attention as the formula reads, in three kernels: S = Q K^T, P = softmax(S), O = P V.
//
// S and P, [batch, heads, q_len, kv_len] bfloat16, pass through global memory in between: that is the
// traffic other kernels are measured against. CUDA cores, one chain of fused multiply-adds a value.
//
// q, o [batch, q_len, heads, d]; k, v [batch, kv_len, kv_heads, d]: bfloat16, contiguous.
// Compile with -DHEAD_DIM=64 or 128.
#include "bf16.cuh"
#include "fma_chain.cuh"
#include "rows.cuh"
#include "softmax.cuh"
#include "swizzle.cuh"
#include "warp.cuh"

enum : int {
  kHeadDim = HEAD_DIM,
  kThreads = 256,
  kWarps = kThreads / kWarpSize,
  kTile = 32,  // query rows, and keys, of a tile
  kFloatsPerVector = 4,
  kVectorsPerRow = kHeadDim / kFloatsPerVector,
  // A row of a tile belongs to eight neighbouring threads.
  kThreadsPerRow = kThreads / kTile,
  kKeysPerThread = kTile / kThreadsPerRow,
  kVectorsPerThread = kVectorsPerRow / kThreadsPerRow,
};
static_assert(kHeadDim == 64 || kHeadDim == 128, "HEAD_DIM is 64 or 128");
static_assert(kTile == kWarpSize, "a warp moves one row of a tile of S or P");

// Which head the CTA works on: blockIdx.z counts heads within batches.
struct Head {
  int batch, query, key_value;
  __device__ __forceinline__ Head(int heads, int kv_heads)
      : batch(blockIdx.z / heads),
        query(blockIdx.z % heads),
        key_value(query / (heads / kv_heads)) {}
};

// The rows of S or P of the CTA's head.
template <typename ELEMENT>
__device__ __forceinline__ Rows<ELEMENT> score_rows(ELEMENT* tensor, int q_len, int kv_len) {
  const long long matrix = static_cast<long long>(q_len) * kv_len;
  return {tensor + blockIdx.z * matrix, kv_len, q_len};
}

// Index of a vector of a float32 tile. Neighbouring threads read the same column of every fourth
// row: exchanging vector i with i ^ (row / 4 % 8) puts those eight in different banks.
__device__ __forceinline__ int float_vector(int row, int i) {
  return row * kVectorsPerRow + (i ^ (row / 4 % 8));
}

// Rows first .. first + 31 as float32 in shared memory, 16 bytes a thread; zeros past the last one.
__device__ __forceinline__ void load_tile(float4* tile, const Rows<const bf16>& source, int first) {
  using Copy = TileCopy<kTile, kHeadDim, kThreads>;
#pragma unroll
  for (int i = 0; i < Copy::kIterations; ++i) {
    const int row = Copy::row(i);
    uint4 vector = make_uint4(0, 0, 0, 0);
    if (first + row < source.count) {
      vector = reinterpret_cast<const uint4*>(source.row(first + row))[Copy::chunk()];
    }
    float x[kBf16PerVector];
    bf16x8_to_float(vector, x);
    tile[float_vector(row, 2 * Copy::chunk())] = make_float4(x[0], x[1], x[2], x[3]);
    tile[float_vector(row, 2 * Copy::chunk() + 1)] = make_float4(x[4], x[5], x[6], x[7]);
  }
}

// sum += a * b, by components.
__device__ __forceinline__ void fma_vector(float4& sum, float a, const float4& b) {
  sum.x = __fmaf_rn(a, b.x, sum.x);
  sum.y = __fmaf_rn(a, b.y, sum.y);
  sum.z = __fmaf_rn(a, b.z, sum.z);
  sum.w = __fmaf_rn(a, b.w, sum.w);
}

// Four floats, rounded, as eight bytes of bfloat16.
__device__ __forceinline__ uint2 float4_to_bf16(const float4& x) {
  return make_uint2(floats_to_bf16x2(x.x, x.y), floats_to_bf16x2(x.z, x.w));
}

// S = scale * Q K^T, -inf above the causal diagonal, which ends in the bottom right corner.
// Grid (ceil(kv_len / 32), ceil(q_len / 32), batch * heads).
extern "C" __global__ void __launch_bounds__(kThreads)
    naive_scores(const bf16* q, const bf16* k, bf16* s, int q_len, int kv_len, int heads,
                 int kv_heads, int causal, float scale) {
  __shared__ float4 q_tile[kTile * kVectorsPerRow];
  __shared__ float4 k_tile[kTile * kVectorsPerRow];
  __shared__ __align__(kVectorBytes) bf16 s_tile[kTile][kTile];

  const Head head(heads, kv_heads);
  const int first_key = blockIdx.x * kTile;
  const int first_row = blockIdx.y * kTile;
  load_tile(q_tile, head_rows<kHeadDim>(q, head.batch, q_len, heads, head.query), first_row);
  load_tile(k_tile, head_rows<kHeadDim>(k, head.batch, kv_len, kv_heads, head.key_value),
            first_key);
  __syncthreads();

  const int tile_row = threadIdx.x / kThreadsPerRow;
  const int tile_key = threadIdx.x % kThreadsPerRow * kKeysPerThread;
  float scores[kKeysPerThread] = {};
#pragma unroll 4
  for (int i = 0; i < kVectorsPerRow; ++i) {
    const float4 query = q_tile[float_vector(tile_row, i)];
#pragma unroll
    for (int j = 0; j < kKeysPerThread; ++j) {
      scores[j] = fma_chain(scores[j], query, k_tile[float_vector(tile_key + j, i)]);
    }
  }

  const int last_key = causal ? first_row + tile_row + kv_len - q_len : kv_len - 1;
#pragma unroll
  for (int j = 0; j < kKeysPerThread; ++j) {
    const float scaled = __fmul_rn(scores[j], scale);
    scores[j] = first_key + tile_key + j <= last_key ? scaled : negative_infinity();
  }
  *reinterpret_cast<uint2*>(&s_tile[tile_row][tile_key]) =
      float4_to_bf16(make_float4(scores[0], scores[1], scores[2], scores[3]));
  __syncthreads();

  const auto s_rows = score_rows(s, q_len, kv_len);
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int i = 0; i < kTile / kWarps; ++i) {
    const int row = i * kWarps + warp;
    if (first_row + row < q_len && first_key + lane < kv_len) {
      s_rows.row(first_row + row)[first_key + lane] = s_tile[row][lane];
    }
  }
}

// P = softmax(S) by rows, one warp a row; S is read for the maximum, the sum and the result.
// Grid (ceil(rows / 8)) for rows = batch * heads * q_len.
extern "C" __global__ void __launch_bounds__(kThreads)
    naive_softmax(const bf16* s, bf16* p, long long rows, int kv_len) {
  constexpr float log2_e = 0x1.715476p+0f;
  const int lane = threadIdx.x % kWarpSize;
  const long long row = static_cast<long long>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  if (row >= rows) return;
  const bf16* scores = s + row * kv_len;

  float maximum = negative_infinity();
#pragma unroll 1
  for (int key = lane; key < kv_len; key += kWarpSize) {
    maximum = fmaxf(maximum, bf16_to_float(scores[key]));
  }
  maximum = butterfly_max<kWarpSize / 2>(maximum);
  const float scaled_shift = __fmul_rn(softmax_shift(maximum), log2_e);

  float sum = 0.0f;
#pragma unroll 1
  for (int key = lane; key < kv_len; key += kWarpSize) {
    sum = __fadd_rn(sum, softmax_weight(bf16_to_float(scores[key]), log2_e, scaled_shift));
  }
  sum = warp_sum(sum);
  // The weights of a row without keys are 0, and so are its probabilities.
  const float divisor = maximum == negative_infinity() ? 1.0f : sum;

#pragma unroll 1
  for (int key = lane; key < kv_len; key += kWarpSize) {
    const float weight = softmax_weight(bf16_to_float(scores[key]), log2_e, scaled_shift);
    p[row * kv_len + key] = float_to_bf16(__fdiv_rn(weight, divisor));
  }
}

// O = P V. Grid (ceil(q_len / 32), 1, batch * heads).
extern "C" __global__ void __launch_bounds__(kThreads)
    naive_output(const bf16* p, const bf16* v, bf16* o, int q_len, int kv_len, int heads,
                 int kv_heads) {
  // One value of padding: the four rows that a warp works on are read from different banks.
  __shared__ float p_tile[kTile][kTile + 1];
  __shared__ float4 v_tile[kTile * kVectorsPerRow];
  __shared__ __align__(kVectorBytes) char o_tile[kTile * kHeadDim * 2];

  const Head head(heads, kv_heads);
  const int first_row = blockIdx.x * kTile;
  const auto p_rows = score_rows(p, q_len, kv_len);
  const auto v_rows = head_rows<kHeadDim>(v, head.batch, kv_len, kv_heads, head.key_value);
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int tile_row = threadIdx.x / kThreadsPerRow;
  const int first_vector = threadIdx.x % kThreadsPerRow;

  float4 output[kVectorsPerThread] = {};
#pragma unroll 1
  for (int first_key = 0; first_key < kv_len; first_key += kTile) {
    __syncthreads();  // no thread still reads the tiles before
#pragma unroll
    for (int i = 0; i < kTile / kWarps; ++i) {
      const int row = i * kWarps + warp;
      const bool exists = first_row + row < q_len && first_key + lane < kv_len;
      p_tile[row][lane] =
          exists ? bf16_to_float(p_rows.row(first_row + row)[first_key + lane]) : 0.0f;
    }
    load_tile(v_tile, v_rows, first_key);
    __syncthreads();

    const int keys = min(static_cast<int>(kTile), kv_len - first_key);
#pragma unroll 1
    for (int key = 0; key < keys; ++key) {
      const float weight = p_tile[tile_row][key];
#pragma unroll
      for (int i = 0; i < kVectorsPerThread; ++i) {
        const int vector = first_vector + i * kThreadsPerRow;
        fma_vector(output[i], weight, v_tile[float_vector(key, vector)]);
      }
    }
  }

#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i) {
    // A vector of four is half a chunk of eight bfloat16.
    const int vector = first_vector + i * kThreadsPerRow;
    char* chunk = o_tile + swizzled_offset<kHeadDim>(tile_row, vector / 2);
    reinterpret_cast<uint2*>(chunk)[vector % 2] = float4_to_bf16(output[i]);
  }
  __syncthreads();  // the tile of O is complete
  store_tile<kTile, kHeadDim, kThreads>(
      head_rows<kHeadDim>(o, head.batch, q_len, heads, head.query), first_row, o_tile);
}
