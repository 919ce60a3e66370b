// Merging attention states: attention to several sets of keys, as attention to all of them.
//
// A state is an output o, normalised, and its lse, the natural logarithm of the sum of exponentials
// over its keys. Without keys lse is -inf and o is anything: it is never read. The keys may have
// been split over CTAs (split-KV), over a shared prefix and the rest (cascade), or over machines
// (ring attention): their states merge the same.
//
// A warp merges the states of one head of one row, a "pair". All tensors are contiguous; lse is
// float32. Compile with -DHEAD_DIM, a multiple of 64, and -DOUTPUT, the element type of merged
// outputs: Float32, BFloat16 or Float16. With -DSTATE, that of states, for all kernels but
// merge_states_variable; with -DINDEX, the type of merge_indptr, int or long long, for that one.
#include "head_vectors.cuh"
#include "softmax.cuh"
#include "warp.cuh"

enum : int {
  kHeadDim = HEAD_DIM,
  kThreads = 128,
  kWarps = kThreads / kWarpSize,
};
using OutputBits = OUTPUT::Bits;

// The states of a pair that were added so far; a lane holds its share of the output. ELEMENT is the
// type of the states.
template <typename ELEMENT>
struct Merged {
  using Lanes = HeadLanes<kHeadDim, (sizeof(typename ELEMENT::Bits) > sizeof(OutputBits)
                                         ? sizeof(typename ELEMENT::Bits)
                                         : sizeof(OutputBits))>;

  float maximum;  // LSE: the largest of all states that are going to be added
  float total = 0.0f;
  float output[Lanes::kChunks][Lanes::kVector];

  __device__ __forceinline__ explicit Merged(float largest) : maximum(largest) {
#pragma unroll
    for (int chunk = 0; chunk < Lanes::kChunks; ++chunk) {
#pragma unroll
      for (int i = 0; i < Lanes::kVector; ++i) {
        output[chunk][i] = -0.0f;  // to which -0 can be added and stay -0
      }
    }
  }

  // The weight is e^(lse - maximum). The difference comes before the product with log2 e, so that
  // the largest weight is exactly 1, and a state that is alone comes out bit for bit as it went in.
  template <typename STORED>
  __device__ __forceinline__ void add(const typename STORED::Bits* o, float lse) {
    constexpr float log2_e = 0x1.715476p+0f;
    if (lse == negative_infinity()) return;
    const float weight = exp2_polynomial(__fmul_rn(__fsub_rn(lse, maximum), log2_e));
    total = __fadd_rn(total, weight);
#pragma unroll
    for (int chunk = 0; chunk < Lanes::kChunks; ++chunk) {
      float x[Lanes::kVector];
      load_values<STORED>(x, o + Lanes::first(chunk));
#pragma unroll
      for (int i = 0; i < Lanes::kVector; ++i) {
        output[chunk][i] = __fmaf_rn(weight, x[i], output[chunk][i]);
      }
    }
  }

  // The average times `scale`; zeros if no state had keys.
  __device__ __forceinline__ void store_output(OutputBits* o, float scale) const {
#pragma unroll
    for (int chunk = 0; chunk < Lanes::kChunks; ++chunk) {
      float x[Lanes::kVector];
#pragma unroll
      for (int i = 0; i < Lanes::kVector; ++i) {
        x[i] = __fmul_rn(softmax_output(output[chunk][i], total), scale);
      }
      store_values<OUTPUT>(o + Lanes::first(chunk), x);
    }
  }

  // NaN if an LSE was; -inf, as the maximum is, if no state had keys.
  __device__ __forceinline__ float lse() const {
    constexpr float ln2 = 0x1.62e430p-1f;
    const float merged = __fmaf_rn(log2_polynomial(total), ln2, maximum);
    return total >= 0.0f ? merged : total;
  }

  __device__ __forceinline__ void store(OutputBits* o, float* lse_out, long long pair,
                                        float scale = 1.0f) const {
    store_output(o + pair * kHeadDim, scale);
    if (threadIdx.x % kWarpSize == 0) lse_out[pair] = lse();
  }
};

// 64 bits, here and in every offset: tensors can exceed 2^31 values.
__device__ __forceinline__ long long warp_pair() {
  return static_cast<long long>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
}

// Merge states that lie as [states, heads, d], from state `first` to before `end`.
template <typename ELEMENT>
__device__ __forceinline__ void merge_range(const typename ELEMENT::Bits* partial_o,
                                            const float* partial_lse, OutputBits* o, float* lse,
                                            long long pair, int heads, long long first,
                                            long long end, float scale = 1.0f) {
  const long long head = pair % heads;
  float maximum = negative_infinity();
#pragma unroll 1
  for (long long state = first; state < end; ++state) {
    maximum = fmaxf(maximum, partial_lse[state * heads + head]);
  }
  Merged<ELEMENT> merged(maximum);
#pragma unroll 1
  for (long long state = first; state < end; ++state) {
    const long long place = state * heads + head;
    merged.template add<ELEMENT>(partial_o + place * kHeadDim, partial_lse[place]);
  }
  merged.store(o, lse, pair, scale);
}

#ifdef STATE
using StateBits = STATE::Bits;

// o_a, o_b [rows, heads, d], lse_a, lse_b [rows, heads] give o, lse of the same shapes.
extern "C" __global__ void __launch_bounds__(kThreads)
    merge_state(const StateBits* o_a, const float* lse_a, const StateBits* o_b, const float* lse_b,
                OutputBits* o, float* lse, long long pairs) {
  const long long pair = warp_pair();
  if (pair >= pairs) return;
  const float a = lse_a[pair], b = lse_b[pair];
  Merged<STATE> merged(fmaxf(a, b));
  merged.add<STATE>(o_a + pair * kHeadDim, a);
  merged.add<STATE>(o_b + pair * kHeadDim, b);
  merged.store(o, lse, pair);
}

// Merge o_other, lse_other into o, lse. Rows whose mask is 0 are not touched; the mask [rows] may
// be null, for all rows.
extern "C" __global__ void __launch_bounds__(kThreads)
    merge_state_in_place(OutputBits* o, float* lse, const StateBits* o_other,
                         const float* lse_other, const unsigned char* mask, long long pairs,
                         int heads) {
  const long long pair = warp_pair();
  if (pair >= pairs) return;
  if (mask != nullptr && mask[pair / heads] == 0) return;
  const float own = lse[pair], other = lse_other[pair];
  Merged<STATE> merged(fmaxf(own, other));
  merged.add<OUTPUT>(o + pair * kHeadDim, own);
  merged.add<STATE>(o_other + pair * kHeadDim, other);
  __syncwarp();  // every lane has read lse
  merged.store(o, lse, pair);
}

// partial_o [rows, states, heads, d], partial_lse [rows, states, heads] give o, lse.
extern "C" __global__ void __launch_bounds__(kThreads)
    merge_states(const StateBits* partial_o, const float* partial_lse, OutputBits* o, float* lse,
                 long long pairs, int heads, int states) {
  const long long pair = warp_pair();
  if (pair >= pairs) return;
  const long long first = pair / heads * states;
  merge_range<STATE>(partial_o, partial_lse, o, lse, pair, heads, first, first + states);
}

#endif

#ifdef INDEX
// partial_o [partial rows, heads, d], partial_lse [partial rows, heads], float32: the states of row
// r are merge_indptr[r] to before merge_indptr[r + 1], maybe none. o is multiplied by v_scale.
extern "C" __global__ void __launch_bounds__(kThreads)
    merge_states_variable(const float* partial_o, const float* partial_lse,
                          const INDEX* merge_indptr, OutputBits* o, float* lse, long long pairs,
                          int heads, float v_scale) {
  const long long pair = warp_pair();
  if (pair >= pairs) return;
  const long long row = pair / heads;
  merge_range<Float32>(partial_o, partial_lse, o, lse, pair, heads, merge_indptr[row],
                       merge_indptr[row + 1], v_scale);
}
#endif
