// Copies of 16 bytes of global memory into shared memory, in groups.
#pragma once
#include <cstdint>

namespace moss {

// Starts a copy, or of zeros unless `wanted`; nothing is read then.
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool wanted) {
  asm volatile(
      "{\n"
      ".reg .pred ignored;\n"
      "setp.eq.s32 ignored, %2, 0;\n"
      "cp.async.cg.shared.global [%0], [%1], 16, ignored;\n"
      "}" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
      "l"(global), "r"(static_cast<int>(wanted))
      : "memory");
}

// The same with a policy of L2 (see device/bulk_copy.cuh), to an address in shared memory.
__device__ __forceinline__ void copy_async(uint32_t shared, const void* global, bool wanted, uint64_t policy) {
  asm volatile(
      "{\n"
      ".reg .pred ignored;\n"
      "setp.eq.s32 ignored, %2, 0;\n"
      "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, ignored, %3;\n"
      "}" ::"r"(shared),
      "l"(global), "r"(static_cast<int>(wanted)), "l"(policy)
      : "memory");
}

// Ends a group: what this thread has started since the last one.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all groups of this thread but the last PENDING.
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

}  // namespace moss
