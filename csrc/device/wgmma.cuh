// Hopper warpgroup matrix products: D[64, N] += A[64, 16] * B[N, 16]^T, bf16 operands in shared memory, fp32 in
// registers.
//
// Operands lie in "core matrices" of 8 rows x 16 bytes (128 contiguous bytes, no swizzle), so that any 16-byte aligned
// packing can be read: the descriptor gives the distance of two core matrices along K and along the rows.
// Accumulator of thread t of the warpgroup: row = 16 * (t / 32) + (t % 32) / 4 + 8 * (i / 2 % 2),
// column = 8 * (i / 4) + 2 * (t % 4) + i % 2 for d[i].
#pragma once
#include <cstdint>

#include "device/wgmma_operands.cuh"

namespace moss {

// Low word of a matrix descriptor. `address`: shared memory address of the first core matrix; `k_stride`: bytes from
// one core matrix to the next along K; both multiples of 16. Moving by n bytes adds n / 16. The high word is a
// constant: 128 bytes from one core matrix to the next along the rows.
__device__ __forceinline__ uint32_t matrix_descriptor(uint32_t address, uint32_t k_stride) {
  return (address & 0x3FFFF) >> 4 | (k_stride >> 4) << 16;
}

// Change the number of registers that each thread of the warpgroup has; at first it is that of the compiled kernel.
template <int COUNT>
__device__ __forceinline__ void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// The warpgroup of a thread, in a way that tells the compiler that lanes of a warp have it in common: it then works out
// descriptors and barriers in uniform registers, where the products take them from, in two thirds of the instructions.
__device__ __forceinline__ int warpgroup() { return __shfl_sync(0xffffffffu, threadIdx.x / 128, 0); }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most PENDING groups of products are under way.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The same, `d` being of none of these groups. No use of `d` moves ahead of the wait, nor a copy of it to other
// registers, which operands of the wait itself would allow.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait(float (&d)[32]) {
  wgmma_wait<PENDING>();
  asm volatile("" : MOSS_WGMMA_SUMS_32);
}

// The four lanes of a row hand each other words: lane q gets word q of each, in the order of the lanes.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4]) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const bool upper = threadIdx.x & bit;
      const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? words[i] : words[i | bit], bit);
      (upper ? words[i] : words[i | bit]) = got;
    }
}

__device__ __forceinline__ void wgmma(float (&d)[4], uint32_t a, uint32_t b) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 a, b; setp.eq.u32 p, 1, 1; mov.b64 a, {%4, 8}; mov.b64 b, {%5, 8}; "
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {" MOSS_WGMMA_NAMES_4
      "}, a, b, p, 1, 1, 0, 0; }"
      : MOSS_WGMMA_SUMS_4
      : "r"(a), "r"(b));
}

__device__ __forceinline__ void wgmma(float (&d)[8], uint32_t a, uint32_t b) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 a, b; setp.eq.u32 p, 1, 1; mov.b64 a, {%8, 8}; mov.b64 b, {%9, 8}; "
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {" MOSS_WGMMA_NAMES_8
      "}, a, b, p, 1, 1, 0, 0; }"
      : MOSS_WGMMA_SUMS_8
      : "r"(a), "r"(b));
}

__device__ __forceinline__ void wgmma(float (&d)[16], uint32_t a, uint32_t b) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 a, b; setp.eq.u32 p, 1, 1; mov.b64 a, {%16, 8}; mov.b64 b, {%17, 8}; "
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" MOSS_WGMMA_NAMES_16
      "}, a, b, p, 1, 1, 0, 0; }"
      : MOSS_WGMMA_SUMS_16
      : "r"(a), "r"(b));
}

__device__ __forceinline__ void wgmma(float (&d)[32], uint32_t a, uint32_t b) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 a, b; setp.eq.u32 p, 1, 1; mov.b64 a, {%32, 8}; mov.b64 b, {%33, 8}; "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" MOSS_WGMMA_NAMES_32
      "}, a, b, p, 1, 1, 0, 0; }"
      : MOSS_WGMMA_SUMS_32
      : "r"(a), "r"(b));
}

}  // namespace moss
