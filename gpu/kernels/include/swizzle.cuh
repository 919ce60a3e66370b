// Shared-memory tiles of bfloat16 rows, swizzled in 16-byte chunks so that no access conflicts.
//
// The 32 banks are 128 bytes wide, which is eight chunks. ldmatrix reads the same chunk column of
// eight consecutive rows; stored plainly, rows of 128 or 256 bytes put all eight in the same four
// banks. Exchanging chunk c of row r with chunk c ^ (r % 8) puts them in all 32, and still lets
// eight threads that copy along a row cover all the banks.
#pragma once

#include "bf16.cuh"
#include "cp_async.cuh"
#include "rows.cuh"

// Byte offset of a 16-byte chunk in a tile of `COLUMNS` values a row.
template <int COLUMNS>
__device__ __forceinline__ unsigned swizzled_offset(unsigned row, unsigned chunk) {
  constexpr int chunks_per_row = COLUMNS / kBf16PerVector;
  static_assert(chunks_per_row % 8 == 0, "the swizzle permutes groups of eight chunks");
  return (row * chunks_per_row + (chunk ^ (row % 8))) * kVectorBytes;
}

// How the threads of a CTA share a tile: in iteration i, chunk i * THREADS + threadIdx.x, row-major.
template <int ROWS, int COLUMNS, int THREADS>
struct TileCopy {
  enum : int {
    kChunksPerRow = COLUMNS / kBf16PerVector,
    kRowsPerIteration = THREADS / kChunksPerRow,
    kIterations = ROWS / kRowsPerIteration,
  };
  static_assert(THREADS % kChunksPerRow == 0, "an iteration copies whole rows");
  static_assert(ROWS % kRowsPerIteration == 0, "the last iteration is a whole one");

  __device__ static int row(int i) { return i * kRowsPerIteration + threadIdx.x / kChunksPerRow; }
  __device__ static int chunk() { return threadIdx.x % kChunksPerRow; }
};

// Start the copy of rows first .. first + ROWS - 1 to a tile; rows that do not exist become zeros.
template <int ROWS, int COLUMNS, int THREADS>
__device__ __forceinline__ void load_tile_async(unsigned tile, const Rows<const bf16>& source,
                                                int first) {
  using Copy = TileCopy<ROWS, COLUMNS, THREADS>;
  const bf16* thread_source = source.row(first + Copy::row(0)) + Copy::chunk() * kBf16PerVector;
#pragma unroll
  for (int i = 0; i < Copy::kIterations; ++i) {
    cp_async_16(tile + swizzled_offset<COLUMNS>(Copy::row(i), Copy::chunk()),
                thread_source + i * Copy::kRowsPerIteration * source.stride,
                first + Copy::row(i) < source.count ? kVectorBytes : 0);
  }
}

// Write a tile to rows first .. first + ROWS - 1, 16 bytes a thread; only rows that exist.
template <int ROWS, int COLUMNS, int THREADS>
__device__ __forceinline__ void store_tile(const Rows<bf16>& target, int first, const char* tile) {
  using Copy = TileCopy<ROWS, COLUMNS, THREADS>;
  bf16* thread_target = target.row(first + Copy::row(0)) + Copy::chunk() * kBf16PerVector;
#pragma unroll
  for (int i = 0; i < Copy::kIterations; ++i) {
    if (first + Copy::row(i) < target.count) {
      const char* chunk = tile + swizzled_offset<COLUMNS>(Copy::row(i), Copy::chunk());
      *reinterpret_cast<uint4*>(thread_target + i * Copy::kRowsPerIteration * target.stride) =
          *reinterpret_cast<const uint4*>(chunk);
    }
  }
}
