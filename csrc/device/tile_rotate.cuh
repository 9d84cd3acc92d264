// Rotation of a tile's sums, laid out as wgmma.cuh says, where they are the queries and keys of heads of 64.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

#include "device/mma.cuh"
#include "moss_kernels.h"

namespace moss {

constexpr int kRotatedDim = 64;  // of a head

// Cosines and sines by which a thread rotates its sums of a head in 64 rows: its row's and that of the eighth on.
struct TileAngles {
  float2 of[2][kRotatedDim / 8];

  // `first_row`: of the 64. The loads are not put off until what they load is needed.
  __device__ __forceinline__ void load(const CodecLinearParams& params, int first_row) {
    const int row = first_row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t place = int64_t{min(row + 8 * half, params.rows - 1)} * kRotatedDim + threadIdx.x % 4 * 2;
#pragma unroll
      for (int i = 0; i < kRotatedDim / 8; ++i)
        asm volatile("ld.global.v2.f32 {%0, %1}, [%2];"
                     : "=f"(of[half][i].x), "=f"(of[half][i].y)
                     : "l"(params.cos_sin + place + 8 * i));
    }
  }

  // The sums of a tile's first `columns`, rounded as they would be stored, as rotate.cuh does it.
  template <int N>
  __device__ __forceinline__ void turn(float (&sum)[N / 2], int columns) const {
#pragma unroll
    for (int head = 0; head < N / kRotatedDim; ++head) {
      if (head * kRotatedDim >= columns) continue;
#pragma unroll
      for (int i = 0; i < kRotatedDim / 8; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float* const pair = sum + head * kRotatedDim / 2 + 4 * i + 2 * half;
          const float2 x = unpack_bf16(pack_bf16(pair[0], pair[1])), angle = of[half][i];
          pair[0] = __fsub_rn(__fmul_rn(x.x, angle.x), __fmul_rn(x.y, angle.y));
          pair[1] = __fadd_rn(__fmul_rn(x.x, angle.y), __fmul_rn(x.y, angle.x));
        }
    }
  }
};

}  // namespace moss
