// Loads and stores of a few consecutive elements at once, and conversions to and from float.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace moss {

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }

// Round to nearest even.
template <typename T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float value) {
  return __float2half_rn(value);
}

// N elements that are moved by one access; N * sizeof(T) is a power of two, at most 16.
template <typename T, int N>
struct alignas(N * sizeof(T)) Vector {
  T value[N];

  static __device__ __forceinline__ Vector load(const T* pointer) { return *reinterpret_cast<const Vector*>(pointer); }
  __device__ __forceinline__ void store(T* pointer) const { *reinterpret_cast<Vector*>(pointer) = *this; }
};

}  // namespace moss
