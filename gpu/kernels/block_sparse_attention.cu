// Attention through a block-sparse matrix: block row b of `block_rows` queries sees the blocks of
// `block_size` keys that kv_indices names from kv_indptr[b] on, in their order.
//
// q, o [rows, heads, d]; k, v [keys, kv_heads, d], keys in whole blocks. Bits of a custom mask, if
// there is one, are those of the blocks, of each block row a matrix of queries x keys.
// Grid (items of the plan, kv_heads), 128 threads; build options: batch_attention.cuh.
#include "batch_attention.cuh"

extern "C" __global__ void __launch_bounds__(kThreads)
    block_sparse_attention(const __grid_constant__ BatchArguments a) {
  const int request = a.requests[blockIdx.x];
  if (request < 0) return;
  const BlockRowQueries queries(a, request);
  const BlockKeys keys(a.kv_indptr, a.kv_indices, a.kv_last_len, a.block_size, request, a.kv_heads,
                       blockIdx.y);
  batch_attention(a, queries, keys, request);
}
