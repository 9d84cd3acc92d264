// Attention of one warp over tiles of keys that lie in a ring or in shared memory; see device/mma.cuh for who holds
// what.
#pragma once
#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "device/bulk_copy.cuh"
#include "device/copy_async.cuh"
#include "device/mma.cuh"
#include "device/rotate.cuh"
#include "moss_kernels.h"

namespace moss {

using bf16 = __nv_bfloat16;

constexpr int kHeadDim = 64, kPieces = kHeadDim / 8;  // 16 bytes each
constexpr int kTileKeys = 16, kTileQueries = 16;
// Start of a running maximum: finite, so that a tile in which a query sees nothing gives weights of 0, not NaN.
constexpr float kLowest = -3.0e38f;
// Weights are made relative to a new highest score where it is so far above the last one: they stay below 2^8.
constexpr float kSlack = 8.0f;

// Of a token's piece: cosines and sines. They are loaded where the code says so, also ahead of the wait.
struct Angles {
  alignas(uint4) float values[8];

  __device__ __forceinline__ void load(const float* source) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      reinterpret_cast<uint4*>(values)[i] = load_weights(source + 4 * i);
  }
  __device__ __forceinline__ uint4 rotated(uint4 x) const {
    using Piece = Vector<bf16, 8>;
    reinterpret_cast<Piece&>(x) = rotate(reinterpret_cast<Piece&>(x), values);
    return x;
  }
};

// What a thread, 4 * g + t of its warp, holds of 16 keys and values.
struct KeyTile {
  uint4 key[2][2];  // [8 keys: key g][32 dimensions: 8t .. 8t + 7]
  uint4 value[4];   // keys 2t, 2t + 1, 2t + 8, 2t + 9, dimensions 8g .. 8g + 7
};

__device__ __forceinline__ int value_key(int i, int quarter) { return 2 * quarter + i % 2 + i / 2 * 8; }

// 16 keys and values in shared memory. Their pieces are permuted, so that what a warp reads at once lies in different
// banks.
struct KeySlot {
  uint4 key[kTileKeys][kPieces], value[kTileKeys][kPieces];

  static constexpr __device__ __forceinline__ int key_piece(int key, int piece) { return piece ^ key % 2 * 4; }
  static constexpr __device__ __forceinline__ int value_piece(int key, int piece) { return piece ^ (key & 6); }
  __device__ __forceinline__ void load(KeyTile& tile, int group, int quarter) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i / 2 * 8 + group, key_row = value_key(i, quarter);
      tile.key[i / 2][i % 2] = key[row][key_piece(row, i % 2 * 4 + quarter)];
      tile.value[i] = value[key_row][value_piece(key_row, group)];
    }
  }
};

// 16 queries in shared memory as `mma` takes them, so that a thread loads them into registers that follow one another.
struct QueryTile {
  uint4 part[kHeadDim / 16][32];  // [16 dimensions][what thread 4 * g + t holds, permuted]

  // A piece of a query. All lanes of a warp call it together, with the tokens of its second half 8 later than those of
  // its first.
  __device__ __forceinline__ void put(const uint4& x, int token, int piece) {
    const bool late = token & 8;
    const uint2 low = {x.x, x.y}, high = {x.z, x.w}, sent = late ? low : high, kept = late ? high : low;
    const uint2 other = {__shfl_xor_sync(0xffffffffu, sent.x, 16), __shfl_xor_sync(0xffffffffu, sent.y, 16)};
    part[piece / 4 * 2 + late][place(piece / 4, token % 8 * 4 + piece % 4)] =
        late ? uint4{other.x, kept.x, other.y, kept.y} : uint4{kept.x, other.x, kept.y, other.y};
  }
  __device__ __forceinline__ void load(uint4 (&q)[4], int lane) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      q[i] = part[i][place(i / 2, lane)];
  }

 private:
  static __device__ __forceinline__ int place(int half, int lane) { return lane ^ half * 4; }
};

// Keeps the compiler from working a value out anew where it is used, or an address from what it has in common with
// another one.
template <typename T>
__device__ __forceinline__ T held(T value) {
  if constexpr (sizeof(T) == 8)
    asm("" : "+l"(value));
  else
    asm("" : "+r"(value));
  return value;
}

// The same value, of which the assembler does not know that it is the same in all lanes: where a part of the shared
// address of a copy with a policy lies in a uniform register, ptxas 13.0 makes an illegal instruction of it.
__device__ __forceinline__ uint32_t of_lane(uint32_t value) {
  return __shfl_sync(0xffffffffu, value, threadIdx.x % 32);
}

// The ring of one head: tiles of 16 keys from token `first` on, counted from the chunk's first token, up to token -1. A
// thread copies the same piece of keys `key`, `key` + 4, .. of each tile.
struct Ring {
  int first, edge, capacity;  // edge: position of token 0
  int key;
  const bf16 *keys, *values;   // this piece of position 0
  int key_place, value_place;  // in a KeySlot, of key `key`

  __device__ __forceinline__ Ring(const void* ring_k, const void* ring_v, int64_t base, int first, int edge,
                                  int capacity, int lane)
      : first(first), edge(edge), capacity(capacity), key(lane / kPieces) {
    const int piece = lane % kPieces;
    keys = static_cast<const bf16*>(ring_k) + base + 8 * piece;
    values = static_cast<const bf16*>(ring_v) + base + 8 * piece;
    key_place = key * kPieces + KeySlot::key_piece(key, piece);
    value_place = key * kPieces + KeySlot::value_piece(key, piece);
  }
  // For copies in a loop.
  __device__ __forceinline__ void hold() {
    keys = held(keys), values = held(values);
    key_place = held(key_place), value_place = held(value_place);
  }
  // Starts the copies of a tile by one warp.
  __device__ __forceinline__ void copy(KeySlot& slot, int index) const {
    for_pieces(index, [&](int i, unsigned place, bool wanted) {
      copy_async(slot.key[i] + key_place, keys + place * kHeadDim, wanted);
      copy_async(slot.value[i] + (value_place ^ i % 8), values + place * kHeadDim, wanted);
    });
  }
  // The same with a policy of L2. All lanes of a warp together.
  __device__ __forceinline__ void copy(KeySlot& slot, int index, uint64_t policy) const {
    const uint32_t keys_to = of_lane(shared_address(slot.key[0] + key_place));
    const uint32_t values_to = keys_to + static_cast<uint32_t>(offsetof(KeySlot, value)) - 16 * key_place;
    for_pieces(index, [&](int i, unsigned place, bool wanted) {
      const uint32_t row = 16 * kPieces * i;
      copy_async(keys_to + row, keys + place * kHeadDim, wanted, policy);
      copy_async(values_to + row + 16 * (value_place ^ i % 8), values + place * kHeadDim, wanted, policy);
    });
  }

 private:
  // `copy(i, place, wanted)`: of key `key` + i of a tile.
  template <typename Copy>
  __device__ __forceinline__ void for_pieces(int index, const Copy& copy) const {
    const int token = first + index * kTileKeys + key, position = edge + token;
#pragma unroll
    for (int i = 0; i < kTileKeys; i += 4) {
      // A position below 0, as unsigned, is beyond all others.
      const unsigned place = min(static_cast<unsigned>(position + i), static_cast<unsigned>(position + i + capacity));
      static_assert(KeySlot::key_piece(4, 0) == 0 && KeySlot::value_piece(4, 0) == 4);
      copy(i, place, token < -i);
    }
  }
};

// What 16 queries from token `query` on see of a tile of keys from token `first` on, of which those at or beyond `end`
// do not count.
struct TileSight {
  int first, end;
  bool whole;  // all of them see all of it

  TileSight() = default;
  __device__ __forceinline__ TileSight(int first, int end, int query, int window)
      : first(first),
        end(end),
        whole(first + kTileKeys <= end && first + kTileKeys - 1 <= query && query + kTileQueries - 1 - first < window) {
  }
};

// Attention of 16 queries over the keys seen so far; rows g and g + 8 of this thread.
struct Softmax {
  float highest[2] = {kLowest, kLowest};  // what weights are relative to; the highest score is hardly above
  float total[2] = {};                    // of this thread's keys alone
  float result[kPieces][4] = {};          // [j][2h + i]: dimension 16t + 8i + j of row g + 8h

  // Scores of a tile's keys, to be handed to `mask` and `weigh`. `q`: [row g, row g + 8][32 dimensions: 8t .. 8t + 7],
  // or what a QueryTile has for this thread.
  static __device__ __forceinline__ void multiply(float (&score)[2][4], const KeyTile& tile, const uint4 (&q)[2][2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        mma(score[i], q[0][j], q[1][j], tile.key[i][j]);
  }
  static __device__ __forceinline__ void multiply(float (&score)[2][4], const KeyTile& tile, const uint4 (&q)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint4 &key = tile.key[i][j], &first = q[2 * j], &second = q[2 * j + 1];
        mma(score[i], first.x, first.y, first.z, first.w, key.x, key.y);
        mma(score[i], second.x, second.y, second.z, second.w, key.z, key.w);
      }
  }
  // Leaves the scores of a tile that count. `query`: the first token.
  static __device__ __forceinline__ void mask(float (&score)[2][4], const TileSight& sight, int query, int window) {
    if (sight.whole) return;
    const int group = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int token = sight.first + value_key(i / 4 * 2 + i % 2, quarter);
      const int ahead = query + group + i % 4 / 2 * 8 - token;
      if (token >= sight.end || ahead < 0 || ahead >= window) score[i / 4][i % 4] = -INFINITY;
    }
  }
  // The highest score of N tiles that this thread has of row g + 8h.
  template <int N>
  static __device__ __forceinline__ float top(const float (&score)[N][2][4], int h) {
    float top = -INFINITY;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        top = fmaxf(top, score[n][i / 2][2 * h + i % 2]);
    return top;
  }
  // Whether one is far above what weights are relative to.
  template <int N>
  __device__ __forceinline__ bool exceeded(const float (&score)[N][2][4], float scale) const {
    return fmaf(top(score, 0), scale, -highest[0]) > kSlack | fmaf(top(score, 1), scale, -highest[1]) > kSlack;
  }
  // Makes weights relative to the highest score so far. All lanes of a warp together.
  template <int N>
  __device__ __forceinline__ void raise(const float (&score)[N][2][4], float scale) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float highest_now = fmaxf(highest[h], top(score, h) * scale);
      highest_now = fmaxf(highest_now, __shfl_xor_sync(0xffffffffu, highest_now, 1));
      highest_now = fmaxf(highest_now, __shfl_xor_sync(0xffffffffu, highest_now, 2));
      const float kept = exp2_approx(highest[h] - highest_now);
      highest[h] = highest_now;
      total[h] *= kept;
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        result[j][2 * h] *= kept;
        result[j][2 * h + 1] *= kept;
      }
    }
  }
  // Makes weights of the scores of N tiles, to be handed to `gather` before the next ones.
  template <int N>
  __device__ __forceinline__ void weigh(float (&score)[N][2][4], float scale) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& s = score[n][i / 4][i % 4];
        s = exp2_approx(fmaf(s, scale, -highest[i % 4 / 2]));
        total[i % 4 / 2] += s;
      }
  }
  // Adds a tile's values.
  __device__ __forceinline__ void gather(const float (&weight)[2][4], const KeyTile& tile) {
    uint32_t weights[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      weights[i] = pack_bf16(weight[i / 2][2 * (i % 2)], weight[i / 2][2 * (i % 2) + 1]);
    const uint32_t* values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      values[i] = reinterpret_cast<const uint32_t*>(&tile.value[i]);
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const unsigned select = j % 2 ? 0x7632 : 0x5410;
      mma(result[j], weights[0], weights[1], weights[2], weights[3],
          __byte_perm(values[0][j / 2], values[1][j / 2], select),
          __byte_perm(values[2][j / 2], values[3][j / 2], select));
    }
  }
  // The weights of row g + 8h over all keys. All lanes of a warp ask together.
  __device__ __forceinline__ float row_total(int h) const {
    float sum = total[h];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    return sum;
  }
  // Dimensions 16t + 4d .. 16t + 4d + 3 of row g + 8h.
  __device__ __forceinline__ float4 four(int h, int d) const {
    const int first = d % 2 * 4, i = 2 * h + d / 2;
    return {result[first][i], result[first + 1][i], result[first + 2][i], result[first + 3][i]};
  }
};

// Four dimensions of a query's result over the keys of N softmaxes: `sums(n)` has the highest score and the total of
// the weights of one, `result(n)` its four.
template <int N, typename Sums, typename Result>
__device__ __forceinline__ float4 merge(const Sums& sums, const Result& result) {
  float highest = kLowest, total = 0.0f;
  float4 y = {};
#pragma unroll
  for (int n = 0; n < N; ++n)
    highest = fmaxf(highest, sums(n).x);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float weight = exp2_approx(sums(n).x - highest);
    const float4 x = result(n);
    total += weight * sums(n).y;
    y = {fmaf(weight, x.x, y.x), fmaf(weight, x.y, y.y), fmaf(weight, x.z, y.z), fmaf(weight, x.w, y.w)};
  }
  const float factor = __fdividef(1.0f, total);
  return {y.x * factor, y.y * factor, y.z * factor, y.w * factor};
}

// Where the floats 4i .. 4i + 3 of a query's result lie in shared memory, as float4: permuted, so that what the threads
// of a warp hold goes to different banks.
__device__ __forceinline__ int result_place(int query, int i) {
  return query * (kHeadDim / 4) + (i ^ (query & 1) ^ i / 8 * 2);
}

// Slot of a row and what it had consumed.
struct RingPlace {
  int64_t slot, start;
};

// Can be used as an index also ahead of the wait for the kernel that writes `slots` and `offset`, when it is a guess.
__device__ __forceinline__ RingPlace ring_place(const RingAttentionParams& params, int64_t row) {
  const int slot = *static_cast<const volatile int32_t*>(params.slots + row);
  if (slot < 0 || slot >= params.ring_slots) return {0, 0};
  const int64_t start = *static_cast<const volatile int64_t*>(params.offset + slot);
  return {slot, start < 0 ? 0 : start};
}

// Whether L2 has room for the rings of all rows.
__device__ __forceinline__ bool fit_l2(const RingAttentionParams& params) {
  constexpr int64_t kRoom = 32 << 20;
  return int64_t{params.batch} * params.heads * params.capacity * kHeadDim * 2 * sizeof(bf16) <= kRoom;
}

// What the ring of a head holds, into L2, if there is room for those of all rows: else they would push each other out.
__device__ __forceinline__ void prefetch_ring(const RingAttentionParams& params, const RingPlace& place, int head) {
  const int64_t ring = (place.slot * params.heads + head) * params.capacity * kHeadDim;
  if (!fit_l2(params)) return;
  const int count = static_cast<int>(place.start < params.capacity ? place.start : params.capacity);
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    prefetch_l2(static_cast<const bf16*>(params.ring_k) + ring + i * kHeadDim);
    prefetch_l2(static_cast<const bf16*>(params.ring_v) + ring + i * kHeadDim);
  }
}

// How a block of short chunks begins. Whether the wait for the kernel ahead is still due: that kernel writes `qkv` alone
// then, since the caller says so, and all else is asked for while it ends.
__device__ __forceinline__ bool wait_is_due(const RingAttentionParams& params, int64_t row, int head) {
  cudaTriggerProgrammaticLaunchCompletion();
  const bool early = params.dependent_launch == MOSS_DEPENDENT_EARLY;
  if (!early) {
    if (params.dependent_launch) prefetch_ring(params, ring_place(params, row), head);
    cudaGridDependencySynchronize();
  }
  return early;
}

}  // namespace moss
