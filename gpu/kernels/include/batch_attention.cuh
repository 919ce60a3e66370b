// Attention of a batch of requests of any lengths: the skeleton that the kernels of ragged, paged
// and block-sparse K and V share.
//
// A CTA takes one item of a plan: a request, a tile of its query rows and a chunk of the keys that
// the tile sees. Rows are packed: the heads that share a K/V head are neighbouring rows of one tile.
// What a CTA leaves is a state, o normalised and its LSE: final, or one of several to be merged.
//
// Compile with HEAD_DIM and HEAD_DIM_V (64, 128 or 256), TILE_Q (rows of a tile: 16 or 64, or 1 to
// 16 with -DCUDA_CORES=1), -DELEMENT_FP16 for float16 Q, K, V and O, -DKV_E4M3 for FP8 K and V,
// -DINDEX_64 for tables of 64-bit numbers, -DKV_HND for pages with heads outside, and what
// variant.cuh lists.
#pragma once

#include "batch_step.cuh"
#include "batch_tiles.cuh"
#include "element.cuh"
#include "kv_rows.cuh"
#include "variant.cuh"

#ifndef CUDA_CORES
#define CUDA_CORES 0
#endif

// One launch; tensors as the kernel files describe them.
struct BatchArguments {
  const element* q;
  const void* k;
  const void* v;
  element* o;
  float* lse;
  float* partial_o;    // [partial rows, heads, HEAD_DIM_V]
  float* partial_lse;  // [partial rows, heads]
  const index* qo_indptr;
  const index* kv_indptr;
  const index* kv_indices;
  const index* kv_last_len;
  // The plan. An item of a padded grid that has no work has a negative request.
  const int* requests;
  const int* q_tiles;
  const int* kv_chunks;
  const long long* state_rows;  // [q_rows]: of partial_o and partial_lse, where a query's states begin
  VariantArguments variant;
  int heads, kv_heads;
  int block_size;  // keys of a page or block
  int block_rows;  // queries of a block row (block-sparse attention)
  int q_rows;      // queries of all requests
  int kv_chunk;    // keys of a chunk
  int is_split;
  float scale;   // from q . k to a logit
  float factor;  // from what the softmax takes to a base-2 exponent
  float v_scale;
};

#if CUDA_CORES
#include "cuda_core_tile.cuh"
using AttentionTile = CudaCoreTile;
#else
#include "tensor_core_tile.cuh"
using AttentionTile = TensorCoreTile;
#endif

enum : int {
#ifdef KV_E4M3
  kKvBytes = 1,
#else
  kKvBytes = 2,
#endif
  // Dynamic shared memory: Q; two tiles of K and two of V as they come. FP8 tiles are half as large
  // and leave room for a decoded one. O takes the place of K and V at the end.
  kQueryBytes = TILE_Q * HEAD_DIM * kElementBytes,
  kKeyTileBytes = kKeyTile * HEAD_DIM * kElementBytes,
  kValueTileBytes = kKeyTile * HEAD_DIM_V * kElementBytes,
  kKeyOffset = (kQueryBytes + 127) / 128 * 128,
  kValueOffset = kKeyOffset + 2 * kKeyTileBytes,
  // Whether tiles are changed before they are used: then there is a barrier more.
  kDecodes = kKvBytes == 1,
  kPrepares = kDecodes || ROPE || CUSTOM_MASK,
};

// Queries of requests one after the other: those of `request` begin at indptr[request].
struct RaggedQueries {
  long long start;
  int q_len;
  __device__ __forceinline__ RaggedQueries(const BatchArguments& a, int request)
      : start(a.qo_indptr[request]),
        q_len(static_cast<int>(a.qo_indptr[request + 1] - start)) {}
};

// One query of each request.
struct OneQuery {
  long long start;
  int q_len;
  __device__ __forceinline__ OneQuery(const BatchArguments&, int request)
      : start(request), q_len(1) {}
};

// A request is a block row: `block_rows` queries, fewer in the last.
struct BlockRowQueries {
  long long start;
  int q_len;
  __device__ __forceinline__ BlockRowQueries(const BatchArguments& a, int request)
      : start(static_cast<long long>(request) * a.block_rows),
        q_len(min(a.block_rows, static_cast<int>(a.q_rows - start))) {}
};

// The bits of a row of the custom mask from `first_key` on, as many as there are keys below `stop`.
__device__ __forceinline__ unsigned long long custom_row(const unsigned char* mask, int row,
                                                         int kv_len, int first_key, int stop) {
  const long long bit = static_cast<long long>(row) * kv_len + first_key;
  const long long last = bit + min(kKeyTile, stop - first_key) - 1;
  const long long byte = bit >> 3;
  unsigned long long low = 0, high = 0;
#pragma unroll
  for (int i = 0; i < 9; ++i) {
    unsigned long long bits = 0;
    if (byte + i <= last >> 3) bits = mask[byte + i];
    if (i < 8) {
      low |= bits << 8 * i;
    } else {
      high = bits;
    }
  }
  const int shift = bit & 7;
  return shift == 0 ? low : low >> shift | high << (64 - shift);
}

// ld.global.b32, once: the compiler would rather read some tables again than keep what it read.
__device__ __forceinline__ int read_once(const int* place) {
  int value;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(place)));
  return value;
}

// Grid (items of the plan, kv_heads), 128 threads.
template <typename QUERIES, typename KEYS>
__device__ __forceinline__ void batch_attention(const BatchArguments& a, const QUERIES& queries,
                                                const KEYS& keys, int request) {
  extern __shared__ __align__(128) char tiles_memory[];
  __shared__ AttentionTile::Shared shared;
  __shared__ RowPlace rows[TILE_Q];
  __shared__ long long numbers[2][kKeyTile];
  __shared__ unsigned long long custom_bits[CUSTOM_MASK ? TILE_Q : 1];
  __shared__ float row_lse[TILE_Q];

  const int q_tile = read_once(a.q_tiles + blockIdx.x);
  const int chunk = read_once(a.kv_chunks + blockIdx.x);
  const int kv_head = blockIdx.y, group = a.heads / a.kv_heads;
  const int q_len = queries.q_len, kv_len = keys.kv_len;
  const int first_packed = q_tile * TILE_Q;
  const int first_row = first_packed / group;
  const int last_row = min((first_packed + TILE_Q - 1) / group, q_len - 1);
  // Rows that fill up the tile see nothing: they weigh nothing, and cost an emulator nothing.
  const bool is_full = first_packed + TILE_Q <= q_len * group;
  const VariantArguments& variant = a.variant;

  const unsigned char* custom_mask = nullptr;
  if (CUSTOM_MASK) custom_mask = variant.mask + variant.mask_indptr[request];

  // Keys that any row of the tile sees, and the chunk's share of them.
  const Band first_band(variant, first_row + kv_len - q_len, kv_len);
  const Band last_band(variant, last_row + kv_len - q_len, kv_len);
  const long long from = first_band.first + static_cast<long long>(chunk) * a.kv_chunk;
  const int stop = static_cast<int>(
      max(min(from + a.kv_chunk, static_cast<long long>(last_band.end)), 0LL));
  const int begin = static_cast<int>(min(from, static_cast<long long>(stop)));
  const int tiles = (stop - begin + kKeyTile - 1) / kKeyTile;

  if (threadIdx.x < TILE_Q) {
    const int packed = first_packed + threadIdx.x;
    RowPlace place;
    place.row = packed / group;
    place.head = kv_head * group + packed - place.row * group;
    place.slope = place.sink = 0.0f;
    place.state = 0;
    if (a.is_split && place.row < q_len) {
      place.state = a.state_rows[queries.start + place.row] + chunk;
    }
    if (ALIBI) place.slope = variant.alibi_slopes[place.head];
    if (SINK && chunk == 0) place.sink = variant.sinks[place.head];
    rows[threadIdx.x] = place;
  }
  const auto find_rows = [&](int tile) {
    const int key = begin + tile * kKeyTile + static_cast<int>(threadIdx.x);
    if (threadIdx.x < kKeyTile) {
      numbers[tile % 2][threadIdx.x] = key < stop ? keys.number(key) : 0;
    }
  };
  const auto raw_keys = [&](int tile) {
    return tiles_memory + kKeyOffset + tile % 2 * (kKeyTileBytes / 2 * kKvBytes);
  };
  const auto raw_values = [&](int tile) {
    return tiles_memory + kValueOffset + tile % 2 * (kValueTileBytes / 2 * kKvBytes);
  };
  const auto load_keys_and_values = [&](int tile) {
    const int count = stop - begin - tile * kKeyTile;
    gather_tile_async<HEAD_DIM * kKvBytes, kKvBytes == 2>(shared_address(raw_keys(tile)), a.k,
                                                          numbers[tile % 2], count);
    gather_tile_async<HEAD_DIM_V * kKvBytes, kKvBytes == 2>(shared_address(raw_values(tile)), a.v,
                                                            numbers[tile % 2], count);
  };

  if (tiles > 0) find_rows(0);
  if (tiles > 1) find_rows(1);
  __syncthreads();
  if (tiles > 0) {
    constexpr int chunks_per_row = HEAD_DIM / kElementsPerVector;
    constexpr int chunks = TILE_Q * chunks_per_row;
#pragma unroll
    for (int i = 0; i < (chunks + kThreads - 1) / kThreads; ++i) {
      const int index = i * kThreads + threadIdx.x;
      if (index >= chunks) break;
      const RowPlace& place = rows[index / chunks_per_row];
      const element* source =
          a.q + ((queries.start + place.row) * a.heads + place.head) * HEAD_DIM;
      const unsigned target = swizzled_offset<HEAD_DIM>(index / chunks_per_row,
                                                        index % chunks_per_row);
      cp_async_16(shared_address(tiles_memory) + target,
                  source + index % chunks_per_row * kElementsPerVector,
                  place.row < q_len ? kVectorBytes : 0);
    }
    load_keys_and_values(0);
    cp_async_commit();
  }

  AttentionTile attention;
  attention.begin(rows, chunk == 0);
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    cp_async_wait<0>();
    __syncthreads();  // the tile is here for every warp, and no warp still uses the one before
    if (tile + 1 < tiles) load_keys_and_values(tile + 1);
    cp_async_commit();
    if (tile + 2 < tiles) find_rows(tile + 2);

    const int first_key = begin + tile * kKeyTile;
    char* key_tile = kDecodes ? tiles_memory + kKeyOffset + kKeyTileBytes : raw_keys(tile);
    char* value_tile = kDecodes ? tiles_memory + kValueOffset + kValueTileBytes : raw_values(tile);
    if (kDecodes) {
      decode_tile<HEAD_DIM>(key_tile, raw_keys(tile));
      decode_tile<HEAD_DIM_V>(value_tile, raw_values(tile));
      if (ROPE) __syncthreads();
    }
    if (ROPE) {
      rotate_tile<kKeyTile, HEAD_DIM>(key_tile, variant.rope, [&](int row) {
        return first_key + row < stop ? first_key + row : -1;
      });
      if (tile == 0) {
        // Queries before the first key see none, if keys are masked by position: their angle does
        // not matter.
        rotate_tile<TILE_Q, HEAD_DIM>(tiles_memory, variant.rope, [&](int row) {
          return rows[row].row < q_len ? max(rows[row].row + kv_len - q_len, 0) : -1;
        });
      }
    }
    if (CUSTOM_MASK && static_cast<int>(threadIdx.x) <= last_row - first_row) {
      custom_bits[threadIdx.x] =
          custom_row(custom_mask, first_row + threadIdx.x, kv_len, first_key, stop);
    }
    if (kPrepares) __syncthreads();

    const int end_key = first_key + kKeyTile;
    const bool sees_all = !CUSTOM_MASK && !USER_VARIANT && is_full && end_key <= stop &&
                          end_key <= first_band.end && first_key >= last_band.first;
    const Step step = {tiles_memory, key_tile, value_tile, rows,  custom_bits, variant,
                       request,      q_len,    kv_len,     first_row, first_key, stop,
                       a.scale,      a.factor, sees_all,   tile == 0};
    attention.advance(step, shared);
  }

  __syncthreads();  // O takes the place of K and V
  char* staged = tiles_memory + kKeyOffset;
  const auto finished = [&](int row, int column, float value) {
    const Place at = {request, rows[row].head, rows[row].row, 0, q_len, kv_len};
    return __fmul_rn(transform_output(variant, value, at, column), a.v_scale);
  };
  const auto stage_lse = [&](int row, float lse) { row_lse[row] = lse; };
  const auto stage = [&](int row, int column, float value) {
    const float x = finished(row, column, value);
    if (a.is_split) {
      char* place = staged + swizzled_offset<2 * HEAD_DIM_V>(row, column / 4);
      reinterpret_cast<float*>(place)[column % 4] = x;
    } else {
      char* place = staged + swizzled_offset<HEAD_DIM_V>(row, column / kElementsPerVector);
      reinterpret_cast<element*>(place)[column % kElementsPerVector] = float_to_element(x);
    }
  };
#if CUDA_CORES
  attention.finish(a.factor, shared, stage, stage_lse);
#else
  const auto stage_pair = [&](int row, int column, float low, float high) {
    stage(row, column, low);
    stage(row, column + 1, high);
  };
  attention.finish(a.factor, shared, stage_pair, stage_lse);
#endif
  __syncthreads();

  // Rows of 16-byte chunks to where they belong, as elements or, of a part, as float32.
  const int row_chunks = HEAD_DIM_V / (a.is_split ? 4 : kElementsPerVector);
#pragma unroll 1
  for (int index = threadIdx.x; index < TILE_Q * row_chunks; index += kThreads) {
    const int row = index / row_chunks, column = index % row_chunks;
    const RowPlace& place = rows[row];
    if (place.row >= q_len) continue;
    if (a.is_split) {
      const long long target = place.state * a.heads + place.head;
      reinterpret_cast<uint4*>(a.partial_o)[target * (HEAD_DIM_V / 4) + column] =
          *reinterpret_cast<const uint4*>(staged + swizzled_offset<2 * HEAD_DIM_V>(row, column));
    } else {
      const long long target = (queries.start + place.row) * a.heads + place.head;
      reinterpret_cast<uint4*>(a.o)[target * (HEAD_DIM_V / kElementsPerVector) + column] =
          *reinterpret_cast<const uint4*>(staged + swizzled_offset<HEAD_DIM_V>(row, column));
    }
  }
  if (threadIdx.x < TILE_Q && rows[threadIdx.x].row < q_len) {
    const RowPlace& place = rows[threadIdx.x];
    const long long row = a.is_split ? place.state : queries.start + place.row;
    (a.is_split ? a.partial_lse : a.lse)[row * a.heads + place.head] = row_lse[threadIdx.x];
  }
}
