// Floats in global memory that tell their reader whether they have been written: the lowest bit of each is a tag, and
// every use of the memory has the other tag than the use before. The writer just stores `tagged` values, without fence
// or counter, and a reader has them one trip to L2 later. A tag costs at most one unit in the last place; an infinity
// may become a NaN.
//
// A value of two uses ago has the tag of the present one. A reader cannot get it once it has seen the use between, or if
// a launch has begun since; so whoever reads a place reads it at every use, up to its last one in the launch.
#pragma once
#include <cstdint>

namespace moss {

__device__ __forceinline__ float tagged(float value, uint32_t tag) {
  return __uint_as_float((__float_as_uint(value) & ~1u) | tag);
}

__device__ __forceinline__ void load_relaxed(float2& value, const float2* source) {
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "l"(source) : "memory");
}
__device__ __forceinline__ void load_relaxed(float4& value, const float4* source) {
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(source)
               : "memory");
}

// Bit 0 is set where a word has another tag.
__device__ __forceinline__ uint32_t differs(const float2& value, uint32_t tag) {
  return (__float_as_uint(value.x) ^ tag) | (__float_as_uint(value.y) ^ tag);
}
__device__ __forceinline__ uint32_t differs(const float4& value, uint32_t tag) {
  return differs(make_float2(value.x, value.y), tag) | differs(make_float2(value.z, value.w), tag);
}

// Loads value[i][s] from `source(i, s)` until all have the tag. All loads of a round are in flight at once; slices
// that are there are not asked for again.
template <typename Value, int COUNT, int SLICES, typename Source>
__device__ __forceinline__ void load_tagged(Value (&value)[COUNT][SLICES], uint32_t tag, Source&& source) {
  const auto load = [&](int s) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      load_relaxed(value[i][s], source(i, s));
  };
#pragma unroll
  for (int s = 0; s < SLICES; ++s)
    load(s);
  for (;;) {
    bool missing[SLICES], any = false;
#pragma unroll
    for (int s = 0; s < SLICES; ++s) {
      uint32_t bits = 0;
#pragma unroll
      for (int i = 0; i < COUNT; ++i)
        bits |= differs(value[i][s], tag);
      missing[s] = bits & 1;
      any = any || missing[s];
    }
    if (!any) return;
#pragma unroll
    for (int s = 0; s < SLICES; ++s)
      if (missing[s]) load(s);
  }
}

}  // namespace moss
