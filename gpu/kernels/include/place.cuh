// What variants of attention are functions of, and the hooks that a user's own variant may replace.
#pragma once

// One pair of a query and a key. `row` counts the queries of the request, `key` its keys.
struct Place {
  int request, head, row, key, q_len, kv_len;
  // Of the query among the keys: the last query stands at the last key.
  __device__ __forceinline__ int position() const { return row + kv_len - q_len; }
};

// What a user's variant may replace; all arguments are natural units. `values` is its own tensor.
struct VariantHooks {
  static __device__ __forceinline__ float logit(float logit, const Place&, const float*) {
    return logit;
  }
  static __device__ __forceinline__ bool visible(const Place&, const float*) { return true; }
  // Of the normalised output: the key of `place` is 0.
  static __device__ __forceinline__ float output(float output, const Place&, int, const float*) {
    return output;
  }
};
