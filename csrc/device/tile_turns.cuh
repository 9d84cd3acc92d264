// Two consumers, warpgroups, that have a tile of the ring of stages each and take turns on the tensor cores, so that
// what follows the products of one is hidden by the products of the other.
#pragma once
#include "device/tile_product.cuh"

namespace moss {

constexpr int kTurnConsumers = 2;
constexpr int kHalves = 2;  // of 64 rows, of a tile

// A place in the ring after so many more steps.
template <int STAGES>
__device__ __forceinline__ void skip(Ring<STAGES>& ring, int steps) {
  const int stage = ring.stage + steps;
  ring.stage = stage % STAGES;
  ring.parity ^= stage / STAGES & 1;
}

// Named barriers of both consumers: whose turn it is.
__device__ __forceinline__ int turn_of(int group) { return 1 + group; }
__device__ __forceinline__ void named_wait(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(128 * kTurnConsumers) : "memory");
}
__device__ __forceinline__ void named_arrive(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(128 * kTurnConsumers) : "memory");
}

// Those of the stages of `shared`, a Shared; a stage is for one consumer, whose four warps give it back. By one thread,
// ahead of a barrier of the block.
template <typename Memory>
__device__ __forceinline__ void init_stages(const Memory& shared) {
  for (int stage = 0; stage < Memory::kStages; ++stage) {
    barrier_init(shared.full(stage), 1);
    barrier_init(shared.empty(stage), 4);
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// The sum over the next `steps` stages, of the first HALVES times 64 rows. `more`: a tile follows this one. A consumer
// has its turn when all products of the tile before have been asked for. Then all stages before its own have been full,
// so that no wait takes the parity of an earlier round for its own.
template <int HALVES, int SUMS, typename Memory>
__device__ __forceinline__ void multiply_in_turn(float (&sum)[kHalves][SUMS], const Memory& shared,
                                                 Ring<Memory::kStages>& ring, int steps, int group, bool more) {
  const auto release = [](uint32_t empty) {
    if (threadIdx.x % 32 == 0) barrier_arrive(empty);
  };
  uint32_t previous = 0;
  named_wait(turn_of(group));
#pragma unroll 1
  for (int step = 0; step < steps; ++step, ring.advance()) {
    const uint32_t a = swizzled_descriptor(shared.rows(ring.stage));
    const uint32_t b = swizzled_descriptor(shared.weights(ring.stage));
    barrier_wait(shared.full(ring.stage), ring.parity);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k)
#pragma unroll
      for (int half = 0; half < HALVES; ++half)
        wgmma_swizzled(sum[half], a + 2 * k + half * (kGroupRows * kStep * 2 >> 4), b + 2 * k, step | k);
    wgmma_commit();
    wgmma_wait<1>();
    if (step > 0) release(previous);
    previous = shared.empty(ring.stage);
  }
  if (more) named_arrive(turn_of(group ^ 1));
  wgmma_wait<0>();
  release(previous);
}

}  // namespace moss
