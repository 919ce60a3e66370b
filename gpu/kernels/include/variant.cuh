// What makes one attention of another: transform of the logits, mask, transform of the output.
//
// Chosen at compile time:
//   -DCAUSAL=1       a query sees no key after its own position (positions end in the bottom right)
//   -DWINDOW=1       nor keys more than `window_left` before it
//   -DCUSTOM_MASK=1  nor keys whose bit is 0
//   -DSOFT_CAP=1     logit = cap tanh(logit / cap)
//   -DALIBI=1        logit -= slope |position of the query - key|
//   -DSINK=1         a logit of each head that only the sum of weights sees: a key with the value 0
//   -DROPE=1         Q and K are rotated by their positions first (rope.cuh)
//   -DUSER_VARIANT=1 after all of these, the hooks of a `struct UserVariant : VariantHooks` (place.cuh),
//                    which comes before this file
#pragma once

#include "place.cuh"
#include "softmax.cuh"

#ifndef CAUSAL
#define CAUSAL 0
#endif
#ifndef WINDOW
#define WINDOW 0
#endif
#ifndef CUSTOM_MASK
#define CUSTOM_MASK 0
#endif
#ifndef SOFT_CAP
#define SOFT_CAP 0
#endif
#ifndef ALIBI
#define ALIBI 0
#endif
#ifndef SINK
#define SINK 0
#endif
#ifndef ROPE
#define ROPE 0
#endif
#ifndef USER_VARIANT
#define USER_VARIANT 0
#endif

// Whether scores become logits in natural units before the softmax, or stay raw and are scaled in
// its exponent.
enum : bool { kTransformsLogits = SOFT_CAP || ALIBI || SINK || USER_VARIANT };

// Tensors and numbers of the variant; what it has no use for is null or 0.
struct VariantArguments {
  const float* alibi_slopes;      // [heads]
  const float* sinks;             // [heads], natural units
  const unsigned char* mask;      // bits, row-major q_len x kv_len of each request, low bits first
  const long long* mask_indptr;   // [batch + 1]: bytes at which a request's bits begin
  const float* rope;              // [positions, head dimension]: cosines, then sines
  const float* values;            // of the user's variant
  int window_left;
  float soft_cap, soft_cap_inverse;
};

// tanh(x) as (1 - e) / (1 + e) with e = 2^(-2 log2(e) |x|): an absolute error of some 2^-24.
__device__ __forceinline__ float tanh_polynomial(float x) {
  constexpr float minus_two_log2_e = -0x1.715476p+1f;
  const float power = exp2_polynomial(__fmul_rn(minus_two_log2_e, fabsf(x)));
  const float size = __fdiv_rn(__fsub_rn(1.0f, power), __fadd_rn(1.0f, power));
  return x < 0.0f ? -size : size;
}

// Keys that a row at `position` sees without custom masks: first .. end - 1.
struct Band {
  int first, end;
  __device__ __forceinline__ Band(const VariantArguments& variant, int position, int kv_len) {
    first = WINDOW ? max(position - variant.window_left, 0) : 0;
    end = CAUSAL ? min(position + 1, kv_len) : kv_len;
  }
};

// `custom` is the bit of the custom mask.
__device__ __forceinline__ bool is_visible(const VariantArguments& variant, const Place& at,
                                           bool custom) {
  const Band band(variant, at.position(), at.kv_len);
  bool visible = at.key >= band.first && at.key < band.end && at.row < at.q_len;
  if (CUSTOM_MASK) visible = visible && custom;
#if USER_VARIANT
  visible = visible && UserVariant::visible(at, variant.values);
#endif
  return visible;
}

// A score q . k as what the softmax takes: raw, or a logit in natural units. `slope`: of ALiBi.
__device__ __forceinline__ float transform_score(const VariantArguments& variant, float score,
                                                 float scale, float slope, const Place& at) {
  if (!kTransformsLogits) return score;
  float logit = __fmul_rn(score, scale);
#if SOFT_CAP
  logit = __fmul_rn(variant.soft_cap, tanh_polynomial(__fmul_rn(logit, variant.soft_cap_inverse)));
#endif
#if ALIBI
  const float distance = static_cast<float>(abs(at.position() - at.key));
  logit = __fmaf_rn(slope, -distance, logit);
#endif
#if USER_VARIANT
  logit = UserVariant::logit(logit, at, variant.values);
#endif
  return logit;
}

__device__ __forceinline__ float transform_output(const VariantArguments& variant, float output,
                                                  const Place& at, int dimension) {
#if USER_VARIANT
  return UserVariant::output(output, at, dimension, variant.values);
#else
  return output;
#endif
}
