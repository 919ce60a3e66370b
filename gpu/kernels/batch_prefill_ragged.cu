// Attention of ragged queries to ragged K and V: requests of any lengths, without padding.
//
// q, o [rows, heads, d] and k, v [keys, kv_heads, d]: those of request b begin at qo_indptr[b] and
// kv_indptr[b]. lse [rows, heads] float32, natural logarithm; o = 0 and -inf for queries without keys.
// Grid (items of the plan, kv_heads), 128 threads; build options: batch_attention.cuh.
#include "batch_attention.cuh"

extern "C" __global__ void __launch_bounds__(kThreads)
    batch_prefill_ragged(const __grid_constant__ BatchArguments a) {
  const int request = a.requests[blockIdx.x];
  if (request < 0) return;
  const RaggedQueries queries(a, request);
  const RaggedKeys keys(a.kv_indptr, request, a.kv_heads, blockIdx.y);
  batch_attention(a, queries, keys, request);
}
