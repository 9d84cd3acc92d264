// Clusters of blocks: their barrier, and each other's shared memory.
#pragma once
#include <cstdint>

namespace moss {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The two halves of a barrier of all threads of a cluster; what they wrote before it is visible after it.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// The first half where nothing that was written needs to be seen: without the fence, which waits for memory. What was
// loaded has come only if it has been used.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The same place as `address`, of this block's shared memory, in that of another block.
__device__ __forceinline__ uint32_t peer_address(uint32_t address, uint32_t rank) {
  uint32_t peer;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(address), "r"(rank));
  return peer;
}

__device__ __forceinline__ void store_peer(uint32_t peer_address, float x, float y) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(peer_address), "f"(x), "f"(y) : "memory");
}

// Copies `bytes` of this block's shared memory to a peer's; addresses and bytes are multiples of 16. Completes on
// `peer_barrier`, of the peer.
__device__ __forceinline__ void bulk_send(uint32_t peer_address, uint32_t source, uint32_t bytes,
                                          uint32_t peer_barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   peer_address),
               "r"(source), "r"(bytes), "r"(peer_barrier)
               : "memory");
}

// `peer_address`: a multiple of 16.
__device__ __forceinline__ float4 load_peer(uint32_t peer_address) {
  float4 values;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(values.x), "=f"(values.y), "=f"(values.z), "=f"(values.w)
               : "r"(peer_address)
               : "memory");
  return values;
}

}  // namespace moss
