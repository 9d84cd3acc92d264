// Warpgroup products whose A lies in registers: D[64, 64] += A[64, 16] * B[16, 64], B in shared memory in rows of 128
// bytes with the 128-byte swizzle, A and D as wgmma.cuh lays D out. So 16 columns of a D are an A once they are bf16:
// a[0] and a[1] the pair of the first eight columns in the upper and lower row, a[2] and a[3] that of the next eight.
#pragma once
#include <cstdint>

#include "device/wgmma_swizzled.cuh"

namespace moss {

// `b`: descriptor of the rows. Moving by 16 rows adds 128.
__device__ __forceinline__ void wgmma_registers(float (&d)[32], const uint32_t (&a)[4], uint32_t b) {
  asm volatile(
      "{ .reg .b64 b; mov.b64 b, {%36, %37}; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{" MOSS_WGMMA_NAMES_32 "}, {%32, %33, %34, %35}, b, 1, 1, 1, 1; }"
      : MOSS_WGMMA_SUMS_32
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kSwizzledHigh));
}

}  // namespace moss
