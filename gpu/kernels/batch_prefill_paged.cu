// Attention of ragged queries to K and V in pages, as an engine with continuous batching has them.
//
// q, o [rows, heads, d], the queries of request b from qo_indptr[b] on; k, v [pages, page, kv_heads,
// d] (or heads before page with -DKV_HND), those of request b in the pages that kv_indices names from
// kv_indptr[b] on, of which the last one holds kv_last_len[b] keys. lse [rows, heads] float32,
// natural logarithm; o = 0 and -inf for queries without keys.
// Grid (items of the plan, kv_heads), 128 threads; build options: batch_attention.cuh.
#include "batch_attention.cuh"

extern "C" __global__ void __launch_bounds__(kThreads)
    batch_prefill_paged(const __grid_constant__ BatchArguments a) {
  const int request = a.requests[blockIdx.x];
  if (request < 0) return;
  const RaggedQueries queries(a, request);
  const BlockKeys keys(a.kv_indptr, a.kv_indices, a.kv_last_len, a.block_size, request, a.kv_heads,
                       blockIdx.y);
  batch_attention(a, queries, keys, request);
}
