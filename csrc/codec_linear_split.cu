// moss_codec_linear for up to 512 rows. The blocks of a cluster share the inputs of one tile of the output: each holds
// its part of the rows and of the weights in shared memory at once, so that a product is one trip to memory, and each
// finishes some rows of the tile with the partial sums of all. The weights are on their way before the kernel waits for
// the one ahead of it.
#include "codec_linear_split.h"

#include "device/cluster.cuh"
#include "device/codec_linear.cuh"
#include "launch.h"

namespace moss::codec_linear {
namespace {

constexpr char kOp[] = "codec_linear";
constexpr int kThreads = 256;
constexpr int kRows = 64;      // of a block
constexpr int kChunk = 32;     // inputs of a step
constexpr int kTile = 8;       // columns of a tile of the product
constexpr int kWarpRows = 32;  // so that two warps share the rows and four the columns
constexpr int kWarpColumns = 4;
constexpr int kSharedBytes = 226 << 10;  // and what is declared in the kernel
// Most blocks of a launch: of one block of rows, one on each of 132 multiprocessors and small ones beside it; of more,
// two.
constexpr int kMostBlocks = 144, kMostBlocksOfRows = 264;
constexpr int kMostTiles = 5;

// Elements from one row to the next in shared memory: neighbours lie in different halves of the banks.
__host__ __device__ constexpr int pitch_of(int share) { return (share / kChunk | 1) * kChunk; }

// TILES: tiles of 8 outputs of a warp. SPLITS: blocks of a cluster.
template <int TILES, int SPLITS, bool NORM, typename X>
__global__ void __cluster_dims__(SPLITS, 1, 1) __launch_bounds__(kThreads, 2)
    codec_linear_split_kernel(const CodecLinearParams params) {
  constexpr int kOutputs = kWarpColumns * TILES * kTile, kPairs = kOutputs / 2;
  constexpr int kOwnRows = kRows / SPLITS, kItems = (kOwnRows * kPairs + kThreads - 1) / kThreads;
  constexpr int kSumsPitch = kOutputs + kTile;           // of partial sums, so that a warp's rows lie in different banks
  static_assert(kOutputs == TILES * kThreads / 8);
  constexpr int kAtOnce = sizeof(X) == 2 ? 10 : 5;       // steps whose inputs a thread loads at once
  extern __shared__ uint4 memory[];
  __shared__ Moments moments_of[kRows];

  const int rows = params.rows, outputs = params.outputs, inputs = params.inputs;
  const int share = inputs / SPLITS, steps = share / kChunk, pitch = pitch_of(share);
  const int rank = static_cast<int>(cluster_rank());
  const int first_row = blockIdx.y * kRows, first_output = blockIdx.x / SPLITS * kOutputs, first_input = rank * share;
  bf16* const weights = reinterpret_cast<bf16*>(memory);
  bf16* const operands = weights + kOutputs * pitch;
  float* const sums = reinterpret_cast<float*>(memory);  // where weights and operands were

  cudaTriggerProgrammaticLaunchCompletion();
  // Eight threads copy a line of 128 bytes.
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const int output = i * (kThreads / 8) + threadIdx.x / 8;
    const int64_t source = static_cast<int64_t>(min(first_output + output, outputs - 1)) * inputs + first_input;
    for (int input = threadIdx.x % 8 * 8; input < share; input += 64)
      copy_async(weights + output * pitch + input, static_cast<const bf16*>(params.weight) + source + input);
  }
  cudaGridDependencySynchronize();

  // What this thread finishes: two neighbouring outputs of a row in each item.
  float2 residual[kItems] = {}, scale[kItems] = {}, weight_sum[kItems] = {}, bias_sum[kItems] = {};
  const auto place_of = [&](int item, int& row, int& column) {
    const int index = threadIdx.x + item * kThreads;
    row = rank * kOwnRows + index / kPairs;
    column = 2 * (index % kPairs);
    return index < kOwnRows * kPairs && first_row + row < rows && first_output + column < outputs;
  };
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    int row, column;
    if (!place_of(i, row, column)) continue;
    const int output = first_output + column;
    if constexpr (NORM) {
      weight_sum[i] = *reinterpret_cast<const float2*>(params.norm_sums + output);
      bias_sum[i] = *reinterpret_cast<const float2*>(params.norm_sums + outputs + output);
    } else if (params.scale) {
      const int64_t place = static_cast<int64_t>(first_row + row) * outputs + output;
      scale[i] = unpack_bf16(*reinterpret_cast<const uint32_t*>(static_cast<const bf16*>(params.scale) + output));
      residual[i] =
          params.out_dtype == MOSS_FLOAT32
              ? __ldcg(reinterpret_cast<const float2*>(static_cast<const float*>(params.out) + place))
              : unpack_bf16(__ldcg(reinterpret_cast<const uint32_t*>(static_cast<const bf16*>(params.out) + place)));
    }
  }

  {
    const int row = threadIdx.x / 4, own = first_input + threadIdx.x % 4 * 8;
    const bool inside = first_row + row < rows;
    const X* x = static_cast<const X*>(params.x) + static_cast<int64_t>(first_row + row) * inputs + own;
    const bf16* norm_weight = static_cast<const bf16*>(params.norm_weight) + own;
    uint4* operand = reinterpret_cast<uint4*>(operands + row * pitch + threadIdx.x % 4 * 8);
    Moments moments = {};
#pragma unroll 1
    for (int first = 0; first < steps; first += kAtOnce) {
      Inputs<X> loaded[kAtOnce];
      uint4 gain[kAtOnce] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        loaded[i].clear();
        if (first + i >= steps) continue;
        if (NORM) gain[i] = load_weights(norm_weight + (first + i) * kChunk);
        if (inside) loaded[i].load(x + (first + i) * kChunk);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (first + i < steps) operand[(first + i) * (kChunk / 8)] = loaded[i].template operand<NORM>(gain[i], moments);
    }
    if constexpr (NORM) {
#pragma unroll
      for (int distance = 1; distance < 4; distance *= 2) {
        moments.sum += __shfl_xor_sync(0xffffffffu, moments.sum, distance);
        moments.squares += __shfl_xor_sync(0xffffffffu, moments.squares, distance);
      }
      if (threadIdx.x % 4 == 0) moments_of[row] = moments;
    }
  }
  copy_async_wait();
  __syncthreads();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  const int warp_row = warp / kWarpColumns * kWarpRows, warp_output = warp % kWarpColumns * TILES * kTile;
  const uint4* a = reinterpret_cast<const uint4*>(operands + (warp_row + group) * pitch + 8 * quarter);
  const uint4* b = reinterpret_cast<const uint4*>(weights + (warp_output + group) * pitch + 8 * quarter);
  const int tile_pitch = kTile * pitch / 8;  // from a row or output to that of the next tile
  float product[2][TILES][4] = {};
  const int own_steps = first_row + warp_row < rows ? steps : 0;
#pragma unroll 2
  for (int step = 0; step < own_steps; ++step, a += kChunk / 8, b += kChunk / 8) {
    uint4 row[4], column[TILES];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      row[i] = a[i * tile_pitch];
#pragma unroll
    for (int j = 0; j < TILES; ++j)
      column[j] = b[j * tile_pitch];
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < TILES; ++j)
        mma(product[i][j], row[2 * i], row[2 * i + 1], column[j]);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < TILES; ++j)
      *reinterpret_cast<float2*>(sums + (warp_row + kTile * i + group) * kSumsPitch + warp_output + j * kTile +
                                 2 * quarter) = {product[i / 2][j][i % 2 * 2], product[i / 2][j][i % 2 * 2 + 1]};
  cluster_barrier();

#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    int row, column;
    if (!place_of(i, row, column)) continue;
    float2 y = {};
    Moments total = {};
#pragma unroll
    for (int split = 0; split < SPLITS; ++split) {
      const float2 part = cluster_load(sums + row * kSumsPitch + column, split);
      y = {y.x + part.x, y.y + part.y};
      if constexpr (NORM) {
        const float2 moments = cluster_load(&moments_of[row], split);
        total = {total.sum + moments.x, total.squares + moments.y};
      }
    }
    if constexpr (NORM) y = normalise(y, total, inputs, weight_sum[i], bias_sum[i]);
    if (params.gelu) y = {gelu(y.x), gelu(y.y)};
    if (params.scale) y = {fmaf(scale[i].x, y.x, residual[i].x), fmaf(scale[i].y, y.y, residual[i].y)};
    const int64_t place = static_cast<int64_t>(first_row + row) * outputs + first_output + column;
    if (params.out_dtype == MOSS_FLOAT32)
      *reinterpret_cast<float2*>(static_cast<float*>(params.out) + place) = y;
    else
      *reinterpret_cast<uint32_t*>(static_cast<bf16*>(params.out) + place) = pack_bf16(y.x, y.y);
  }
  // The others may still read this block's sums.
  cluster_barrier();
}

template <int TILES, int SPLITS, bool NORM, typename X>
MossStatus launch_kernel_of(const CodecLinearParams& params, dim3 grid, int shared) {
  auto* kernel = codec_linear_split_kernel<TILES, SPLITS, NORM, X>;
  const MossStatus status = check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), kOp, "cudaFuncSetAttribute");
  return status == MOSS_OK ? launch_kernel(kOp, kernel, params, grid, dim3(kThreads), shared) : status;
}

template <int TILES, int SPLITS>
MossStatus launch_tiles(const CodecLinearParams& params, dim3 grid, int shared) {
  if (!params.norm_weight) return launch_kernel_of<TILES, SPLITS, false, bf16>(params, grid, shared);
  return params.x_dtype == MOSS_FLOAT32 ? launch_kernel_of<TILES, SPLITS, true, float>(params, grid, shared)
                                        : launch_kernel_of<TILES, SPLITS, true, bf16>(params, grid, shared);
}

// The narrowest tiles whose blocks are all on the multiprocessors at once.
template <int SPLITS, int TILES = 1>
MossStatus launch_splits(const CodecLinearParams& params) {
  constexpr int kOutputs = kWarpColumns * TILES * kTile;
  const int row_blocks = (params.rows + kRows - 1) / kRows, columns = (params.outputs + kOutputs - 1) / kOutputs;
  if constexpr (TILES < kMostTiles) {
    const int most = row_blocks == 1 ? kMostBlocks : kMostBlocksOfRows;
    if (columns * SPLITS * row_blocks > most) return launch_splits<SPLITS, TILES + 1>(params);
  }
  const int shared = (kOutputs + kRows) * pitch_of(params.inputs / SPLITS) * static_cast<int>(sizeof(bf16));
  if (params.inputs % (SPLITS * kChunk) != 0 || shared > kSharedBytes)
    return set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: there is no kernel for %d `rows`, %d `outputs` and %d `inputs`",
                     kOp, params.rows, params.outputs, params.inputs);
  return launch_tiles<TILES, SPLITS>(params, dim3(columns * SPLITS, row_blocks), shared);
}

}  // namespace

MossStatus launch_split(const CodecLinearParams& params) {
  return params.inputs >= 3072 ? launch_splits<8>(params) : launch_splits<4>(params);
}

}  // namespace moss::codec_linear
