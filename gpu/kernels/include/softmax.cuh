// Softmax arithmetic whose every bit is defined: base-2 exponential and logarithm as polynomials in
// fused multiply-adds, and the shift and scale of online softmax.
#pragma once

enum : int {
  kExponentBias = 127,
  kMantissaBits = 23,
  // Bits of sqrt(1/2): subtracting them from those of x gives log2's exponent for mantissas in
  // [sqrt(1/2), sqrt(2)), where the series converges fastest.
  kSqrtHalfBits = 0x3f3504f3,
};

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }

// Polynomial by Horner's rule in fused multiply-adds.
template <int TERMS>
__device__ __forceinline__ float horner(const float (&coefficients)[TERMS], float x) {
  float sum = coefficients[TERMS - 1];
#pragma unroll
  for (int i = TERMS - 2; i >= 0; --i) sum = __fmaf_rn(sum, x, coefficients[i]);
  return sum;
}

// 2^x for x < 127.5; 0 for x < -126, NaN for NaN.
__device__ __forceinline__ float exp2_polynomial(float x) {
  // Minimax polynomial of 2^f on [-1/2, 1/2], lowest degree first.
  constexpr float coefficients[] = {
      0x1.000000p+0f, 0x1.62e430p-1f,  0x1.ebfbdcp-3f,  0x1.c6af7cp-5f,
      0x1.3b2de0p-7f, 0x1.5f082ep-10f, 0x1.416b5ep-13f,
  };
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the sum.
  constexpr float round_to_integer = 0x1.8p+23f;
  constexpr float smallest = -126.0f;  // below it the result would be subnormal

  const float shifted = __fadd_rn(x, round_to_integer);
  const float integer = __fsub_rn(shifted, round_to_integer);
  const float fraction = __fsub_rn(x, integer);
  const float power = __uint_as_float((__float_as_uint(shifted) + kExponentBias) << kMantissaBits);
  const float result = __fmul_rn(horner(coefficients, fraction), power);
  return x < smallest ? 0.0f : result;
}

// log2(x) for normal x > 0.
__device__ __forceinline__ float log2_polynomial(float x) {
  // 2 / (ln 2 (2i + 1)): the series of log2((1 + s) / (1 - s)) / s in s^2.
  constexpr float coefficients[] = {
      0x1.715476p+1f, 0x1.ec709ep-1f, 0x1.2776c6p-1f, 0x1.a61762p-2f, 0x1.484b14p-2f,
  };
  const int bits = __float_as_int(x);
  const int exponent = (bits - kSqrtHalfBits) >> kMantissaBits;
  const float mantissa = __int_as_float(bits - (exponent << kMantissaBits));
  const float s = __fdiv_rn(__fsub_rn(mantissa, 1.0f), __fadd_rn(mantissa, 1.0f));
  return __fmaf_rn(s, horner(coefficients, __fmul_rn(s, s)), static_cast<float>(exponent));
}

// What is subtracted in the exponent. A row that has seen no key has the maximum -inf; shifting by
// 0 instead keeps -inf - -inf, a NaN, from arising.
__device__ __forceinline__ float softmax_shift(float maximum) {
  return maximum == negative_infinity() ? 0.0f : maximum;
}

// 2^(score * scale - scaled_shift), with one rounding before the exponential.
__device__ __forceinline__ float softmax_weight(float score, float scale, float scaled_shift) {
  return exp2_polynomial(__fmaf_rn(score, scale, -scaled_shift));
}

// output / sum, and 0 for a row without keys, whose sum is 0; a NaN among the scores stays one. The
// operands are selected rather than the quotient, which would become a branch around every division.
__device__ __forceinline__ float softmax_output(float output, float sum) {
  const bool any_key = sum != 0.0f;
  return __fdiv_rn(any_key ? output : 0.0f, any_key ? sum : 1.0f);
}

// Natural logarithm of the sum of exponentials, from the scaled base-2 maximum and the sum relative
// to it; -inf for a row without keys, NaN for a sum that is NaN.
__device__ __forceinline__ float softmax_lse(float scaled_maximum, float sum) {
  constexpr float ln2 = 0x1.62e430p-1f;
  const float lse = __fmul_rn(__fadd_rn(scaled_maximum, log2_polynomial(sum)), ln2);
  if (sum > 0.0f) return lse;
  return sum == 0.0f ? negative_infinity() : sum;
}
