// Where the keys of a request lie: rows of a block-sparse matrix, or one after the other.
//
// A tensor of K or V is seen as rows of head vectors, row `number(key)` times the head dimension
// from its start, so that K and V of different head dimensions share the numbers. Numbers have 64
// bits: caches exceed 2^31 values.
#pragma once

#ifdef INDEX_64
using index = long long;
#else
using index = int;
#endif

// K and V [total, kv_heads, head dimension], the requests' keys without gaps.
struct RaggedKeys {
  long long start;
  int kv_len, kv_heads, kv_head;

  __device__ __forceinline__ RaggedKeys(const index* indptr, int request, int heads, int head)
      : start(indptr[request]),
        kv_len(static_cast<int>(indptr[request + 1] - start)),
        kv_heads(heads),
        kv_head(head) {}

  __device__ __forceinline__ long long number(int key) const {
    return (start + key) * kv_heads + kv_head;
  }
};

// K and V in blocks (pages) of `block_size` keys, which `indices` names in order.
// NHD: [blocks, block_size, kv_heads, head dimension]; -DKV_HND=1: [blocks, kv_heads, block_size, ..].
struct BlockKeys {
  const index* blocks;
  int kv_len, block_size, kv_heads, kv_head;

  __device__ __forceinline__ BlockKeys(const index* indptr, const index* indices,
                                       const index* last_block_len, int size, int request,
                                       int heads, int head)
      : block_size(size), kv_heads(heads), kv_head(head) {
    const index first = indptr[request];
    const index count = indptr[request + 1] - first;
    blocks = indices + first;
    // What a request without blocks has as its last length is anything.
    kv_len = count > 0 ? static_cast<int>((count - 1) * size + last_block_len[request]) : 0;
  }

  __device__ __forceinline__ long long number(int key) const {
    const int in_order = key / block_size;
    const int offset = key - in_order * block_size;
    const long long block = blocks[in_order];
#ifdef KV_HND
    return (block * kv_heads + kv_head) * block_size + offset;
#else
    return (block * block_size + offset) * kv_heads + kv_head;
#endif
  }
};
