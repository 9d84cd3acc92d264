// The product phases of local_frame_decode: a warp streams weights ahead of everything, another one brings activations
// once their phase has begun, and two warpgroups multiply.
#pragma once
#include <type_traits>

#include "device/bulk_copy.cuh"
#include "device/local_frame.cuh"
#include "device/tagged.cuh"
#include "device/wgmma.cuh"

namespace moss::local_frame {

// Shared memory. COLUMNS: the batch, padded to 8, 16, 32, 64 or 128. SCALE: stages are so many times longer than a
// product's kStageK16, which spreads the cost of a stage's barriers where the columns are few. OTHER_BYTES: what the
// block needs besides. Weights get what the stages of activations leave: both hide latency.
template <int COLUMNS, int SCALE, int OTHER_BYTES>
struct Rings {
  static constexpr int kColumns = COLUMNS;
  static constexpr int kCapacity = kStageBytes * SCALE;
  static constexpr int kXSteps = COLUMNS <= 16 ? 8 : 5;  // at most, of a stage of activations
  static constexpr int kXCapacity = COLUMNS * kXSteps * 32;
  static constexpr int kXStages = COLUMNS == 8 ? 16 : COLUMNS == 16 ? 9 : COLUMNS == 32 ? 7 : COLUMNS == 64 ? 4 : 6;
  static constexpr int kBarrierBytes = 16;  // two a stage
  static constexpr int kFreeBytes = kSharedBytes - OTHER_BYTES - kXStages * (kXCapacity + kBarrierBytes);
  static constexpr int kWeightStages = kFreeBytes / (kCapacity + kBarrierBytes);

  alignas(128) uint8_t weights[kWeightStages][kCapacity];
  alignas(128) uint8_t x[kXStages][kXCapacity];
  uint64_t weights_full[kWeightStages], weights_empty[kWeightStages];
  uint64_t x_full[kXStages], x_empty[kXStages];

  // A product's stages in these rings. One of weights takes kXPerStage of activations, of kStepsX steps each.
  template <class P>
  struct Stages {
    static constexpr int kSteps = P::kStageK16 * SCALE;
    static constexpr int kCount = P::kK16 / kSteps;
    static constexpr int kXPerStage = (kSteps + kXSteps - 1) / kXSteps;
    static constexpr int kStepsX = kSteps / kXPerStage;
    static constexpr int kBytes = P::kRows * kSteps * 32;
    static constexpr int kXBytes = COLUMNS * kStepsX * 32;
    static_assert(P::kK16 % kSteps == 0 && kSteps % kXPerStage == 0 && kBytes <= kCapacity);
  };
};

// Position in a ring of `stages`.
struct Cursor {
  int index = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int stages) {
    if (++index == stages) index = 0, parity ^= 1u;
  }
};

// Counts the arrivals of the phases so far: what a waiter must see in the counter before the next phase.
struct Progress {
  unsigned* counter;
  unsigned target = 0;
  __device__ __forceinline__ void wait() const { counter_wait(counter, target); }
};

template <class Ring>
__device__ __forceinline__ void init_rings(Ring& rings) {
  constexpr uint32_t kWarps = kComputeThreads / 32;
  for (int i = 0; i < Ring::kWeightStages; ++i) {
    barrier_init(shared_address(&rings.weights_full[i]), 1);
    barrier_init(shared_address(&rings.weights_empty[i]), kWarps);
  }
  for (int i = 0; i < Ring::kXStages; ++i) {
    barrier_init(shared_address(&rings.x_full[i]), 1);
    barrier_init(shared_address(&rings.x_empty[i]), kWarps);
  }
  fence_async();
}

// The weight stages of this block in the order in which the frame (or, for a table, the chunk) consumes them.
template <class Dims, class Ring, bool TABLE>
struct WeightWalk {
  enum Kind { kKeyValue, kQuery, kProjection, kInnerIn, kInnerOut, kHead, kEnd };
  const bf16* packed;
  bool has_table;
  int kind = kKeyValue, position = 0, unit = blockIdx.x, stage = 0, stages = 0, units = 0;
  int piece_stages = 0, piece_end = 0;  // stages of a piece; the stage after the present one
  int64_t skip = 0;                     // elements from there to the unit's next piece
  uint32_t bytes = 0;
  const bf16* source = nullptr;

  __device__ __forceinline__ WeightWalk(const bf16* packed, bool has_table) : packed(packed), has_table(has_table) {
    open();
  }

  __device__ __forceinline__ bool done() const { return kind == kEnd; }

  template <class P>
  __device__ __forceinline__ void open(int64_t offset) {
    source = packed + offset + static_cast<int64_t>(unit) * P::kPieceElements;
    using Stages = typename Ring::template Stages<P>;
    static_assert(P::kPieceK16 % Stages::kSteps == 0);
    stage = 0, stages = Stages::kCount, units = P::kUnits, bytes = Stages::kBytes;
    piece_stages = piece_end = P::kPieceK16 / Stages::kSteps;
    skip = static_cast<int64_t>(P::kUnits - 1) * P::kPieceElements;
  }

  __device__ __forceinline__ void open() {
    using Pack = Packed<Dims>;
    if (kind == kKeyValue) open<typename Dims::KeyValue>(Pack::kKeyValue);
    if (kind == kQuery) open<typename Dims::Query>(Pack::kQuery);
    if (kind == kProjection) open<typename Dims::Projection>(Pack::kProjection);
    if (kind == kInnerIn) open<typename Dims::InnerIn>(Pack::kInnerIn);
    if (kind == kInnerOut) open<typename Dims::InnerOut>(Pack::kInnerOut);
    if (kind == kHead) open<typename Dims::Head>(Pack::kHead + position * Dims::Head::kElements);
  }

  __device__ __forceinline__ void next() {
    source += bytes / 2;
    if (++stage == piece_end) piece_end += piece_stages, source += skip;
    if (stage < stages) return;
    unit += gridDim.x;
    if (unit >= units) {
      unit = blockIdx.x;
      if (kind == kHead) {
        ++position;
        kind = position == kCodebooks ? kEnd : has_table ? kProjection : kKeyValue;
      } else if (kind == kKeyValue) {
        // At position 0 the query is not needed: one key has all the weight.
        kind = TABLE || position > 0 ? kQuery : kProjection;
      } else {
        kind = TABLE && kind == kQuery ? kEnd : kind + 1;
      }
    }
    open();
  }
};

// Streams all weights of this block through the ring. Never waits for a phase: weights do not depend on activations, so
// that memory stays busy while the blocks wait for each other, as far as the ring reaches.
template <class Dims, bool TABLE, class Ring>
__device__ __forceinline__ void stream_weights(Ring& rings, const bf16* packed, bool has_table) {
  using Walk = WeightWalk<Dims, Ring, TABLE>;
  const uint64_t evict_first = policy_evict_first(), evict_last = policy_evict_last();
  Cursor cursor;
  for (Walk walk(packed, has_table); !walk.done(); walk.next()) {
    barrier_wait(shared_address(&rings.weights_empty[cursor.index]), cursor.parity ^ 1u);
    const uint32_t full = shared_address(&rings.weights_full[cursor.index]);
    barrier_expect(full, walk.bytes);
    // All but the heads come back at every position. L2 has room for the projection and, where activations are few, for
    // a quarter of fc_out.
    const bool keep = walk.kind == Walk::kProjection ||
                      (Ring::kColumns <= 16 && walk.kind == Walk::kInnerOut && walk.stage * 4 < walk.stages);
    bulk_load(shared_address(rings.weights[cursor.index]), walk.source, walk.bytes, full,
              keep ? evict_last : evict_first);
    cursor.advance(Ring::kWeightStages);
  }
}

// Streams the activations of one product; `wait(slice)` returns when those of a slice are there.
template <class P, class Ring, typename Wait>
__device__ __forceinline__ void stream_activations(Ring& rings, Cursor& cursor, const uint8_t* x, uint64_t policy,
                                                   Wait&& wait) {
  using Stages = typename Ring::template Stages<P>;
  constexpr int kBytes = Stages::kXBytes;
  for (int unit = blockIdx.x; unit < P::kUnits; unit += gridDim.x) {
    const uint8_t* source = x + static_cast<int64_t>(unit / P::kGroups) * P::kK16 * Ring::kColumns * 32;
    wait(unit / P::kGroups);
    fence_async_global();
    for (int stage = 0; stage < Stages::kCount * Stages::kXPerStage; ++stage) {
      barrier_wait(shared_address(&rings.x_empty[cursor.index]), cursor.parity ^ 1u);
      const uint32_t full = shared_address(&rings.x_full[cursor.index]);
      barrier_expect(full, kBytes);
      bulk_load(shared_address(rings.x[cursor.index]), source + static_cast<int64_t>(stage) * kBytes, kBytes, full,
                policy);
      cursor.advance(Ring::kXStages);
    }
  }
}

struct Cursors {
  Cursor weights, x;
};

// Multiplies one unit: tiles FIRST, FIRST + STEP, ... of 64 weight rows (the last may be short: its surplus rows read
// whatever follows in shared memory and are never stored) with batch columns column .. column + TILE_COLUMNS - 1.
template <class P, class Ring, int TILE_COLUMNS, int TILES, int FIRST, int STEP>
__device__ __forceinline__ void multiply(Ring& rings, Cursors& cursors, int column,
                                         float (&sum)[TILES > 0 ? TILES : 1][TILE_COLUMNS / 2]) {
  const bool elected = (threadIdx.x & 31) == 0;
  using Stages = typename Ring::template Stages<P>;
  const uint32_t a_ring = matrix_descriptor(shared_address(rings.weights[0]) + FIRST * 1024, P::kRows * 16);
  const uint32_t b_ring = matrix_descriptor(shared_address(rings.x[0]) + column * 16, Ring::kColumns * 16);
  int last_x = -1, last_weights = 0;
#pragma unroll 1
  for (int stage = 0; stage < Stages::kCount; ++stage) {
    const Cursor now_weights = cursors.weights;
    cursors.weights.advance(Ring::kWeightStages);
    barrier_wait(shared_address(&rings.weights_full[now_weights.index]), now_weights.parity);
#pragma unroll
    for (int part = 0; part < Stages::kXPerStage; ++part) {
      const Cursor now_x = cursors.x;
      cursors.x.advance(Ring::kXStages);
      barrier_wait(shared_address(&rings.x_full[now_x.index]), now_x.parity);
      if constexpr (TILES > 0) {
        const uint32_t a = a_ring + now_weights.index * (Ring::kCapacity / 16) + part * Stages::kStepsX * P::kRows * 2;
        const uint32_t b = b_ring + now_x.index * (Ring::kXCapacity / 16);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < Stages::kStepsX; ++k) {
#pragma unroll
          for (int t = 0; t < TILES; ++t)
            wgmma(sum[t], a + (k * P::kRows * 2 + t * STEP * 64), b + k * Ring::kColumns * 2);
        }
        wgmma_commit();
        wgmma_wait<1>();
      }
      // All but the newest group are done: what they read may be overwritten.
      if (elected && last_x >= 0) {
        barrier_arrive(shared_address(&rings.x_empty[last_x]));
        if (part == 0) barrier_arrive(shared_address(&rings.weights_empty[last_weights]));
      }
      last_x = now_x.index;
    }
    last_weights = now_weights.index;
  }
  if constexpr (TILES > 0) wgmma_wait<0>();
  if (elected) {
    barrier_arrive(shared_address(&rings.x_empty[last_x]));
    barrier_arrive(shared_address(&rings.weights_empty[last_weights]));
  }
}

// Runs one unit on both warpgroups and hands every tile to `store(tile, sum, column)`. Up to 64 columns the warpgroups
// share the tiles; for 128 each takes all tiles with half of the columns.
template <class P, class Ring, typename Store>
__device__ __forceinline__ void multiply_unit(Ring& rings, Cursors& cursors, Store&& store) {
  constexpr int kColumns = Ring::kColumns < 64 ? Ring::kColumns : 64;
  // Taken from one lane, so that the compiler knows it to be the same for the warp and keeps descriptors uniform.
  const int group = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);
  auto run = [&](auto tiles, auto first, auto step, int column) {
    constexpr int kCount = decltype(tiles)::value, kFirst = decltype(first)::value, kStep = decltype(step)::value;
    float sum[kCount > 0 ? kCount : 1][kColumns / 2] = {};
    multiply<P, Ring, kColumns, kCount, kFirst, kStep>(rings, cursors, column, sum);
    if constexpr (kCount > 0) {
#pragma unroll
      for (int t = 0; t < kCount; ++t)
        store(kFirst + t * kStep, sum[t], column);
    }
  };
  using std::integral_constant;
  if constexpr (Ring::kColumns > 64) {
    run(integral_constant<int, P::kTiles>{}, integral_constant<int, 0>{}, integral_constant<int, 1>{}, group * 64);
  } else if (group == 0) {
    run(integral_constant<int, (P::kTiles + 1) / 2>{}, integral_constant<int, 0>{}, integral_constant<int, 2>{}, 0);
  } else {
    run(integral_constant<int, P::kTiles / 2>{}, integral_constant<int, 1>{}, integral_constant<int, 2>{}, 0);
  }
}

// Stores a tile of fp32 sums to [columns][outputs], tagged.
template <class P, int COLUMNS, int REGISTERS>
__device__ __forceinline__ void store_partial(float* partial, int unit, int batch, int tile,
                                              const float (&sum)[REGISTERS], int column, uint32_t tag) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  const int row = tile * 64 + warp * 16 + lane / 4, first = column + 2 * (lane & 3);
  float* out = partial + (static_cast<int64_t>(unit / P::kGroups) * COLUMNS + first) * P::kOutputs +
               (unit % P::kGroups) * P::kRows + row;
  // Offsets and limits that differ by constants keep addresses out of registers.
  const int columns = batch - first;
#pragma unroll
  for (int i = 0; i < REGISTERS; ++i) {
    const int b = 8 * (i / 4) + (i & 1), below = 8 * ((i >> 1) & 1);
    if (row + below < P::kRows && b < columns) out[b * P::kOutputs + below] = tagged(sum[i], tag);
  }
}

// The values of `bias` at the rows that a thread holds of each tile; loaded before a product, used after it.
template <class P>
struct TileBias {
  float low[P::kTiles], high[P::kTiles];
  __device__ __forceinline__ explicit TileBias(const bf16* bias) {
#pragma unroll
    for (int t = 0; t < P::kTiles; ++t) {
      const int row = t * 64 + ((threadIdx.x >> 5) & 3) * 16 + (threadIdx.x & 31) / 4;
      low[t] = row < P::kRows ? __bfloat162float(bias[row]) : 0.0f;
      high[t] = row + 8 < P::kRows ? __bfloat162float(bias[row + 8]) : 0.0f;
    }
  }
};

// Rounds a tile, after `finish(sum + bias)`, to bf16 in `staging`, laid out as [row / 8][COLUMNS][8].
template <class P, int COLUMNS, int REGISTERS, typename Finish>
__device__ __forceinline__ void stage_tile(uint8_t* staging, int tile, const float (&sum)[REGISTERS], int column,
                                           const TileBias<P>& bias, Finish&& finish) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  const int first = tile * 64 + warp * 16;
  if (first >= P::kRows) return;
  const int matrix = lane >> 3;
  const uint32_t base = shared_address(staging) + ((first / 8 + (matrix & 1)) * COLUMNS + column + (lane & 7)) * 16;
  const auto pack = [&](float shift, float left, float right) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(finish(left + shift), finish(right + shift));
    return *reinterpret_cast<const uint32_t*>(&pair);
  };
  const float low = bias.low[tile], high = bias.high[tile];
#pragma unroll
  for (int j = 0; j < REGISTERS / 4; j += 2) {
    const uint32_t a = pack(low, sum[4 * j], sum[4 * j + 1]), b = pack(high, sum[4 * j + 2], sum[4 * j + 3]);
    if constexpr (REGISTERS == 4) {
      asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(base), "r"(a), "r"(b)
                   : "memory");
    } else {
      const uint32_t c = pack(low, sum[4 * j + 4], sum[4 * j + 5]), d = pack(high, sum[4 * j + 6], sum[4 * j + 7]);
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                       base + (j + (matrix >> 1)) * 128),
                   "r"(a), "r"(b), "r"(c), "r"(d)
                   : "memory");
    }
  }
}

}  // namespace moss::local_frame
