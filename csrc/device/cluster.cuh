// Blocks of a cluster that read each other's shared memory, and copies into shared memory by 16 bytes.
#pragma once
#include <cstdint>

namespace moss {

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of all blocks: what they wrote to shared memory before is seen by all after.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}

// Two floats at the place that `pointer` has in this block's shared memory, in that of block `rank`.
__device__ __forceinline__ float2 cluster_load(const void* pointer, unsigned rank) {
  const uint32_t own = static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
  float2 value;
  asm volatile(
      "{ .reg .u32 address; mapa.shared::cluster.u32 address, %2, %3; "
      "ld.shared::cluster.v2.f32 {%0, %1}, [address]; }"
      : "=f"(value.x), "=f"(value.y)
      : "r"(own), "r"(rank)
      : "memory");
  return value;
}

// Starts a copy of 16 bytes of global memory into shared memory.
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global)
               : "memory");
}

// Waits for all copies that this thread has started.
__device__ __forceinline__ void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace moss
