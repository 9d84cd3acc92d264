// moss_prefill_linear with the gate, where blocks take several tiles, so that the gate of one can be hidden by the
// products of the next: a block's two consumers, warpgroups that have a tile of 128 or 64 rows each, take turns on the
// tensor cores. One more thread keeps the copy engine ahead.
#include <cuda.h>

#include "checks.h"
#include "device/prefill_store.cuh"
#include "device/tile_turns.cuh"
#include "launch.h"
#include "prefill_linear.h"
#include "tensor_map.h"

namespace moss {
namespace {

constexpr char kOp[] = "prefill_linear";
constexpr int kThreads = 128 * (1 + kTurnConsumers);

// Tiles of an output: the first `whole` have 128 rows, `pairs` of them to a column of tiles; the rest have 64, so that
// the last round is a short one. Of `pair_tiles` that could have 128 rows, those beyond `whole` are cut in two.
struct Cut {
  int64_t pairs, pair_tiles, whole, tiles;

  Cut(const PrefillLinearParams& params, int columns, int multiprocessors) {
    const int64_t column_tiles = (params.outputs + columns - 1) / columns;
    const int groups = (params.rows + kGroupRows - 1) / kGroupRows;
    pairs = groups / kHalves;
    pair_tiles = pairs * column_tiles;
    const int64_t leftover = groups % kHalves * column_tiles, last = pair_tiles % multiprocessors;
    whole = 2 * last + leftover <= multiprocessors ? pair_tiles - last : pair_tiles;
    tiles = whole + 2 * (pair_tiles - whole) + leftover;
  }
};

struct Arguments : PrefillLinearParams {
  CUtensorMap x_map, weight_map;
  int pairs, pair_tiles, whole, tiles;  // of Cut
};

template <int N>
using Memory = Shared<N, kHalves>;

// First row and column of a tile, and the times 64 rows that it has. Neighbours share their weights.
template <int N>
struct Tile {
  int row, column, halves;

  __device__ __forceinline__ Tile(const Arguments& arguments, int index) {
    const int half = index - arguments.whole, pair = half < 0 ? index : arguments.whole + half / 2;
    halves = half < 0 ? kHalves : 1;
    if (pair < arguments.pair_tiles) {
      row = (pair % arguments.pairs * kHalves + (half < 0 ? 0 : half % 2)) * kGroupRows;
      column = pair / arguments.pairs * N;
    } else {
      row = arguments.pairs * kHalves * kGroupRows;
      column = (half - 2 * (arguments.pair_tiles - arguments.whole)) * N;
    }
  }
};

// Weights of the first stages come before the wait for the kernel ahead.
template <int N>
__device__ __forceinline__ void produce(const Arguments& arguments, Memory<N> shared) {
  const auto load_weights = [&](const Tile<N>& tile, int step, int stage) {
    barrier_expect(shared.full(stage), (tile.halves * kGroupRows + N) * kStep * 2);
    tensor_load(shared.weights(stage), arguments.weight_map, step * kStep, tile.column, shared.full(stage));
  };
  const auto load_rows = [&](const Tile<N>& tile, int step, int stage) {
    for (int half = 0; half < tile.halves; ++half)
      tensor_load(shared.rows(stage) + half * kGroupRows * kStep * 2, arguments.x_map, step * kStep,
                  tile.row + half * kGroupRows, shared.full(stage));
  };
  Ring<shared.kStages> ring;
  const Tile<N> first(arguments, blockIdx.x);
  const int steps = arguments.inputs / kStep, early = min(steps, shared.kStages);
  for (int i = 0; i < early; ++i) load_weights(first, i, i);
  cudaGridDependencySynchronize();
  for (int i = 0; i < early; ++i, ring.advance()) load_rows(first, i, i);
  int begin = early;
  for (int index = blockIdx.x; index < arguments.tiles; index += gridDim.x, begin = 0) {
    const Tile<N> tile(arguments, index);
    for (int step = begin; step < steps; ++step, ring.advance()) {
      barrier_wait(shared.empty(ring.stage), ring.parity ^ 1);
      load_weights(tile, step, ring.stage);
      load_rows(tile, step, ring.stage);
    }
  }
}

template <int N>
__device__ __forceinline__ void consume(const Arguments& arguments, Memory<N> shared) {
  const int group = threadIdx.x / 128 - 1, steps = arguments.inputs / kStep;
  __nv_bfloat16* const out = static_cast<__nv_bfloat16*>(arguments.out);
  const auto finish = [&](const float (&sum)[N / 2], const Tile<N>& tile, int half) {
    store<N, true>(sum, Place(arguments, tile.row + half * kGroupRows, tile.column), out);
  };
  Ring<shared.kStages> ring;
  skip(ring, group * steps);
  if (group == 1) named_arrive(turn_of(0));
  cudaGridDependencySynchronize();
  for (int index = blockIdx.x + group * gridDim.x; index < arguments.tiles; index += kTurnConsumers * gridDim.x) {
    const Tile<N> tile(arguments, index);
    const bool more = index + gridDim.x < arguments.tiles;
    float sum[kHalves][N / 2];
    if (tile.halves == kHalves) {
      multiply_in_turn<kHalves>(sum, shared, ring, steps, group, more);
      finish(sum[1], tile, 1);
    } else {
      multiply_in_turn<1>(sum, shared, ring, steps, group, more);
    }
    finish(sum[0], tile, 0);
    skip(ring, steps);
  }
}

template <int N>
__global__ void __launch_bounds__(kThreads, 1)
    prefill_linear_pingpong_kernel(const __grid_constant__ Arguments arguments) {
  extern __shared__ char memory[];
  const Memory<N> shared{aligned_address(memory)};
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

// A multiprocessor takes tiles in turn: the first one those of the most cycles.
template <int N>
int64_t count_cycles(const PrefillLinearParams& params, int multiprocessors) {
  const Cut cut(params, N, multiprocessors);
  const auto rounds = [&](int64_t tiles) { return (tiles + multiprocessors - 1) / multiprocessors; };
  const int64_t whole = rounds(cut.whole), halves = rounds(cut.tiles) - whole;
  return params.inputs / kStep * (whole * stage_cycles(kHalves, N) + halves * stage_cycles(1, N)) + kTileCycles;
}

template <int N>
MossStatus launch(const PrefillLinearParams& params, int multiprocessors) {
  const Cut cut(params, N, multiprocessors);
  MossStatus status = check_range(kOp, "tiles", cut.tiles, 1, kMostRows);
  Arguments arguments = {};
  static_cast<PrefillLinearParams&>(arguments) = params;
  arguments.pairs = static_cast<int>(cut.pairs), arguments.pair_tiles = static_cast<int>(cut.pair_tiles);
  arguments.whole = static_cast<int>(cut.whole), arguments.tiles = static_cast<int>(cut.tiles);
  if (status == MOSS_OK) status = make_map(kOp, &arguments.x_map, params.x, params.rows, params.inputs, kGroupRows);
  if (status == MOSS_OK) status = make_map(kOp, &arguments.weight_map, params.weight, params.outputs, params.inputs, N);
  const auto kernel = prefill_linear_pingpong_kernel<N>;
  if (status == MOSS_OK)
    status = check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Memory<N>::kBytes),
                        kOp, "cudaFuncSetAttribute");
  if (status != MOSS_OK) return status;
  const dim3 grid(arguments.tiles < multiprocessors ? arguments.tiles : multiprocessors);
  return launch_kernel(kOp, kernel, arguments, grid, dim3(kThreads), Memory<N>::kBytes);
}

template <int N>
constexpr PrefillVariant kVariant = {MOSS_LINEAR_GATE_UP, Memory<N>::kRows, N, count_cycles<N>, launch<N>};

}  // namespace

const PrefillVariant kPingpongVariants[] = {kVariant<152>, kVariant<184>, kVariant<192>};

}  // namespace moss
