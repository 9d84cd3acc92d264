// moss_codec_linear for many rows, without a norm, where the time is that of the tensor cores. A block stays and takes
// several tiles of the output, of 64 rows for each of its two or three consumer warpgroups; one more thread keeps the
// copy engine ahead, into the next tile while the consumers finish one.
#include <cuda.h>
#include <cuda_bf16.h>

#include "checks.h"
#include "codec_linear.h"
#include "device/mma.cuh"
#include "device/tile_product.cuh"
#include "launch.h"
#include "tensor_map.h"

namespace moss {
namespace {

using bf16 = __nv_bfloat16;

constexpr char kOp[] = "codec_linear";

// What follows the product.
enum Finish { kStore, kGelu, kResidual };

struct Arguments : CodecLinearParams {
  CUtensorMap x_map, weight_map;
  int column_tiles, tiles;
};

// First row and column of a tile. Columns vary fastest: the weights fit in L2, so that the rows are read from memory
// once.
template <int N, int CONSUMERS>
struct Tile {
  int row, column;

  __device__ __forceinline__ Tile(const Arguments& arguments, int index)
      : row(index / arguments.column_tiles * Shared<N, CONSUMERS>::kRows), column(index % arguments.column_tiles * N) {}
};

// Weights of the first stages come before the wait for the kernel ahead.
template <int N, int CONSUMERS>
__device__ __forceinline__ void produce(const Arguments& arguments, Shared<N, CONSUMERS> shared) {
  using Place = Tile<N, CONSUMERS>;
  const auto load_weights = [&](const Place& tile, int step, int stage) {
    barrier_expect(shared.full(stage), shared.kStageBytes);
    tensor_load(shared.weights(stage), arguments.weight_map, step * kStep, tile.column, shared.full(stage));
  };
  const auto load_rows = [&](const Place& tile, int step, int stage) {
    tensor_load(shared.rows(stage), arguments.x_map, step * kStep, tile.row, shared.full(stage));
  };
  Ring<shared.kStages> ring;
  const Place first(arguments, blockIdx.x);
  const int steps = arguments.inputs / kStep, early = min(steps, shared.kStages);
  for (int i = 0; i < early; ++i) load_weights(first, i, i);
  cudaGridDependencySynchronize();
  for (int i = 0; i < early; ++i, ring.advance()) load_rows(first, i, i);
  int begin = early;
  for (int index = blockIdx.x; index < arguments.tiles; index += gridDim.x, begin = 0) {
    const Place tile(arguments, index);
    for (int step = begin; step < steps; ++step, ring.advance()) {
      barrier_wait(shared.empty(ring.stage), ring.parity ^ 1);
      load_weights(tile, step, ring.stage);
      load_rows(tile, step, ring.stage);
    }
  }
}

// Asks for this block's share of the weights, which no kernel writes.
__device__ __forceinline__ void prefetch_weights(const Arguments& arguments) {
  const int64_t bytes = static_cast<int64_t>(arguments.outputs) * arguments.inputs * 2;
  const int64_t share = (bytes / gridDim.x + 15) / 16 * 16, begin = share * blockIdx.x;
  if (begin >= bytes) return;
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(static_cast<const char*>(arguments.weight) + begin),
               "r"(static_cast<uint32_t>(min(share, bytes - begin))));
}

__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The exact GELU to 3e-5 + 3e-4 * |x|, a small part of the rounding of a bf16 as large as x: erf(x / sqrt 2) as the tanh
// of a polynomial that was fitted to it. Beyond 8 both are 1.
__device__ __forceinline__ float gelu_for_bf16(float x) {
  const float square = fminf(x * x, 64.0f), half = 0.5f * x;
  const float inner = x * fmaf(square, fmaf(square, -3.51516965e-4f, 3.70056633e-2f), 7.97507803e-1f);
  return fmaf(half, tanh_approx(inner), half);
}

// A pair of neighbouring columns as it is stored. `old`: what its place holds.
template <Finish FINISH>
__device__ __forceinline__ uint32_t finish_pair(float2 sum, float2 scale, uint32_t old) {
  if (FINISH == kGelu) sum = {gelu_for_bf16(sum.x), gelu_for_bf16(sum.y)};
  if (FINISH == kResidual) {
    const float2 stream = unpack_bf16(old);
    sum = {fmaf(scale.x, sum.x, stream.x), fmaf(scale.y, sum.y, stream.y)};
  }
  return pack_bf16(sum.x, sum.y);
}

// Finishes a consumer's sums. Four lanes hold 32 columns of a row between them, and load and store 16 bytes each.
template <int N, Finish FINISH>
__device__ __forceinline__ void finish_sums(const float (&sum)[N / 2], const Arguments& arguments, int first_row,
                                            int first_column) {
  constexpr int kQuads = N / 32, kBatch = kQuads <= 4 ? kQuads : (kQuads + 1) / 2;  // of the stream, loaded at once
  const int quarter = threadIdx.x % 4, row = first_row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  bf16* const out = static_cast<bf16*>(arguments.out);
  const auto inside = [&](int quad, int half) {
    return row + 8 * half < arguments.rows && first_column + 32 * quad + 8 * quarter < arguments.outputs;
  };
  const auto place = [&](int quad, int half) {
    const int64_t offset = static_cast<int64_t>(row + 8 * half) * arguments.outputs;
    return reinterpret_cast<uint4*>(out + offset + first_column + 32 * quad + 8 * quarter);
  };
  const auto scale_at = [&](int column) {
    if (FINISH != kResidual || column >= arguments.outputs) return float2{};
    return unpack_bf16(*reinterpret_cast<const uint32_t*>(static_cast<const bf16*>(arguments.scale) + column));
  };
#pragma unroll
  for (int start = 0; start < kQuads; start += kBatch) {
    uint4 stream[kBatch][2] = {};
    if (FINISH == kResidual)
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          if (start + i < kQuads && inside(start + i, half)) stream[i][half] = __ldcg(place(start + i, half));
#pragma unroll
    for (int quad = start; quad < start + kBatch && quad < kQuads; ++quad) {
      float2 scale[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) scale[i] = scale_at(first_column + 32 * quad + 8 * i + 2 * quarter);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4& held = stream[quad - start][half];
        uint32_t old[4] = {held.x, held.y, held.z, held.w}, words[4];
        if (FINISH == kResidual) transpose_quad(old);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* pair = &sum[16 * quad + 4 * i + 2 * half];
          words[i] = finish_pair<FINISH>({pair[0], pair[1]}, scale[i], old[i]);
        }
        transpose_quad(words);
        if (inside(quad, half)) *place(quad, half) = {words[0], words[1], words[2], words[3]};
      }
    }
  }
}

template <int N, int CONSUMERS, Finish FINISH>
__device__ __forceinline__ void consume(const Arguments& arguments, Shared<N, CONSUMERS> shared) {
  Ring<shared.kStages> ring;
  const int group = threadIdx.x / 128 - 1;
  cudaGridDependencySynchronize();
  for (int index = blockIdx.x; index < arguments.tiles; index += gridDim.x) {
    const Tile<N, CONSUMERS> tile(arguments, index);
    const int first_row = tile.row + group * kGroupRows;
    float sum[N / 2];
    multiply(sum, shared, ring, arguments.inputs / kStep, group, first_row < arguments.rows);
    finish_sums<N, FINISH>(sum, arguments, first_row, tile.column);
  }
}

template <int N, int CONSUMERS, Finish FINISH>
__global__ void __launch_bounds__(128 * (1 + CONSUMERS), 1)
    codec_linear_tiles_kernel(const __grid_constant__ Arguments arguments) {
  extern __shared__ char memory[];
  const Shared<N, CONSUMERS> shared{aligned_address(memory)};
  cudaTriggerProgrammaticLaunchCompletion();
  if (threadIdx.x == 0) shared.init_barriers();
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_shrink<24>();
    if (threadIdx.x == 0) produce(arguments, shared);
    if (threadIdx.x == 32 && arguments.dependent_launch) prefetch_weights(arguments);
  } else {
    registers_grow<CONSUMERS == 2 ? 240 : 160>();
    consume<N, CONSUMERS, FINISH>(arguments, shared);
  }
}

template <int N, int CONSUMERS>
MossStatus launch(const CodecLinearParams& params, int multiprocessors) {
  using Memory = Shared<N, CONSUMERS>;
  Arguments arguments = {};
  static_cast<CodecLinearParams&>(arguments) = params;
  arguments.column_tiles = (params.outputs + N - 1) / N;
  const int64_t tiles = int64_t{arguments.column_tiles} * ((params.rows + Memory::kRows - 1) / Memory::kRows);
  MossStatus status = check_range(kOp, "tiles", tiles, 1, kMostRows);
  if (status == MOSS_OK) status = make_map(kOp, &arguments.x_map, params.x, params.rows, params.inputs, Memory::kRows);
  if (status == MOSS_OK) status = make_map(kOp, &arguments.weight_map, params.weight, params.outputs, params.inputs, N);
  const auto kernel = params.scale  ? codec_linear_tiles_kernel<N, CONSUMERS, kResidual>
                      : params.gelu ? codec_linear_tiles_kernel<N, CONSUMERS, kGelu>
                                    : codec_linear_tiles_kernel<N, CONSUMERS, kStore>;
  if (status == MOSS_OK)
    status = check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Memory::kBytes), kOp,
                        "cudaFuncSetAttribute");
  if (status != MOSS_OK) return status;
  arguments.tiles = static_cast<int>(tiles);
  const dim3 grid(arguments.tiles < multiprocessors ? arguments.tiles : multiprocessors);
  return launch_kernel(kOp, kernel, arguments, grid, dim3(128 * (1 + CONSUMERS)), Memory::kBytes);
}

// What there is a kernel for.
struct Variant {
  int rows, columns;
  MossStatus (*launch)(const CodecLinearParams&, int multiprocessors);
};

template <int N, int CONSUMERS>
constexpr Variant kVariant = {kGroupRows * CONSUMERS, N, launch<N, CONSUMERS>};

constexpr Variant kVariants[] = {kVariant<192, 3>, kVariant<128, 3>, kVariant<96, 3>,
                                 kVariant<256, 2>, kVariant<192, 2>, kVariant<128, 2>};

}  // namespace

MossStatus launch_tiles(const CodecLinearParams& params) {
  if (params.out_dtype != MOSS_BFLOAT16 || params.outputs % 8 != 0 || (params.scale && params.gelu))
    return set_error(MOSS_ERROR_INVALID_ARGUMENT,
                     "`%s`: with a tile of %d outputs `out_dtype` must be bfloat16, `outputs` a multiple of 8, and "
                     "`gelu` 0 with `scale`",
                     kOp, params.tile_columns);
  int device = 0, multiprocessors = 0;
  MossStatus status = check_cuda(cudaGetDevice(&device), kOp, "cudaGetDevice");
  if (status == MOSS_OK)
    status = check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), kOp,
                        "cudaDeviceGetAttribute");
  if (status != MOSS_OK) return status;
  for (const Variant& variant : kVariants)
    if (variant.rows == params.tile_rows && variant.columns == params.tile_columns && params.slices == 1)
      return variant.launch(params, multiprocessors);
  return set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: there is no tile of %d rows, %d outputs and %d slices", kOp,
                   params.tile_rows, params.tile_columns, params.slices);
}

}  // namespace moss
