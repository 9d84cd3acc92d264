// What follows the product of a tile in the kernels of codec_linear for many rows, and how it leaves shared memory.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "device/mma.cuh"
#include "moss_kernels.h"

namespace moss {

// What follows the product.
enum Finish { kStore, kGelu, kResidual, kRotate };

// Stores a box of a matrix that tensor_map.h describes; what lies beyond the matrix is left out.
__device__ __forceinline__ void tensor_store(const CUtensorMap& map, int column, int row, uint32_t source) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(column),
               "r"(row), "r"(source)
               : "memory");
}

// Asks for this block's share of the weights, which no kernel writes.
__device__ __forceinline__ void prefetch_weights(const CodecLinearParams& params) {
  const int64_t bytes = static_cast<int64_t>(params.outputs) * params.inputs * 2;
  const int64_t share = (bytes / gridDim.x + 15) / 16 * 16, begin = share * blockIdx.x;
  if (begin >= bytes) return;
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(static_cast<const char*>(params.weight) + begin),
               "r"(static_cast<uint32_t>(min(share, bytes - begin))));
}

__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The exact GELU to 3e-5 + 3e-4 * |x|, a small part of the rounding of a bf16 as large as x: erf(x / sqrt 2) as the
// tanh of a polynomial that was fitted to it. Beyond 8 both are 1.
__device__ __forceinline__ float gelu_for_bf16(float x) {
  const float square = fminf(x * x, 64.0f), half = 0.5f * x;
  const float inner = x * fmaf(square, fmaf(square, -3.51516965e-4f, 3.70056633e-2f), 7.97507803e-1f);
  return fmaf(half, tanh_approx(inner), half);
}

// A pair of neighbouring columns as it is stored. `scale`: theirs; `old`: what its place holds.
template <Finish FINISH>
__device__ __forceinline__ uint32_t finish_pair(float2 sum, uint32_t scale, uint32_t old) {
  if (FINISH == kGelu) sum = {gelu_for_bf16(sum.x), gelu_for_bf16(sum.y)};
  if (FINISH == kResidual) {
    const float2 factor = unpack_bf16(scale), stream = unpack_bf16(old);
    sum = {fmaf(factor.x, sum.x, stream.x), fmaf(factor.y, sum.y, stream.y)};
  }
  return pack_bf16(sum.x, sum.y);
}

// The inverse of load_matrices.
__device__ __forceinline__ void store_matrices(const uint32_t (&words)[4], uint32_t address) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3]));
}

// The layer scales of the column pairs that a lane finishes, one of each eight columns.
template <Finish FINISH, int COUNT>
__device__ __forceinline__ void load_scales(uint32_t (&scale)[COUNT], const CodecLinearParams& params,
                                            int first_column) {
  if constexpr (FINISH == kResidual) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int column = first_column + 8 * i + 2 * (threadIdx.x % 4);
      if (column < params.outputs)
        scale[i] = *reinterpret_cast<const uint32_t*>(static_cast<const __nv_bfloat16*>(params.scale) + column);
    }
  }
}

// Finishes a warp's sums of 16 rows and 32 columns, 16 of each thread, in shared memory. `place`: where this lane's row
// of four matrices lies in the first eight rows; `next`: bytes from there to the other eight.
template <Finish FINISH>
__device__ __forceinline__ void finish_quad(const float* sum, const CodecLinearParams& params, int first_column,
                                            uint32_t place, int next) {
  uint32_t scale[4] = {};
  load_scales<FINISH>(scale, params, first_column);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t words[4] = {};
    if constexpr (FINISH == kResidual) load_matrices(words, place + half * next);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = sum + 4 * i + 2 * half;
      words[i] = finish_pair<FINISH>({pair[0], pair[1]}, scale[i], words[i]);
    }
    store_matrices(words, place + half * next);
  }
}

// The same for 16 columns, 8 sums of each thread. `place`: of this lane's row of four matrices, two in the first eight
// rows and two in the others.
template <Finish FINISH>
__device__ __forceinline__ void finish_square(const float* sum, const CodecLinearParams& params, int first_column,
                                              uint32_t place) {
  uint32_t scale[2] = {}, words[4] = {};
  load_scales<FINISH>(scale, params, first_column);
  if constexpr (FINISH == kResidual) load_matrices(words, place);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* pair = sum + 4 * (i % 2) + i / 2 * 2;
    words[i] = finish_pair<FINISH>({pair[0], pair[1]}, scale[i % 2], words[i]);
  }
  store_matrices(words, place);
}

}  // namespace moss
