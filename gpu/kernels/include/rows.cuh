// The rows of one head in a [batch, length, heads, head dimension] tensor of global memory.
#pragma once

// `stride` values from the start of one row to that of the next; `count` rows exist.
template <typename ELEMENT>
struct Rows {
  ELEMENT* data;
  long long stride;
  int count;

  // Row `row`, which must exist to be accessed; 64 bits, as tensors can exceed 2^31 values.
  __device__ __forceinline__ ELEMENT* row(int row) const { return data + row * stride; }
};

template <int HEAD_SIZE, typename ELEMENT>
__device__ __forceinline__ Rows<ELEMENT> head_rows(ELEMENT* tensor, int batch, int length,
                                                   int heads, int head) {
  const long long stride = static_cast<long long>(heads) * HEAD_SIZE;
  return {tensor + batch * (length * stride) + head * HEAD_SIZE, stride, length};
}
