// Dot products on CUDA cores: chains of fused multiply-adds (fma.rn.f32) in the operands' order.
#pragma once

// sum += a . b
__device__ __forceinline__ float fma_chain(float sum, const float4& a, const float4& b) {
  sum = __fmaf_rn(a.x, b.x, sum);
  sum = __fmaf_rn(a.y, b.y, sum);
  sum = __fmaf_rn(a.z, b.z, sum);
  return __fmaf_rn(a.w, b.w, sum);
}
