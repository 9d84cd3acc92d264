// Warpgroup products for operands that the copy engine laid down: D[64, N] (+)= A[64, 16] * B[N, 16]^T, bf16 operands
// in shared memory in rows of 128 bytes with the 128-byte swizzle, fp32 in registers, laid out as wgmma.cuh says.
#pragma once
#include <cstdint>

#include "device/wgmma_operands.cuh"

namespace moss {

// High word of a matrix descriptor: 1024 bytes from eight rows to the next eight, 128-byte swizzle.
constexpr uint32_t kSwizzledHigh = 1024 >> 4 | 1u << 30;

// Low word of a matrix descriptor. `address`: of a tile, a multiple of 1024. Moving by 16 columns adds 2.
__device__ __forceinline__ uint32_t swizzled_descriptor(uint32_t address) { return (address & 0x3FFFF) >> 4; }

// wgmma_swizzled(d, a, b, accumulate) for tiles of N columns, of which a thread holds COUNT sums; without `accumulate`
// what D held does not matter. A, B, P and HIGH number the operands behind the sums: COUNT and on.
#define MOSS_WGMMA_SWIZZLED(N, COUNT, A, B, P, HIGH)                                                               \
  __device__ __forceinline__ void wgmma_swizzled(float (&d)[COUNT], uint32_t a, uint32_t b, int accumulate) {      \
    asm volatile("{ .reg .pred p; .reg .b64 a, b; setp.ne.s32 p, %" #P ", 0; mov.b64 a, {%" #A ", %" #HIGH "}; "   \
                 "mov.b64 b, {%" #B ", %" #HIGH "}; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {"    \
                 MOSS_WGMMA_NAMES_##COUNT "}, a, b, p, 1, 1, 0, 0; }"                                              \
                 : MOSS_WGMMA_SUMS_##COUNT                                                                         \
                 : "r"(a), "r"(b), "r"(accumulate), "n"(kSwizzledHigh));                                           \
  }

MOSS_WGMMA_SWIZZLED(16, 8, 8, 9, 10, 11)
MOSS_WGMMA_SWIZZLED(24, 12, 12, 13, 14, 15)
MOSS_WGMMA_SWIZZLED(32, 16, 16, 17, 18, 19)
MOSS_WGMMA_SWIZZLED(40, 20, 20, 21, 22, 23)
MOSS_WGMMA_SWIZZLED(48, 24, 24, 25, 26, 27)
MOSS_WGMMA_SWIZZLED(64, 32, 32, 33, 34, 35)
MOSS_WGMMA_SWIZZLED(72, 36, 36, 37, 38, 39)
MOSS_WGMMA_SWIZZLED(80, 40, 40, 41, 42, 43)
MOSS_WGMMA_SWIZZLED(96, 48, 48, 49, 50, 51)
MOSS_WGMMA_SWIZZLED(104, 52, 52, 53, 54, 55)
MOSS_WGMMA_SWIZZLED(120, 60, 60, 61, 62, 63)
MOSS_WGMMA_SWIZZLED(128, 64, 64, 65, 66, 67)
MOSS_WGMMA_SWIZZLED(144, 72, 72, 73, 74, 75)
MOSS_WGMMA_SWIZZLED(152, 76, 76, 77, 78, 79)
MOSS_WGMMA_SWIZZLED(160, 80, 80, 81, 82, 83)
MOSS_WGMMA_SWIZZLED(184, 92, 92, 93, 94, 95)
MOSS_WGMMA_SWIZZLED(192, 96, 96, 97, 98, 99)
MOSS_WGMMA_SWIZZLED(200, 100, 100, 101, 102, 103)
MOSS_WGMMA_SWIZZLED(216, 108, 108, 109, 110, 111)
MOSS_WGMMA_SWIZZLED(240, 120, 120, 121, 122, 123)
MOSS_WGMMA_SWIZZLED(256, 128, 128, 129, 130, 131)

#undef MOSS_WGMMA_SWIZZLED

}  // namespace moss
