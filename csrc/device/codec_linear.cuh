// What the kernels of codec_linear share: a row's inputs as operands of a product, and the moments of a LayerNorm.
#pragma once
#include "mma.cuh"

namespace moss::codec_linear {

using bf16 = __nv_bfloat16;

constexpr float kNormEps = 1e-5f;

// Sum and sum of squares of a row's inputs.
struct Moments {
  float sum, squares;

  __device__ __forceinline__ void add(float2 x) {
    sum += x.x + x.y;
    squares = fmaf(x.x, x.x, fmaf(x.y, x.y, squares));
  }
};

// Eight inputs of a row as they are stored.
template <typename X>
struct Inputs;

template <>
struct Inputs<bf16> {
  uint4 words;

  __device__ __forceinline__ void load(const bf16* x) { words = __ldcg(reinterpret_cast<const uint4*>(x)); }
  __device__ __forceinline__ void clear() { words = {}; }
  template <bool NORM>
  __device__ __forceinline__ uint4 operand(const uint4& norm_weight, Moments& moments) const {
    if constexpr (!NORM) return words;
    const uint32_t x[4] = {words.x, words.y, words.z, words.w};
    const uint32_t g[4] = {norm_weight.x, norm_weight.y, norm_weight.z, norm_weight.w};
    uint32_t y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      moments.add(unpack_bf16(x[i]));
      const __nv_bfloat162 product = __hmul2(reinterpret_cast<const __nv_bfloat162&>(x[i]),
                                             reinterpret_cast<const __nv_bfloat162&>(g[i]));
      y[i] = reinterpret_cast<const uint32_t&>(product);
    }
    return {y[0], y[1], y[2], y[3]};
  }
};

template <>
struct Inputs<float> {
  float4 low, high;

  __device__ __forceinline__ void load(const float* x) {
    low = __ldcg(reinterpret_cast<const float4*>(x));
    high = __ldcg(reinterpret_cast<const float4*>(x) + 1);
  }
  __device__ __forceinline__ void clear() { low = high = {}; }
  template <bool NORM>
  __device__ __forceinline__ uint4 operand(const uint4& norm_weight, Moments& moments) const {
    const float2 x[4] = {{low.x, low.y}, {low.z, low.w}, {high.x, high.y}, {high.z, high.w}};
    const uint32_t g[4] = {norm_weight.x, norm_weight.y, norm_weight.z, norm_weight.w};
    uint32_t y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 scale = NORM ? unpack_bf16(g[i]) : float2{1.0f, 1.0f};
      if constexpr (NORM) moments.add(x[i]);
      y[i] = pack_bf16(x[i].x * scale.x, x[i].y * scale.y);
    }
    return {y[0], y[1], y[2], y[3]};
  }
};

__device__ __forceinline__ float gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678f)); }

// The LayerNorm of a product of rows that were not normalised: of `total` over `inputs`, and the sums of the weights.
__device__ __forceinline__ float2 normalise(float2 y, const Moments& total, int inputs, float2 weight_sum,
                                            float2 bias_sum) {
  const float mean = total.sum / inputs;
  const float factor = rsqrtf(fmaxf(total.squares / inputs - mean * mean, 0.0f) + kNormEps);
  return {(y.x - mean * weight_sum.x) * factor + bias_sum.x, (y.y - mean * weight_sum.y) * factor + bias_sum.y};
}

}  // namespace moss::codec_linear
