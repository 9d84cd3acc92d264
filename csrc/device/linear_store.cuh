// How linears give away the sums of a tile, laid out as wgmma.cuh says.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

#include "device/bulk_copy.cuh"
#include "device/mma.cuh"
#include "device/wgmma.cuh"

namespace moss {

// As the Triton kernel for few rows computes it, to the bit.
__device__ __forceinline__ float gated(float gate, float up) {
  float quotient;
  asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(gate), "f"(1.0f + exp2_approx(-gate * 1.4426950408889634f)));
  return quotient * up;
}

// Where a thread's sums belong: rows `row` and row + 8, in each 8 columns from `column` on the thread's two.
struct Place {
  int64_t rows;
  int outputs, column, quarter;
  int64_t row;

  template <typename Params>
  __device__ __forceinline__ Place(const Params& params, int first_row, int first_column)
      : rows(params.rows), outputs(params.outputs), column(first_column), quarter(threadIdx.x % 4) {
    row = first_row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  }
  // Of the two sums of `block`, 8 columns, in the lower or upper row.
  __device__ __forceinline__ int64_t offset(int block, int half) const {
    return (row + 8 * half) * outputs + column + 8 * block + 2 * quarter;
  }
};

// The pairs of sums of four blocks of 8 columns, `block` the first, as bf16, or what the gate makes of each and a zero;
// what lies beyond the tile is zero. Lane q of four gets all of block + q.
template <int N, bool GATE>
__device__ __forceinline__ uint4 gather(const float (&sum)[N / 2], int block, int half) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* pair = &sum[4 * (block + i) + 2 * half];
    const auto pack = [&] { return GATE ? pack_bf16(gated(pair[0], pair[1]), 0) : pack_bf16(pair[0], pair[1]); };
    words[i] = block + i < N / 8 ? pack() : 0;
  }
  transpose_quad(words);
  return {words[0], words[1], words[2], words[3]};
}

// KEPT: in L2, whatever streams through it.
template <bool KEPT>
__device__ __forceinline__ void put(void* target, uint2 words) {
  if constexpr (KEPT)
    asm volatile("st.global.L2::cache_hint.v2.b32 [%0], {%1, %2}, %3;" ::"l"(target), "r"(words.x), "r"(words.y),
                 "l"(policy_evict_last())
                 : "memory");
  else
    *static_cast<uint2*>(target) = words;
}
template <bool KEPT>
__device__ __forceinline__ void put(void* target, uint4 words) {
  if constexpr (KEPT)
    asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(target), "r"(words.x),
                 "r"(words.y), "r"(words.z), "r"(words.w), "l"(policy_evict_last())
                 : "memory");
  else
    *static_cast<uint4*>(target) = words;
}

// The sums as bf16, whole or gated, of which there are half as many.
template <int N, bool GATE, bool KEPT = false>
__device__ __forceinline__ void store(const float (&sum)[N / 2], const Place& place, __nv_bfloat16* out) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = place.row + 8 * half;
#pragma unroll
    for (int block = 0; block < N / 8; block += 4) {
      const int mine = block + place.quarter, column = place.column + 8 * mine;
      const bool inside = mine < N / 8 && row < place.rows && column < place.outputs;
      __nv_bfloat16* const target = out + (row * place.outputs + column) / (GATE ? 2 : 1);
      const uint4 words = gather<N, GATE>(sum, block, half);
      if constexpr (GATE) {
        const uint2 packed = {__byte_perm(words.x, words.y, 0x5410), __byte_perm(words.z, words.w, 0x5410)};
        if (inside) put<KEPT>(target, packed);
      } else {
        if (inside) put<KEPT>(target, words);
      }
    }
  }
}

// The sums as they are, of a slice. One instruction a store or two: this runs once, from a cold instruction cache.
template <int N, bool KEPT = false>
__device__ __forceinline__ void store_slice(const float (&sum)[N / 2], const Place& place, float* out) {
  const int room = place.outputs - place.column - 2 * place.quarter;
  const uint64_t policy = policy_evict_last();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (place.row + 8 * half >= place.rows) return;
    float* const row = out + place.offset(0, half);
#pragma unroll
    for (int block = 0; block < N / 8; ++block) {
      const float* pair = &sum[4 * block + 2 * half];
      if (8 * block >= room) continue;
      if constexpr (KEPT)
        asm volatile("st.global.L2::cache_hint.v2.f32 [%0], {%1, %2}, %3;" ::"l"(row + 8 * block), "f"(pair[0]),
                     "f"(pair[1]), "l"(policy)
                     : "memory");
      else
        *reinterpret_cast<float2*>(row + 8 * block) = {pair[0], pair[1]};
    }
  }
}

}  // namespace moss
