// Attention of a warpgroup for 64 queries: what its threads hold in registers, and the tiles of 64 keys and values in
// shared memory that are added to it.
#pragma once
#include <climits>
#include <cstdint>

#include "device/mma.cuh"
#include "device/wgmma_registers.cuh"

namespace moss {

constexpr int kHeadDim = 64, kRowBytes = kHeadDim * 2;
constexpr int kTile = 64;  // queries of a warpgroup; keys of a tile
// Start of a running maximum: finite, so that a tile in which a query sees nothing gives weights of 0, not NaN.
constexpr float kLowest = -3.0e38f;
// How much a score may exceed its row's reference, so that a weight is 2^8, before the result is scaled anew.
constexpr float kSlack = 8.0f;

// Of a tile's rows those of this thread are this and the eighth on.
__device__ __forceinline__ int row_in_tile() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }

// What a thread holds: of its rows r and r + 8 the scores of one tile and the result of all before.
struct Attention {
  float score[32], result[32];
  float highest[2], total[2];  // the reference of the weights, not always the maximum; of this thread's keys alone
  int limit[2];                // bits of the score from which on the reference follows; INT_MIN if that is not positive

  __device__ __forceinline__ void begin() {
    highest[0] = highest[1] = kLowest;
    limit[0] = limit[1] = INT_MIN;
    total[0] = total[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      result[i] = 0.0f;
      asm volatile("" : "=f"(score[i]));  // of no value yet, so that no register is kept for it until here
    }
  }

  // The last KEYS of a tile.
  template <int KEYS>
  __device__ __forceinline__ void multiply_keys(uint32_t queries, uint32_t tile) {
    const uint32_t keys = tile + (kTile - KEYS) * (kRowBytes / 16);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i)
      wgmma_swizzled(reinterpret_cast<float (&)[KEYS / 2]>(score), queries + 2 * i, keys + 2 * i, i);
    wgmma_commit();
  }
  // Until all products are done.
  __device__ __forceinline__ void wait() {
    wgmma_wait<0>(score);
    wgmma_wait<0>(result);
  }

  // `first`: query of row 0. `key`: the first of those that count. `oldest`: first token that exists.
  template <int KEYS>
  __device__ __forceinline__ void mask(int first, int key, int oldest, int window) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = first + row_in_tile() + 8 * half, lowest = max(query - window + 1, oldest);
      const uint32_t span = query - lowest, begin = key + 2 * (threadIdx.x % 4) - lowest;
#pragma unroll
      for (int i = 2 * half; i < KEYS / 2; i += 4) {
        if (begin + 2 * i - 4 * half > span) score[i] = -INFINITY;
        if (begin + 2 * i - 4 * half + 1 > span) score[i + 1] = -INFINITY;
      }
    }
  }

  // The reference follows the scores once these exceed it by more than kSlack. Whether any does is seen from their
  // bits, three at a time: as whole numbers the positive ones have their order, and all others come before them.
  template <int KEYS>
  __device__ __forceinline__ void follow(float scale, float unscale) {
    bool above = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int top = INT_MIN;
#pragma unroll
      for (int i = 2 * half; i < KEYS / 2; i += 4)
        top = max(max(top, __float_as_int(score[i])), __float_as_int(score[i + 1]));
      above |= top >= limit[half];
    }
    if (__any_sync(0xffffffffu, above)) move_reference<KEYS>(scale, unscale);
  }
  template <int KEYS>
  __device__ __forceinline__ void move_reference(float scale, float unscale) {
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = score[2 * half];
#pragma unroll
      for (int i = 2 * half; i < KEYS / 2; i += 4) top = fmaxf(top, fmaxf(score[i], score[i + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      const bool follows = top * scale > highest[half] + kSlack;
      factor[half] = follows ? exp2_approx(highest[half] - top * scale) : 1.0f;
      if (follows) highest[half] = top * scale;
      // Less than kSlack, so that a row follows whatever the others of its warp do.
      const float above = (highest[half] + 0.99f * kSlack) * unscale;
      limit[half] = above > 0.0f ? __float_as_int(above) : INT_MIN;
      total[half] *= factor[half];
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) result[i] *= factor[i / 2 % 2];
  }

  // Of KEYS keys of a tile from `first` on.
  template <int KEYS>
  __device__ __forceinline__ void add_values(int first, uint32_t values, float scale) {
    uint32_t weights[KEYS / 16][4];
#pragma unroll
    for (int i = 0; i < KEYS / 2; i += 2) {
      const int half = i / 2 % 2;
      const float low = exp2_approx(fmaf(score[first / 2 + i], scale, -highest[half]));
      const float high = exp2_approx(fmaf(score[first / 2 + i + 1], scale, -highest[half]));
      total[half] += low + high;
      weights[i / 8][i / 2 % 4] = pack_bf16(low, high);
    }
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < KEYS / 16; ++i)
      wgmma_registers(result, weights[i], values + (first / 16 + i) * (16 * kRowBytes / 16));
    wgmma_commit();
  }
};

}  // namespace moss
