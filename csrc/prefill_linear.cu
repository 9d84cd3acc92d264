// moss_prefill_linear: for many rows, where the time is that of the tensor cores. A persistent block takes tiles of 64
// rows for each of its consumers, one to three warpgroups, and N outputs; one more thread keeps the copy engine ahead.
// With the gate, where a block takes several tiles, consumers had better have a tile each: prefill_linear_pingpong.cu.
// The sum over a slice of K runs in steps of 16 in ascending order in every tile, so that its size cannot show.
#include <cuda.h>
#include <cuda_bf16.h>

#include <limits>

#include "device/linear_store.cuh"
#include "device/tile_product.cuh"
#include "launch.h"
#include "linear_checks.h"
#include "prefill_linear.h"
#include "tensor_map.h"

namespace moss {
namespace {

using bf16 = __nv_bfloat16;

constexpr char kOp[] = "prefill_linear";
constexpr int kRegisters[] = {0, 240, 240, 160};  // of a consumer's thread, by the number of consumers

// What the kernel reads: the caller's parameters, the tensors as the copy engine sees them, and counts.
struct Arguments : PrefillLinearParams {
  CUtensorMap x_map, weight_map;
  int row_tiles, column_tiles, tiles, steps;  // `steps`: of a slice
  int box_rows;                               // of x, that come at once
};

// First row and column of a tile, and its slice of K if slices are kept apart. Neighbours share their weights.
template <int N, int CONSUMERS>
struct Tile {
  int row, column, slice;

  __device__ __forceinline__ Tile(const Arguments& arguments, int index) {
    row = index % arguments.row_tiles * Shared<N, CONSUMERS>::kRows;
    const int rest = index / arguments.row_tiles;
    column = rest % arguments.column_tiles * N;
    slice = rest / arguments.column_tiles;
  }
};

// Weights of the first stages come before the wait for the kernel ahead.
template <int N, int CONSUMERS>
__device__ __forceinline__ void produce(const Arguments& arguments, Shared<N, CONSUMERS> shared) {
  // All row tiles of a column read them at about one time, and then nobody does for long.
  const uint64_t policy = policy_evict_first();
  const auto load_weights = [&](int column, int step, int stage) {
    barrier_expect(shared.full(stage), (arguments.box_rows + N) * kStep * 2);
    tensor_load(shared.weights(stage), arguments.weight_map, step * kStep, column, shared.full(stage), policy);
  };
  const auto load_rows = [&](int row, int step, int stage) {
    tensor_load(shared.rows(stage), arguments.x_map, step * kStep, row, shared.full(stage));
  };
  Ring<shared.kStages> ring;
  const int steps = arguments.mode == MOSS_LINEAR_PARTIAL ? arguments.steps : arguments.steps * arguments.slices;
  const Tile<N, CONSUMERS> first(arguments, blockIdx.x);
  const int begin = first.slice * steps, early = min(steps, shared.kStages);
  for (int i = 0; i < early; ++i) load_weights(first.column, begin + i, i);
  cudaGridDependencySynchronize();
  for (int i = 0; i < early; ++i, ring.advance()) load_rows(first.row, begin + i, i);
  int done = early;  // steps of the tile
  for (int index = blockIdx.x; index < arguments.tiles; index += gridDim.x, done = 0) {
    const Tile<N, CONSUMERS> tile(arguments, index);
    for (int step = tile.slice * steps + done; step < (tile.slice + 1) * steps; ++step, ring.advance()) {
      barrier_wait(shared.empty(ring.stage), ring.parity ^ 1);
      load_weights(tile.column, step, ring.stage);
      load_rows(tile.row, step, ring.stage);
    }
  }
}

// The stream's values of a tile, in the way in which `store` gives sums away; all loads are on their way together.
template <int N>
__device__ __forceinline__ void load_stream(float (&total)[N / 2], const Place& place, const bf16* stream) {
  uint4 words[2][(N / 8 + 3) / 4];
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int block = 0; block < N / 8; block += 4) {
      const int mine = block + place.quarter, column = place.column + 8 * mine;
      const int64_t row = place.row + 8 * half;
      const bool inside = mine < N / 8 && row < place.rows && column < place.outputs;
      words[half][block / 4] = {};
      if (inside) words[half][block / 4] = *reinterpret_cast<const uint4*>(stream + row * place.outputs + column);
    }
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int block = 0; block < N / 8; block += 4) {
      const uint4 mine = words[half][block / 4];
      uint32_t pairs[4] = {mine.x, mine.y, mine.z, mine.w};
      transpose_quad(pairs);
#pragma unroll
      for (int i = 0; i < 4 && block + i < N / 8; ++i) {
        const float2 wide = unpack_bf16(pairs[i]);
        total[4 * (block + i) + 2 * half] = wide.x, total[4 * (block + i) + 2 * half + 1] = wide.y;
      }
    }
}

template <int N, LinearMode MODE, int CONSUMERS>
__device__ __forceinline__ void consume(const Arguments& arguments, Shared<N, CONSUMERS> shared) {
  Ring<shared.kStages> ring;
  const int group = warpgroup() - 1;
  bf16* const out = static_cast<bf16*>(arguments.out);
  cudaGridDependencySynchronize();
  for (int index = blockIdx.x; index < arguments.tiles; index += gridDim.x) {
    const Tile<N, CONSUMERS> tile(arguments, index);
    const int first_row = tile.row + group * kGroupRows;
    const bool wanted = first_row < arguments.rows;
    const Place place(arguments, first_row, tile.column);
    float sum[N / 2];
    if constexpr (MODE == MOSS_LINEAR_ADD) {
      float total[N / 2];
      load_stream<N>(total, place, out);
      for (int slice = 0; slice < arguments.slices; ++slice) {
        multiply(sum, shared, ring, arguments.steps, group, wanted);
#pragma unroll
        for (int i = 0; i < N / 2; ++i) total[i] += sum[i];
      }
      store<N, false>(total, place, out);
    } else {
      multiply(sum, shared, ring, arguments.steps, group, wanted);
      if constexpr (MODE == MOSS_LINEAR_PARTIAL)
        store_slice<N>(sum, place, static_cast<float*>(arguments.out) + tile.slice * place.rows * place.outputs);
      else
        store<N, MODE == MOSS_LINEAR_GATE_UP>(sum, place, out);
    }
  }
}

template <int N, LinearMode MODE, int CONSUMERS>
__global__ void __launch_bounds__(128 * (1 + CONSUMERS), 1)
    prefill_linear_kernel(const __grid_constant__ Arguments arguments) {
  extern __shared__ char memory[];
  const Shared<N, CONSUMERS> shared{kept_address(memory)};
  cudaTriggerProgrammaticLaunchCompletion();
  if (threadIdx.x == 0) shared.init_barriers();
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_shrink<24>();
    if (threadIdx.x == 0) produce(arguments, shared);
  } else {
    registers_grow<kRegisters[CONSUMERS]>();
    consume<N, MODE>(arguments, shared);
  }
}

template <int N, LinearMode MODE, int CONSUMERS>
int64_t count_tiles(const PrefillLinearParams& params) {
  constexpr int kRows = Shared<N, CONSUMERS>::kRows;
  return int64_t{(params.rows + kRows - 1) / kRows} * ((params.outputs + N - 1) / N) *
         (MODE == MOSS_LINEAR_PARTIAL ? params.slices : 1);
}

template <int N, LinearMode MODE, int CONSUMERS>
int64_t count_cycles(const PrefillLinearParams& params, int multiprocessors) {
  const int64_t tiles = count_tiles<N, MODE, CONSUMERS>(params);
  const int64_t steps = params.inputs / (MODE == MOSS_LINEAR_PARTIAL ? params.slices : 1) / kStep;
  return (tiles + multiprocessors - 1) / multiprocessors * (steps * stage_cycles(CONSUMERS, N) + kTileCycles);
}

template <int N, LinearMode MODE, int CONSUMERS>
MossStatus launch(const PrefillLinearParams& params, int multiprocessors) {
  using Memory = Shared<N, CONSUMERS>;
  const int64_t tiles = count_tiles<N, MODE, CONSUMERS>(params);
  MossStatus status = check_range(kOp, "tiles", tiles, 1, kMostRows);
  Arguments arguments = {};
  static_cast<PrefillLinearParams&>(arguments) = params;
  arguments.row_tiles = (params.rows + Memory::kRows - 1) / Memory::kRows;
  arguments.column_tiles = (params.outputs + N - 1) / N;
  arguments.tiles = static_cast<int>(tiles);
  arguments.steps = params.inputs / params.slices / kStep;
  // A row beyond the last costs the copy engine no less than others; only the swizzle, of eight, needs some.
  arguments.box_rows = params.rows < Memory::kRows ? (params.rows + 7) / 8 * 8 : Memory::kRows;
  if (status == MOSS_OK)
    status = make_map(kOp, &arguments.x_map, params.x, params.rows, params.inputs, arguments.box_rows);
  if (status == MOSS_OK) status = make_map(kOp, &arguments.weight_map, params.weight, params.outputs, params.inputs, N);
  const auto kernel = prefill_linear_kernel<N, MODE, CONSUMERS>;
  if (status == MOSS_OK)
    status = check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Memory::kBytes), kOp,
                        "cudaFuncSetAttribute");
  if (status != MOSS_OK) return status;
  const dim3 grid(arguments.tiles < multiprocessors ? arguments.tiles : multiprocessors);
  return launch_kernel(kOp, kernel, arguments, grid, dim3(128 * (1 + CONSUMERS)), Memory::kBytes);
}

template <LinearMode MODE, int CONSUMERS, int N>
constexpr PrefillVariant kVariant = {MODE, kGroupRows * CONSUMERS, N, count_cycles<N, MODE, CONSUMERS>,
                                     launch<N, MODE, CONSUMERS>};

// With the widths of the backbone's linears, tiles for each of 132 multiprocessors, or a few less, at 64 to 768 rows
// and at 1,344.
constexpr PrefillVariant kVariants[] = {
    kVariant<MOSS_LINEAR_WHOLE, 1, 144>,   kVariant<MOSS_LINEAR_WHOLE, 1, 192>,   kVariant<MOSS_LINEAR_WHOLE, 1, 240>,
    kVariant<MOSS_LINEAR_WHOLE, 2, 144>,   kVariant<MOSS_LINEAR_WHOLE, 2, 192>,   kVariant<MOSS_LINEAR_WHOLE, 2, 240>,
    kVariant<MOSS_LINEAR_WHOLE, 3, 192>,   kVariant<MOSS_LINEAR_GATE_UP, 3, 152>, kVariant<MOSS_LINEAR_PARTIAL, 1, 160>,
    kVariant<MOSS_LINEAR_PARTIAL, 2, 160>, kVariant<MOSS_LINEAR_PARTIAL, 3, 80>,  kVariant<MOSS_LINEAR_ADD, 1, 104>,
    kVariant<MOSS_LINEAR_ADD, 1, 120>,     kVariant<MOSS_LINEAR_ADD, 1, 144>,     kVariant<MOSS_LINEAR_ADD, 1, 160>,
    kVariant<MOSS_LINEAR_ADD, 1, 184>,     kVariant<MOSS_LINEAR_ADD, 1, 200>,     kVariant<MOSS_LINEAR_ADD, 1, 216>,
    kVariant<MOSS_LINEAR_ADD, 2, 120>,     kVariant<MOSS_LINEAR_ADD, 2, 144>,     kVariant<MOSS_LINEAR_ADD, 2, 160>,
    kVariant<MOSS_LINEAR_ADD, 2, 200>,     kVariant<MOSS_LINEAR_ADD, 2, 216>,
};

// The variant that keeps the multiprocessors busy for the shortest time.
MossStatus dispatch(const PrefillLinearParams& params) {
  int device = 0, multiprocessors = 0;
  MossStatus status = check_cuda(cudaGetDevice(&device), kOp, "cudaGetDevice");
  if (status == MOSS_OK)
    status = check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), kOp,
                        "cudaDeviceGetAttribute");
  if (status != MOSS_OK) return status;
  const PrefillVariant* best = nullptr;
  int64_t least = std::numeric_limits<int64_t>::max();
  const auto consider = [&](const PrefillVariant& variant) {
    if (variant.mode != params.mode || (params.tile_rows != 0 && variant.rows != params.tile_rows) ||
        (params.columns != 0 && variant.columns != params.columns))
      return;
    const int64_t cycles = variant.cycles(params, multiprocessors);
    if (cycles < least) best = &variant, least = cycles;
  };
  for (const PrefillVariant& variant : kVariants) consider(variant);
  for (const PrefillVariant& variant : kPingpongVariants) consider(variant);
  if (best == nullptr)
    return set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: the mode has no tile of %d rows and %d columns", kOp,
                     params.tile_rows, params.columns);
  return best->launch(params, multiprocessors);
}

}  // namespace
}  // namespace moss

extern "C" MossStatus moss_prefill_linear(const PrefillLinearParams* params) {
  using namespace moss;
  MossStatus status = check_params(kOp, params);
  if (status == MOSS_OK && params->rows == 0) return MOSS_OK;
  if (status == MOSS_OK) status = check_linear(kOp, *params, MOSS_LINEAR_ADD, kMostRows);
  return status == MOSS_OK ? dispatch(*params) : status;
}
