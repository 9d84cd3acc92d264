// Products of one warp on the tensor cores, and the loads that feed them, also straight from global memory.
//
// In `mma` thread 4 * g + t of the warp holds rows g and g + 8 of A, column g of B, and of both the inputs 2t, 2t + 1,
// 2t + 8 and 2t + 9 of 16. Which inputs these are does not matter as long as A and B agree; so a thread loads 16
// contiguous bytes, inputs 8t .. 8t + 7 of 32, and feeds them to two products.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

namespace moss {

// c[0], c[1]: row g, columns 2t and 2t + 1; c[2], c[3]: row g + 8.
__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two products over 32 inputs: `low` and `high` are the 16 bytes of rows g and g + 8 of A, `b` those of column g of B.
__device__ __forceinline__ void mma(float (&c)[4], const uint4& low, const uint4& high, const uint4& b) {
  mma(c, low.x, high.x, low.y, high.y, b.x, b.y);
  mma(c, low.z, high.z, low.w, high.w, b.z, b.w);
}

// Four 8 x 8 matrices of bf16 in shared memory: lane l has the address of row l % 8 of matrix l / 8, and gets of each
// matrix columns 2t and 2t + 1 of row g, as a sum of `mma` lies.
__device__ __forceinline__ void load_matrices(uint32_t (&words)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address));
}
// The same of each matrix's transpose.
__device__ __forceinline__ void load_transposed(uint32_t (&words)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address));
}
// Of an 8 x 8 matrix of bf16 that the warp holds so.
__device__ __forceinline__ uint32_t transposed(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Of memory that no kernel writes: stays where it is in the code, also ahead of a wait for other kernels, across which
// the assembler moves loads that are not `relaxed`.
__device__ __forceinline__ uint4 load_weights(const void* pointer) {
  uint4 value;
  asm volatile("ld.relaxed.gpu.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(pointer));
  return value;
}

// A hint: brings the line of an address into L2.
__device__ __forceinline__ void prefetch_l2(const void* pointer) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer));
}

// 2^x to 2 ulp; 0 for -inf.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats as bf16, `low` in the lower half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ float2 unpack_bf16(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

}  // namespace moss
