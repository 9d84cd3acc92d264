// A box of a matrix that tensor_map.h describes, to shared memory by the copy engine.
#pragma once
#include <cuda.h>

#include <cstdint>

namespace moss {

// A hint that the map is needed soon.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// `column`, `row`: where the box begins. Completes on `barrier`.
__device__ __forceinline__ void tensor_load(uint32_t destination, const CUtensorMap& map, int column, int row,
                                            uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          destination),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// The same under a policy for its lines in L2 (bulk_copy.cuh).
__device__ __forceinline__ void tensor_load(uint32_t destination, const CUtensorMap& map, int column, int row,
                                            uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(destination),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

// A box of weights in runs, as make_runs_map of tensor_map.h describes them, from output 32 * `group` on.
__device__ __forceinline__ void tensor_load_runs(uint32_t destination, const CUtensorMap& map, int input, int group,
                                                 uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %3, %3, %4}], [%5], %6;" ::"r"(destination),
      "l"(&map), "r"(input), "r"(0), "r"(group), "r"(barrier), "l"(policy)
      : "memory");
}

}  // namespace moss
