// What one step of attention works on: a tile of query rows and a tile of keys and values.
#pragma once

#include "variant.cuh"

// A packed row of a tile: query `row` of the request in `head`; `state`: row of its partial state.
struct RowPlace {
  int row, head;
  float slope, sink;
  long long state;
};

// What one step of a tile works on.
struct Step {
  const char* queries;
  const char* keys;
  const char* values;
  const RowPlace (&rows)[TILE_Q];
  const unsigned long long* custom_bits;  // of each query row from `first_row` on
  const VariantArguments& variant;
  int request, q_len, kv_len;
  int first_row;
  int first_key, stop;  // of the tile; of the chunk
  float scale, factor;
  bool sees_all;  // every row sees every key of the tile
  bool is_first;

  // The logit of key `offset` of the tile, -inf if the row does not see it.
  __device__ __forceinline__ float logit(float score, const RowPlace& row, int offset) const {
    const Place at = {request, row.head, row.row, first_key + offset, q_len, kv_len};
    const float transformed = transform_score(variant, score, scale, row.slope, at);
    if (sees_all) return transformed;
    bool custom = true;
    if (CUSTOM_MASK && row.row < q_len) custom = custom_bits[row.row - first_row] >> offset & 1;
    return at.key < stop && is_visible(variant, at, custom) ? transformed : negative_infinity();
  }
};
