// Interleaved rotary embedding of a few consecutive values.
#pragma once
#include "vector.cuh"

namespace moss {

// Rotates neighbouring pairs in fp32 without contraction and rounds once. `cos_sin`: cosine and sine of each pair.
template <typename T, int N>
__device__ __forceinline__ Vector<T, N> rotate(Vector<T, N> x, const float* cos_sin) {
  constexpr int kAngles = 4;
#pragma unroll
  for (int i = 0; i < N; i += kAngles) {
    const auto angles = Vector<float, kAngles>::load(cos_sin + i);
#pragma unroll
    for (int j = 0; j < kAngles; j += 2) {
      const float even = to_float(x.value[i + j]), odd = to_float(x.value[i + j + 1]);
      const float c = angles.value[j], s = angles.value[j + 1];
      x.value[i + j] = from_float<T>(__fsub_rn(__fmul_rn(even, c), __fmul_rn(odd, s)));
      x.value[i + j + 1] = from_float<T>(__fadd_rn(__fmul_rn(even, s), __fmul_rn(odd, c)));
    }
  }
  return x;
}

}  // namespace moss
