// Hopper warpgroup matrix products: D[64, N] += A[64, 16] * B[N, 16]^T, bf16 operands in shared memory, fp32 in
// registers.
//
// Operands lie in "core matrices" of 8 rows x 16 bytes (128 contiguous bytes, no swizzle), so that any 16-byte aligned
// packing can be read: the descriptor gives the distance of two core matrices along K and along the rows.
// Accumulator of thread t of the warpgroup: row = 16 * (t / 32) + (t % 32) / 4 + 8 * (i / 2 % 2),
// column = 8 * (i / 4) + 2 * (t % 4) + i % 2 for d[i].
#pragma once
#include <cstdint>

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

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void wgmma(float (&d)[4], uint32_t a, uint32_t b) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 a, b; setp.eq.u32 p, 1, 1; mov.b64 a, {%4, 8}; mov.b64 b, {%5, 8}; "
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3}, "
      "a, b, p, 1, 1, 0, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a), "r"(b));
}

__device__ __forceinline__ void wgmma(float (&d)[8], uint32_t a, uint32_t b) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 a, b; setp.eq.u32 p, 1, 1; mov.b64 a, {%8, 8}; mov.b64 b, {%9, 8}; "
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7}, "
      "a, b, p, 1, 1, 0, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "r"(a), "r"(b));
}

__device__ __forceinline__ void wgmma(float (&d)[16], uint32_t a, uint32_t b) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 a, b; setp.eq.u32 p, 1, 1; mov.b64 a, {%16, 8}; mov.b64 b, {%17, 8}; "
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "a, b, p, 1, 1, 0, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "r"(a), "r"(b));
}

__device__ __forceinline__ void wgmma(float (&d)[32], uint32_t a, uint32_t b) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 a, b; setp.eq.u32 p, 1, 1; mov.b64 a, {%32, 8}; mov.b64 b, {%33, 8}; "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "a, b, p, 1, 1, 0, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a), "r"(b));
}

}  // namespace moss
