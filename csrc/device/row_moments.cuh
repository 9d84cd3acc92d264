// Moments of rows whose columns lie in several blocks: the warps that have the same 16 rows tell each other through
// memory.
//
// A reader has them one trip to L2 after they are written, since they are tagged (tagged.cuh). The blocks of a row run
// at once as a rule, so that all wait only for the last. Where other streams hold the multiprocessors they may not, and
// whoever holds these may wait for ours; so no warp waits for long. One that leaves has stored its columns, and the
// last warp to come to its end normalises them in its place.
#pragma once
#include <cstdint>

#include "device/tagged.cuh"

namespace moss {

constexpr int kParts = 8;           // blocks of a row
constexpr int kWarpRows = 16;       // of a warp: lane l has columns of rows l / 4 and l / 4 + 8
constexpr int kPatience = 1 << 17;  // cycles that a warp waits, several times as long as such a kernel takes

// Of a part of a row: the sum, and the sum of squares of distances from the part's mean.
struct PartMoments {
  float sum, squares;
};

constexpr uint32_t kLeft = ~0u;

// What the warps of 16 rows share in memory, in lines of L2 of its own. It is zero before its first use.
struct alignas(128) SharedRows {
  float2 moments[kWarpRows][kParts];
  uint32_t state;  // parts that have come to an end, and from bit kParts on a bit for each that has left
};
static_assert(sizeof(SharedRows) == 1152);  // as callers know it from moss_kernels.h

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Mean and inverse deviation of a lane's two rows.
struct RowNorm {
  float mean[2], factor[2];
};

// One part of the rows of a warp.
struct RowExchange {
  SharedRows* rows;
  int part;
  bool inside[2];  // whether a lane's rows are some
  uint32_t tag[2];

  // Once all launches ahead that have used `rows` have ended.
  __device__ __forceinline__ RowExchange(SharedRows* shared, int part, bool first, bool second)
      : rows(shared), part(part), inside{first, second}, tag{} {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (inside[half]) tag[half] = ~__ldcg(reinterpret_cast<const uint32_t*>(place(half) + part)) & 1;
  }

  __device__ __forceinline__ float2* place(int half) const { return rows->moments[threadIdx.x % 32 / 4 + 8 * half]; }

  // Gives away this part's moments, which all four lanes of a row have.
  __device__ __forceinline__ void send(const PartMoments (&own)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (threadIdx.x % 4 == 0 && inside[half])
        asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(place(half) + part),
                     "f"(tagged(own[half].sum, tag[half])), "f"(tagged(own[half].squares, tag[half]))
                     : "memory");
  }

  // Waits for all parts, each of `columns` columns. Returns in lane 0 what `state` was before this warp came to an end,
  // or kLeft: then the warp has left, and another does what it would have done. What it has stored is visible to that
  // one.
  __device__ __forceinline__ uint32_t collect(RowNorm& norm, int columns) const {
    float4 pair[2];  // of each row a lane has two parts
    uint32_t before = 0;
    bool ended = false;
    const int64_t start = clock64();
    for (;;) {
      uint32_t missing = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (inside[half]) load_relaxed(pair[half], reinterpret_cast<const float4*>(place(half)) + threadIdx.x % 4);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (inside[half]) missing |= differs(pair[half], tag[half]) & 1;
      if (!__any_sync(0xffffffffu, missing)) break;
      if (ended || !__any_sync(0xffffffffu, clock64() - start > kPatience)) continue;
      // The last to come to an end finds all parts, if not at once.
      __threadfence();
      __syncwarp();
      before = __shfl_sync(0xffffffffu, end(1u << (kParts + part)), 0);
      if (before % (1 << kParts) != kParts - 1) return kLeft;
      ended = true;
    }
    if (!ended) before = end(0);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Without tags, so that results do not depend on them.
      const PartMoments a = {tagged(pair[half].x, 0), tagged(pair[half].y, 0)};
      const PartMoments b = {tagged(pair[half].z, 0), tagged(pair[half].w, 0)};
      const float share = 1.0f / columns, mean = quad_sum(a.sum + b.sum) * (share / kParts);
      const float first = a.sum * share - mean, second = b.sum * share - mean;
      const float squares = quad_sum(a.squares + b.squares + columns * (first * first + second * second));
      norm.mean[half] = mean, norm.factor[half] = rsqrtf(squares * (share / kParts) + 1e-5f);
    }
    return before;
  }

  // `before`: what `collect` returned. A bit for each part that has left, if this warp was the last to come to its end.
  __device__ __forceinline__ uint32_t left_to_do(uint32_t before) const {
    before = __shfl_sync(0xffffffffu, before, 0);
    if (before % (1 << kParts) != kParts - 1) return 0;
    if (threadIdx.x % 32 == 0) rows->state = 0;  // as the next launch finds it
    if (before >> kParts) __threadfence();
    return before >> kParts;
  }

 private:
  __device__ __forceinline__ uint32_t end(uint32_t left) const {
    return threadIdx.x % 32 == 0 ? atomicAdd(&rows->state, 1 | left) : 0;
  }
};

}  // namespace moss
