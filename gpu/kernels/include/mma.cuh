// Tensor-core products of one warp: 16 x 8 += 16 x 16 times 16 x 8, 16-bit floats in, float32 out.
//
// Fragments, for lane = 4 * group + member (PTX ISA, "Matrix fragments for mma.m16n8k16"):
//   A, 16 x 16: register r has columns 2 * member + {0, 1} + 8 * (r / 2) of row group + 8 * (r % 2)
//   B, 16 x 8:  register r has rows 2 * member + {0, 1} + 8 * r of column group
//   C, 16 x 8:  values 0, 1 are columns 2 * member + {0, 1} of row group; values 2, 3 of row group
//   + 8
#pragma once

#include "bf16.cuh"

struct FragmentA {
  unsigned x[4];
};
struct FragmentB {
  unsigned x[2];
};

// The coordinates of a lane within accumulators.
struct FragmentLane {
  int group, member;
  __device__ __forceinline__ FragmentLane()
      : group(threadIdx.x % 32 / 4), member(threadIdx.x % 4) {}
  __device__ __forceinline__ int row(int half) const { return group + 8 * half; }
  __device__ __forceinline__ int column(int tile) const { return 8 * tile + 2 * member; }
};

// ldmatrix.x4: lanes 8i .. 8i+7 give the addresses of the eight 16-byte rows of matrix i; each lane
// gets the pair at row lane / 4, columns 2 * (lane % 4) + {0, 1} of every matrix.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&x)[4], unsigned shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared)
               : "memory");
}

// ldmatrix.x4.trans: the same, of the transposed matrices.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&x)[4], unsigned shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared)
               : "memory");
}

// mma.sync.m16n8k16: c += a * b.
__device__ __forceinline__ void mma_bf16(float (&c)[4], const FragmentA& a, const FragmentB& b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x[0]), "r"(b.x[1]));
}

// The same for float16 inputs.
__device__ __forceinline__ void mma_fp16(float (&c)[4], const FragmentA& a, const FragmentB& b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x[0]), "r"(b.x[1]));
}
