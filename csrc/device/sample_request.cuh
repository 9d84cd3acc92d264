// What a draw reads of its request, and when: the same for every kernel that draws for the rows of a batch.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "device/sample_row.cuh"
#include "moss_kernels.h"

namespace moss {

template <int THREADS>
struct BlockSync {
  __device__ static __forceinline__ void sync() {
    if constexpr (THREADS == 32)
      __syncwarp();
    else
      __syncthreads();
  }
  __device__ static __forceinline__ bool any(bool value) {
    if constexpr (THREADS == 32) {
      __syncwarp();
      return __any_sync(0xffffffffu, value);
    } else {
      return __syncthreads_or(value);
    }
  }
};

// A load that stays where it is written, so that several are in flight before the first is used: the compiler does not
// move `relaxed` loads. Not `volatile`, which would bypass L1.
__device__ __forceinline__ int32_t load_now(const int32_t* pointer) {
  int32_t value;
  asm volatile("ld.relaxed.cta.global.b32 %0, [%1];" : "=r"(value) : "l"(pointer));
  return value;
}
__device__ __forceinline__ float load_now(const float* pointer) {
  float value;
  asm volatile("ld.relaxed.cta.global.f32 %0, [%1];" : "=f"(value) : "l"(pointer));
  return value;
}
__device__ __forceinline__ uint64_t load_now(const int64_t* pointer) {
  uint64_t value;
  asm volatile("ld.relaxed.cta.global.b64 %0, [%1];" : "=l"(value) : "l"(pointer));
  return value;
}

// Loads that may race with the kernel ahead: they leave no copy in L1 for those that come after the wait.
__device__ __forceinline__ int32_t peek(const int32_t* pointer) {
  int32_t value;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(pointer));
  return value;
}
__device__ __forceinline__ uint64_t peek(const int64_t* pointer) {
  uint64_t value;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(value) : "l"(pointer));
  return value;
}

// Brings a line into L2. The address is an output too: the compiler would else work it out again, after the wait.
template <typename T>
__device__ __forceinline__ void prefetch(T*& pointer) {
  asm volatile("prefetch.global.L2 [%0];" : "+l"(pointer));
  __builtin_assume(__isGlobal(pointer));
}

// Where a pool row has what a draw reads.
struct RequestPointers {
  const int64_t* seed;
  const int32_t* frame;
  const int32_t* top_k;
  const float* top_p;
  const float* temperature;
  const float* repetition_penalty;
  int32_t* seen;

  RequestPointers() = default;
  __device__ __forceinline__ RequestPointers(const SampleCodebookParams& params, int row)
      : seed(params.seed + row),
        frame(params.frame + row),
        top_k(params.top_k + row),
        top_p(params.top_p + row),
        temperature(params.temperature + row),
        repetition_penalty(params.repetition_penalty ? params.repetition_penalty + row : nullptr),
        seen(params.seen ? params.seen + (static_cast<int64_t>(row) * params.codebooks + params.codebook) *
                                             ((params.vocab + 31) / 32)
                         : nullptr) {}

  __device__ __forceinline__ void prefetch_all() {
    prefetch(seed), prefetch(frame), prefetch(top_k), prefetch(top_p), prefetch(temperature);
    if (repetition_penalty) prefetch(repetition_penalty);
    if (seen) prefetch(seen);
  }
};

struct Request {
  SampleParams sampling;
  uint32_t seen;      // bits of the thread's ids
  uint64_t seed = 0;  // this and `frame` in the first warp alone, which makes the random word
  uint32_t frame = 0;
};

template <int EPT>
__device__ __forceinline__ Request load_request(const RequestPointers& at, int vocab, int tid) {
  Request request;
  request.sampling.temperature = load_now(at.temperature);
  request.sampling.repetition_penalty = at.repetition_penalty ? load_now(at.repetition_penalty) : 1.0f;
  request.seen = at.seen ? seen_bits<EPT>(at.seen, vocab, tid) : 0u;
  request.sampling.top_k = load_now(at.top_k);
  request.sampling.top_p = load_now(at.top_p);
  if (tid < 32) request.seed = load_now(at.seed), request.frame = static_cast<uint32_t>(load_now(at.frame));
  return request;
}

}  // namespace moss
