// moss_prefill_linear with the gate, where blocks take several tiles, so that the gate of one can be hidden by the
// products of the next: a block's two consumers, warpgroups that have a tile of 128 or 64 rows each, take turns on the
// tensor cores. One more thread keeps the copy engine ahead.
#include <cuda.h>

#include <algorithm>

#include "checks.h"
#include "device/linear_store.cuh"
#include "device/tile_turns.cuh"
#include "launch.h"
#include "prefill_linear.h"
#include "tensor_map.h"

namespace moss {
namespace {

constexpr char kOp[] = "prefill_linear";
constexpr int kThreads = 128 * (1 + kTurnConsumers);

// How many tiles an output has: of 128 rows, `pairs` to a column of tiles, and of the 64 that are left below them.
struct Counts {
  int64_t pairs, whole, halves;

  Counts(const PrefillLinearParams& params, int columns) {
    const int64_t column_tiles = (params.outputs + columns - 1) / columns;
    const int groups = (params.rows + kGroupRows - 1) / kGroupRows;
    pairs = groups / kHalves;
    whole = pairs * column_tiles;
    halves = groups % kHalves * column_tiles;
  }
};

struct Arguments : PrefillLinearParams {
  CUtensorMap x_map, weight_map;
  int pairs, whole, halves;  // of Counts
};

template <int N>
using Memory = Shared<N, kHalves>;

// First row and column of a tile, and the times 64 rows that it has.
struct Tile {
  int row, column, halves;
};

// The tiles of a block: of those of 128 rows and of those of 64 one in gridDim.x each. One of 64 rows comes when the
// others of its column do, while L2 has their weights.
template <int N>
struct Tiles {
  int whole = blockIdx.x, half = blockIdx.x;

  __device__ __forceinline__ bool next(const Arguments& arguments, Tile& tile) {
    const bool more = whole < arguments.whole;
    if (half < arguments.halves && (!more || half <= whole / arguments.pairs)) {
      tile = {arguments.pairs * kHalves * kGroupRows, half * N, 1};
      half += gridDim.x;
      return true;
    }
    if (!more) return false;
    tile = {whole % arguments.pairs * kHalves * kGroupRows, whole / arguments.pairs * N, kHalves};
    whole += gridDim.x;
    return true;
  }
};

// Weights of the first stages come before the wait for the kernel ahead.
template <int N>
__device__ __forceinline__ void produce(const Arguments& arguments, Memory<N> shared) {
  // All row tiles of a column read them at about one time, and then nobody does for long.
  const uint64_t policy = policy_evict_first();
  const auto load_weights = [&](const Tile& tile, int step, int stage) {
    barrier_expect(shared.full(stage), (tile.halves * kGroupRows + N) * kStep * 2);
    tensor_load(shared.weights(stage), arguments.weight_map, step * kStep, tile.column, shared.full(stage), policy);
  };
  const auto load_rows = [&](const Tile& tile, int step, int stage) {
    for (int half = 0; half < tile.halves; ++half)
      tensor_load(shared.rows(stage) + half * kGroupRows * kStep * 2, arguments.x_map, step * kStep,
                  tile.row + half * kGroupRows, shared.full(stage));
  };
  Ring<shared.kStages> ring;
  Tiles<N> tiles;
  Tile tile;
  tiles.next(arguments, tile);
  const int steps = arguments.inputs / kStep, early = min(steps, shared.kStages);
  for (int i = 0; i < early; ++i) load_weights(tile, i, i);
  cudaGridDependencySynchronize();
  for (int i = 0; i < early; ++i, ring.advance()) load_rows(tile, i, i);
  int begin = early;
  do {
    for (int step = begin; step < steps; ++step, ring.advance()) {
      barrier_wait(shared.empty(ring.stage), ring.parity ^ 1);
      load_weights(tile, step, ring.stage);
      load_rows(tile, step, ring.stage);
    }
    begin = 0;
  } while (tiles.next(arguments, tile));
}

template <int N>
__device__ __forceinline__ void consume(const Arguments& arguments, Memory<N> shared) {
  const int group = warpgroup() - 1, steps = arguments.inputs / kStep;
  __nv_bfloat16* const out = static_cast<__nv_bfloat16*>(arguments.out);
  const auto finish = [&](const float (&sum)[N / 2], const Tile& tile, int half) {
    store<N, true>(sum, Place(arguments, tile.row + half * kGroupRows, tile.column), out);
  };
  Ring<shared.kStages> ring;
  skip(ring, group * steps);
  if (group == 1) named_arrive(turn_of(0));
  cudaGridDependencySynchronize();
  Tiles<N> tiles;
  Tile tile, others;
  bool mine = tiles.next(arguments, tile);
  if (group == 1) mine = tiles.next(arguments, tile);
  while (mine) {
    const bool more = tiles.next(arguments, others);
    float sum[kHalves][N / 2];
    if (tile.halves == kHalves) {
      multiply_in_turn<kHalves>(sum, shared, ring, steps, group, more);
      finish(sum[1], tile, 1);
    } else {
      multiply_in_turn<1>(sum, shared, ring, steps, group, more);
    }
    finish(sum[0], tile, 0);
    skip(ring, steps);
    mine = tiles.next(arguments, tile);
  }
}

template <int N>
__global__ void __launch_bounds__(kThreads, 1)
    prefill_linear_pingpong_kernel(const __grid_constant__ Arguments arguments) {
  extern __shared__ char memory[];
  const Memory<N> shared{kept_address(memory)};
  cudaTriggerProgrammaticLaunchCompletion();
  if (threadIdx.x == 0) init_stages(shared);
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_shrink<24>();
    if (threadIdx.x == 0) produce(arguments, shared);
  } else {
    registers_grow<240>();
    consume(arguments, shared);
  }
}

template <int N>
int64_t count_cycles(const PrefillLinearParams& params, int multiprocessors) {
  const Counts counts(params, N);
  const auto rounds = [&](int64_t tiles) { return (tiles + multiprocessors - 1) / multiprocessors; };
  const int64_t stage = rounds(counts.whole) * stage_cycles(kHalves, N) + rounds(counts.halves) * stage_cycles(1, N);
  return params.inputs / kStep * stage + kTileCycles;
}

template <int N>
MossStatus launch(const PrefillLinearParams& params, int multiprocessors) {
  const Counts counts(params, N);
  const int64_t most = std::max(counts.whole, counts.halves);
  MossStatus status = check_range(kOp, "tiles", most, 1, kMostRows);
  Arguments arguments = {};
  static_cast<PrefillLinearParams&>(arguments) = params;
  arguments.pairs = static_cast<int>(counts.pairs);
  arguments.whole = static_cast<int>(counts.whole), arguments.halves = static_cast<int>(counts.halves);
  if (status == MOSS_OK) status = make_map(kOp, &arguments.x_map, params.x, params.rows, params.inputs, kGroupRows);
  if (status == MOSS_OK) status = make_map(kOp, &arguments.weight_map, params.weight, params.outputs, params.inputs, N);
  const auto kernel = prefill_linear_pingpong_kernel<N>;
  if (status == MOSS_OK)
    status = check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Memory<N>::kBytes),
                        kOp, "cudaFuncSetAttribute");
  if (status != MOSS_OK) return status;
  const dim3 grid(std::min<int64_t>(most, multiprocessors));
  return launch_kernel(kOp, kernel, arguments, grid, dim3(kThreads), Memory<N>::kBytes);
}

template <int N>
constexpr PrefillVariant kVariant = {MOSS_LINEAR_GATE_UP, Memory<N>::kRows, N, count_cycles<N>, launch<N>};

}  // namespace

const PrefillVariant kPingpongVariants[] = {kVariant<152>, kVariant<184>, kVariant<192>};

}  // namespace moss
