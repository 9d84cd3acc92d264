// Products of tiles that the copy engine brings into a ring of stages: the parts of a kernel in which one thread loads
// and warpgroups, the consumers, multiply 64 rows each by N rows of weights.
#pragma once
#include <cstdint>

#include "device/bulk_copy.cuh"
#include "device/tensor_load.cuh"
#include "device/wgmma.cuh"
#include "device/wgmma_swizzled.cuh"

namespace moss {

constexpr int kGroupRows = 64;  // of a consumer
constexpr int kStep = 64;       // columns of a stage: 128 bytes, as wide as the swizzle
constexpr int kSharedBytes = 227 * 1024, kBarrierBytes = 1024, kAlignment = 1024;

// A place in the ring of stages, and the parity of its barriers there.
template <int STAGES>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// Shared memory of a block, up to BYTES: stages of CONSUMERS times kGroupRows rows and N rows of weights, with two
// barriers each; between stages and barriers EXTRA bytes, a multiple of 16.
template <int N, int CONSUMERS, int EXTRA = 0, int BYTES = kSharedBytes>
struct Shared {
  static constexpr int kRows = kGroupRows * CONSUMERS, kRowBytes = kRows * kStep * 2;
  static constexpr int kStageBytes = kRowBytes + N * kStep * 2;
  static constexpr int kStages = (BYTES - kBarrierBytes - kAlignment - EXTRA) / kStageBytes;
  static constexpr int kBytes = kStages * kStageBytes + EXTRA + kBarrierBytes + kAlignment;
  uint32_t base;

  __device__ __forceinline__ uint32_t rows(int stage) const { return base + stage * kStageBytes; }
  __device__ __forceinline__ uint32_t weights(int stage) const { return rows(stage) + kRowBytes; }
  __device__ __forceinline__ uint32_t extra() const { return base + kStages * kStageBytes; }
  __device__ __forceinline__ uint32_t full(int stage) const { return extra() + EXTRA + 16 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(stage) + 8; }

  // By one thread, ahead of a barrier of the block.
  __device__ __forceinline__ void init_barriers() const {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(full(stage), 1);
      barrier_init(empty(stage), 4 * CONSUMERS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
};

// Of the first byte of dynamic shared memory that a stage may begin at.
__device__ __forceinline__ uint32_t aligned_address(const void* memory) {
  return (shared_address(memory) + kAlignment - 1) & ~(kAlignment - 1);
}

// The same, kept in a register: else the compiler works it out again in each step, from the block's place in its
// cluster.
__device__ __forceinline__ uint32_t kept_address(const void* memory) {
  uint32_t address = aligned_address(memory);
  asm volatile("" : "+r"(address));
  return address;
}

// The sum over the next `steps` stages for a consumer's rows, if it is to be computed.
template <int N, int CONSUMERS, int EXTRA, int BYTES>
__device__ __forceinline__ void multiply(float (&sum)[N / 2], Shared<N, CONSUMERS, EXTRA, BYTES> shared,
                                         Ring<Shared<N, CONSUMERS, EXTRA, BYTES>::kStages>& ring, int steps, int group,
                                         bool wanted) {
  uint32_t previous = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step, ring.advance()) {
    const uint32_t a = swizzled_descriptor(shared.rows(ring.stage) + group * kGroupRows * kStep * 2);
    const uint32_t b = swizzled_descriptor(shared.weights(ring.stage));
    barrier_wait(shared.full(ring.stage), ring.parity);
    if (wanted) {
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kStep / 16; ++k) wgmma_swizzled(sum, a + 2 * k, b + 2 * k, step | k);
      wgmma_commit();
      wgmma_wait<1>();
    }
    if (step > 0 && threadIdx.x % 32 == 0) barrier_arrive(previous);
    previous = shared.empty(ring.stage);
  }
  wgmma_wait<0>();
  if (threadIdx.x % 32 == 0) barrier_arrive(previous);
}

// How a block begins that has one tile: the next kernel may start, and the thread behind the consumers, which loads, makes
// the barriers.
template <int N, int CONSUMERS, int EXTRA, int BYTES, typename Arguments>
__device__ __forceinline__ void begin_tile(const Arguments& arguments, Shared<N, CONSUMERS, EXTRA, BYTES> shared) {
  cudaTriggerProgrammaticLaunchCompletion();
  if (threadIdx.x == 128 * CONSUMERS) {
    prefetch_map(arguments.weight_map);
    prefetch_map(arguments.x_map);
    shared.init_barriers();
  }
  __syncthreads();
}

// One thread: all loads of a block that has one tile, from step `first_step` of the inputs on, `arguments.steps` steps
// of `arguments.box_rows` rows. `load_tile(destination, input, barrier, policy)` asks for the weights of a step. Those
// of the first stages come before the wait for the kernel ahead. They are not read again before all of L2 has gone
// through: what the kernels hand to each other stays there instead.
template <int N, int CONSUMERS, int EXTRA, int BYTES, typename Arguments, typename LoadTile>
__device__ __forceinline__ void produce_tile(const Arguments& arguments, Shared<N, CONSUMERS, EXTRA, BYTES> shared,
                                             int row, int first_step, LoadTile&& load_tile) {
  const uint64_t policy = policy_evict_first();
  const auto load_weights = [&](int step, int stage) {
    barrier_expect(shared.full(stage), (arguments.box_rows + N) * kStep * 2);
    load_tile(shared.weights(stage), (first_step + step) * kStep, shared.full(stage), policy);
  };
  const auto load_rows = [&](int step, int stage) {
    tensor_load(shared.rows(stage), arguments.x_map, (first_step + step) * kStep, row, shared.full(stage));
  };
  Ring<shared.kStages> ring;
  const int early = min(arguments.steps, shared.kStages);
  for (int i = 0; i < early; ++i) load_weights(i, i);
  cudaGridDependencySynchronize();
  for (int i = 0; i < early; ++i, ring.advance()) load_rows(i, i);
  for (int i = early; i < arguments.steps; ++i, ring.advance()) {
    barrier_wait(shared.empty(ring.stage), ring.parity ^ 1);
    load_weights(i, ring.stage);
    load_rows(i, ring.stage);
  }
}

// The same of outputs in their order, from `column` on.
template <int N, int CONSUMERS, int EXTRA, int BYTES, typename Arguments>
__device__ __forceinline__ void produce_tile(const Arguments& arguments, Shared<N, CONSUMERS, EXTRA, BYTES> shared,
                                             int row, int column, int first_step) {
  produce_tile(arguments, shared, row, first_step,
               [&](uint32_t destination, int input, uint32_t barrier, uint64_t policy) {
                 tensor_load(destination, arguments.weight_map, input, column, barrier, policy);
               });
}

}  // namespace moss
