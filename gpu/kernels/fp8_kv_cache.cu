// The FP8 KV-cache record of DeepSeek V3.2, 656 bytes a token: written from and read to bfloat16.
//
//   bytes   0 .. 511  512 values without positional encoding, e4m3
//   bytes 512 .. 527  their scales, float32 powers of two, one for each 128 values
//   bytes 528 .. 655  64 values with rotary encoding (RoPE), bfloat16, unchanged
//
// A warp works on one token: lane i has the values 16 i .. 16 i + 15, so eight lanes share a scale.
// kv, out [tokens, 576] bfloat16; cache [tokens, 656] bytes. Grid (ceil(tokens / 4)), 128 threads.
#include "bf16.cuh"
#include "fp8.cuh"
#include "warp.cuh"

enum : int {
  kThreads = 128,
  kTokensPerCta = kThreads / kWarpSize,
  kUnscaledValues = 64,  // RoPE
  kScaledValues = 512,
  kTokenValues = kScaledValues + kUnscaledValues,
  kValuesPerScale = 128,
  kValuesPerLane = kScaledValues / kWarpSize,
  kLanesPerScale = kValuesPerScale / kValuesPerLane,
  // Byte offsets in a record.
  kScaleOffset = kScaledValues,
  kRopeOffset = kScaleOffset + kScaledValues / kValuesPerScale * 4,
  kRecordBytes = kRopeOffset + kUnscaledValues * 2,
};
static_assert(kRecordBytes == 656, "a record of DeepSeek V3.2");
static_assert(kUnscaledValues == 2 * kWarpSize, "a lane copies one pair of RoPE values");
static_assert(kValuesPerLane == 2 * kBf16PerVector, "a lane has two 16-byte vectors of bfloat16");

// The token of this warp.
__device__ __forceinline__ int warp_token() {
  return blockIdx.x * kTokensPerCta + threadIdx.x / kWarpSize;
}

// The lane's 16 values: two 16-byte loads.
__device__ __forceinline__ void load_values(float (&x)[2][kBf16PerVector], const bf16* token,
                                            int lane) {
  const uint4* vectors = reinterpret_cast<const uint4*>(token) + 2 * lane;
#pragma unroll
  for (int i = 0; i < 2; ++i) bf16x8_to_float(vectors[i], x[i]);
}

// The scale that the lane's eight lanes share: the power of two at or above amax / 448, the largest
// e4m3 value, and never below 1e-4, so that zeros have one too.
__device__ __forceinline__ float shared_scale(const float (&x)[2][kBf16PerVector]) {
  constexpr float largest = 448.0f;
  constexpr float smallest_ratio = 1e-4f;
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < kBf16PerVector; ++j) amax = fmaxf(amax, fabsf(x[i][j]));
  }
#pragma unroll
  for (int distance = 1; distance < kLanesPerScale; distance *= 2) {
    amax = fmaxf(amax, shuffle_xor(amax, distance));
  }
  return round_up_to_power_of_two(fmaxf(__fdiv_rn(amax, largest), smallest_ratio));
}

// Four codes, in one word, as four bfloat16 in two.
__device__ __forceinline__ uint2 dequantize(unsigned codes, float scale) {
  float x[4];
  e4m3x2_to_floats(static_cast<unsigned short>(codes), x[0], x[1]);
  e4m3x2_to_floats(static_cast<unsigned short>(codes >> 16), x[2], x[3]);
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = __fmul_rn(x[i], scale);
  return make_uint2(floats_to_bf16x2(x[0], x[1]), floats_to_bf16x2(x[2], x[3]));
}

extern "C" __global__ void __launch_bounds__(kThreads)
    fp8_kv_quantize(const bf16* kv, unsigned char* cache, int tokens) {
  const int lane = threadIdx.x % kWarpSize;
  const long long token = warp_token();
  if (token >= tokens) return;
  const bf16* source = kv + token * kTokenValues;
  unsigned char* record = cache + token * kRecordBytes;

  float x[2][kBf16PerVector];
  load_values(x, source, lane);
  const float scale = shared_scale(x);
  // Exact for a power of two; with an infinite scale it gives what x / scale would.
  const float inverse_scale = __fdiv_rn(1.0f, scale);
  const uint2 first = floats_to_e4m3x8(x[0], inverse_scale);
  const uint2 second = floats_to_e4m3x8(x[1], inverse_scale);
  reinterpret_cast<uint4*>(record)[lane] = make_uint4(first.x, first.y, second.x, second.y);

  if (lane % kLanesPerScale == 0) {
    reinterpret_cast<float*>(record + kScaleOffset)[lane / kLanesPerScale] = scale;
  }
  reinterpret_cast<unsigned*>(record + kRopeOffset)[lane] =
      reinterpret_cast<const unsigned*>(source + kScaledValues)[lane];
}

extern "C" __global__ void __launch_bounds__(kThreads)
    fp8_kv_dequantize(const unsigned char* cache, bf16* out, int tokens) {
  const int lane = threadIdx.x % kWarpSize;
  const long long token = warp_token();
  if (token >= tokens) return;
  const unsigned char* record = cache + token * kRecordBytes;
  bf16* target = out + token * kTokenValues;

  const uint4 codes = reinterpret_cast<const uint4*>(record)[lane];
  const float scale = reinterpret_cast<const float*>(record + kScaleOffset)[lane / kLanesPerScale];
  const unsigned words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint2 low = dequantize(words[2 * i], scale);
    const uint2 high = dequantize(words[2 * i + 1], scale);
    reinterpret_cast<uint4*>(target)[2 * lane + i] = make_uint4(low.x, low.y, high.x, high.y);
  }
  reinterpret_cast<unsigned*>(target + kScaledValues)[lane] =
      reinterpret_cast<const unsigned*>(record + kRopeOffset)[lane];
}
