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

// Without `accumulate` what D held does not matter.
__device__ __forceinline__ void wgmma_swizzled(float (&d)[12], uint32_t a, uint32_t b, int accumulate) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 a, b; setp.ne.s32 p, %14, 0; mov.b64 a, {%12, %15}; mov.b64 b, {%13, %15}; "
      "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 {" MOSS_WGMMA_NAMES_12 "}, a, b, p, 1, 1, 0, 0; }"
      : MOSS_WGMMA_SUMS_12
      : "r"(a), "r"(b), "r"(accumulate), "n"(kSwizzledHigh));
}

__device__ __forceinline__ void wgmma_swizzled(float (&d)[24], uint32_t a, uint32_t b, int accumulate) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 a, b; setp.ne.s32 p, %26, 0; mov.b64 a, {%24, %27}; mov.b64 b, {%25, %27}; "
      "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {" MOSS_WGMMA_NAMES_24 "}, a, b, p, 1, 1, 0, 0; }"
      : MOSS_WGMMA_SUMS_24
      : "r"(a), "r"(b), "r"(accumulate), "n"(kSwizzledHigh));
}

__device__ __forceinline__ void wgmma_swizzled(float (&d)[40], uint32_t a, uint32_t b, int accumulate) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 a, b; setp.ne.s32 p, %42, 0; mov.b64 a, {%40, %43}; mov.b64 b, {%41, %43}; "
      "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {" MOSS_WGMMA_NAMES_40 "}, a, b, p, 1, 1, 0, 0; }"
      : MOSS_WGMMA_SUMS_40
      : "r"(a), "r"(b), "r"(accumulate), "n"(kSwizzledHigh));
}

__device__ __forceinline__ void wgmma_swizzled(float (&d)[48], uint32_t a, uint32_t b, int accumulate) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 a, b; setp.ne.s32 p, %50, 0; mov.b64 a, {%48, %51}; mov.b64 b, {%49, %51}; "
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {" MOSS_WGMMA_NAMES_48 "}, a, b, p, 1, 1, 0, 0; }"
      : MOSS_WGMMA_SUMS_48
      : "r"(a), "r"(b), "r"(accumulate), "n"(kSwizzledHigh));
}

__device__ __forceinline__ void wgmma_swizzled(float (&d)[64], uint32_t a, uint32_t b, int accumulate) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 a, b; setp.ne.s32 p, %66, 0; mov.b64 a, {%64, %67}; mov.b64 b, {%65, %67}; "
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" MOSS_WGMMA_NAMES_64 "}, a, b, p, 1, 1, 0, 0; }"
      : MOSS_WGMMA_SUMS_64
      : "r"(a), "r"(b), "r"(accumulate), "n"(kSwizzledHigh));
}

__device__ __forceinline__ void wgmma_swizzled(float (&d)[96], uint32_t a, uint32_t b, int accumulate) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 a, b; setp.ne.s32 p, %98, 0; mov.b64 a, {%96, %99}; mov.b64 b, {%97, %99}; "
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" MOSS_WGMMA_NAMES_96 "}, a, b, p, 1, 1, 0, 0; }"
      : MOSS_WGMMA_SUMS_96
      : "r"(a), "r"(b), "r"(accumulate), "n"(kSwizzledHigh));
}

__device__ __forceinline__ void wgmma_swizzled(float (&d)[100], uint32_t a, uint32_t b, int accumulate) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 a, b; setp.ne.s32 p, %102, 0; mov.b64 a, {%100, %103}; mov.b64 b, {%101, %103}; "
      "wgmma.mma_async.sync.aligned.m64n200k16.f32.bf16.bf16 {" MOSS_WGMMA_NAMES_100 "}, a, b, p, 1, 1, 0, 0; }"
      : MOSS_WGMMA_SUMS_100
      : "r"(a), "r"(b), "r"(accumulate), "n"(kSwizzledHigh));
}

__device__ __forceinline__ void wgmma_swizzled(float (&d)[128], uint32_t a, uint32_t b, int accumulate) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 a, b; setp.ne.s32 p, %130, 0; mov.b64 a, {%128, %131}; mov.b64 b, {%129, %131}; "
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" MOSS_WGMMA_NAMES_128 "}, a, b, p, 1, 1, 0, 0; }"
      : MOSS_WGMMA_SUMS_128
      : "r"(a), "r"(b), "r"(accumulate), "n"(kSwizzledHigh));
}

}  // namespace moss
