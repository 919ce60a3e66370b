// Attention of one query of each request to K and V in pages.
//
// q, o [batch, heads, d]; k, v and their tables as in batch_prefill_paged.cu. The heads that share a
// K/V head are the rows of a tile: on tensor cores 16 of them, on CUDA cores (-DCUDA_CORES=1) as many
// as there are, one without grouping.
// Grid (items of the plan, kv_heads), 128 threads; build options: batch_attention.cuh.
#include "batch_attention.cuh"

extern "C" __global__ void __launch_bounds__(kThreads)
    batch_decode(const __grid_constant__ BatchArguments a) {
  const int request = a.requests[blockIdx.x];
  if (request < 0) return;
  const OneQuery queries(a, request);
  const BlockKeys keys(a.kv_indptr, a.kv_indices, a.kv_last_len, a.block_size, request, a.kv_heads,
                       blockIdx.y);
  batch_attention(a, queries, keys, request);
}
