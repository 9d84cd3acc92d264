// moss_codec_linear for a few dozen rows up to 1,500, without a norm. Where tiles of the output would be too few
// to keep the multiprocessors busy, the blocks of a cluster take a slice of the inputs each, and each finishes some
// rows of the tile with the partial sums of all. The weights are on their way before the kernel waits for the one ahead
// of it; with small tiles two blocks fit on a multiprocessor, so that those of the next kernel can start.
#include <cuda.h>

#include "codec_linear.h"
#include "device/bulk_copy.cuh"
#include "device/cluster.cuh"
#include "device/gelu.cuh"
#include "device/mma.cuh"
#include "device/tensor_load.cuh"
#include "device/wgmma.cuh"
#include "device/wgmma_swizzled.cuh"
#include "launch.h"
#include "tensor_map.h"

namespace moss {
namespace {

using bf16 = __nv_bfloat16;

constexpr char kOp[] = "codec_linear";
constexpr int kStep = kClusterStep, kLine = 2 * kStep;  // inputs of a line of shared memory, and its bytes
constexpr int kGroupRows = 64, kGroupThreads = 128;     // of a warpgroup
constexpr int kAlignment = 1024;                        // of swizzled lines

struct Arguments : CodecLinearParams {
  CUtensorMap x_map, weight_map;
};

// COLUMNS: of a tile. SLICES: of the inputs, one for each block of a cluster. GROUPS: warpgroups, one above the other.
template <int COLUMNS, int SLICES, int GROUPS>
struct Shape {
  static constexpr int kRows = GROUPS * kGroupRows, kConsumers = GROUPS * kGroupThreads;
  static constexpr int kThreads = kConsumers + 32;                      // one warp asks for the loads
  static constexpr int kOwnRows = (kRows + SLICES - 1) / SLICES;        // that a block finishes
  static constexpr int kPitch = COLUMNS + (COLUMNS % 16 == 8 ? 0 : 8);  // of sums: a warp's rows in different banks
  static constexpr int kRowBytes = kRows * kLine, kStage = kRowBytes + COLUMNS * kLine;
  static constexpr int kResident = kStage > (24 << 10) ? 1 : 2;  // blocks that fit on a multiprocessor
  static constexpr int kStages = ((kResident == 1 ? 224 : 104) << 10) / kStage;
  static constexpr int kSums = kRows * kPitch * static_cast<int>(sizeof(float));
  static constexpr int kBytes = kAlignment + (kStages * kStage > kSums ? kStages * kStage : kSums);
};

__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Four neighbouring values of bf16 or float32.
__device__ __forceinline__ void store_four(void* values, int64_t place, bool wide, const float4& y) {
  if (wide)
    *reinterpret_cast<float4*>(static_cast<float*>(values) + place) = y;
  else
    *reinterpret_cast<uint2*>(static_cast<bf16*>(values) + place) = {pack_bf16(y.x, y.y), pack_bf16(y.z, y.w)};
}

// One thread: all loads of a block. What a stage held is free when all consumers' warps have arrived at `empty`.
template <typename S>
__device__ __forceinline__ void produce(const Arguments& params, uint32_t stages, uint32_t full, uint32_t empty,
                                        int first_input, int steps, int first_row, int first_column) {
  const auto load_weights = [&](int step, int stage) {
    barrier_expect(full + 8 * stage, S::kStage);
    tensor_load(stages + stage * S::kStage + S::kRowBytes, params.weight_map, first_input + step * kStep, first_column,
                full + 8 * stage);
  };
  const auto load_rows = [&](int step, int stage) {
    tensor_load(stages + stage * S::kStage, params.x_map, first_input + step * kStep, first_row, full + 8 * stage);
  };
  const int ahead = min(steps, S::kStages);
  for (int i = 0; i < ahead; ++i) load_weights(i, i);
  cudaGridDependencySynchronize();
  for (int i = 0; i < ahead; ++i) load_rows(i, i);
  for (int i = ahead; i < steps; ++i) {
    const int stage = i % S::kStages;
    barrier_wait(empty + 8 * stage, (i / S::kStages - 1) & 1);
    load_weights(i, stage);
    load_rows(i, stage);
  }
}

template <int COLUMNS, int SLICES, int GROUPS>
__global__ void __launch_bounds__(Shape<COLUMNS, SLICES, GROUPS>::kThreads, Shape<COLUMNS, SLICES, GROUPS>::kResident)
    codec_linear_cluster_kernel(const __grid_constant__ Arguments params) {
  using S = Shape<COLUMNS, SLICES, GROUPS>;
  constexpr int kParts = COLUMNS / 4, kItems = (S::kOwnRows * kParts + S::kConsumers - 1) / S::kConsumers;
  extern __shared__ uint8_t memory[];
  __shared__ uint64_t barriers[2][S::kStages];
  __shared__ float scales[COLUMNS];

  const int rank = static_cast<int>(cluster_rank()), steps = params.inputs / (SLICES * kStep);
  // A tile at the edge begins earlier, since the copy engine takes longer for what lies beyond a matrix than for the
  // same within; what the tile before finishes is left to it.
  const int own_row = blockIdx.y * S::kRows, own_column = blockIdx.x / SLICES * COLUMNS;
  const int first_row = max(min(own_row, params.rows - S::kRows), 0);
  const int first_column = max(min(own_column, params.outputs - COLUMNS), 0);
  const uint32_t stages = (shared_address(memory) + kAlignment - 1) / kAlignment * kAlignment;
  const uint32_t full = shared_address(barriers[0]), empty = shared_address(barriers[1]);

  cudaTriggerProgrammaticLaunchCompletion();
  if (threadIdx.x == S::kConsumers) {
    prefetch_map(params.weight_map);
    prefetch_map(params.x_map);
    for (int i = 0; i < S::kStages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, S::kConsumers / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x >= S::kConsumers) {
    if (threadIdx.x == S::kConsumers)
      produce<S>(params, stages, full, empty, rank * steps * kStep, steps, first_row, first_column);
    __syncwarp();
    cudaGridDependencySynchronize();
    for (int i = 0; SLICES > 1 && i < 2; ++i) cluster_arrive_relaxed(), cluster_wait();
    return;
  }

  for (int i = threadIdx.x; params.scale && i < COLUMNS && first_column + i < params.outputs; i += S::kConsumers)
    scales[i] = __bfloat162float(static_cast<const bf16*>(params.scale)[first_column + i]);
  cudaGridDependencySynchronize();
  // What this thread finishes: four neighbouring outputs of a row in each item.
  const auto place_of = [&](int item, int& row, int& column) {
    const int index = threadIdx.x + item * S::kConsumers;
    row = index / kParts;
    column = 4 * (index % kParts);
    const int tile_row = rank * S::kOwnRows + row, out_row = first_row + tile_row, out_column = first_column + column;
    const bool inside = row < S::kOwnRows && tile_row < S::kRows && out_row >= own_row && out_row < params.rows &&
                        out_column >= own_column && out_column < params.outputs;
    return inside ? static_cast<int64_t>(out_row) * params.outputs + out_column : int64_t{-1};
  };
  const bool wide = params.out_dtype == MOSS_FLOAT32;
  // As it is stored, so that each item is asked for before the first has come.
  uint4 residual[kItems] = {};
  const auto load_residual = [&](auto four) {
    using Four = decltype(four);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      int row, column;
      const int64_t place = place_of(i, row, column);
      if (params.scale && place >= 0)
        reinterpret_cast<Four&>(residual[i]) = __ldcg(static_cast<const Four*>(params.out) + place / 4);
    }
  };
  if (wide)
    load_residual(uint4{});
  else
    load_residual(uint2{});

  const int group = threadIdx.x / kGroupThreads, lane = threadIdx.x % 32;
  float product[COLUMNS / 2];
  uint32_t previous = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int stage = step % S::kStages;
    const uint32_t lines = stages + stage * S::kStage;
    const uint32_t a = swizzled_descriptor(lines + group * kGroupRows * kLine);
    const uint32_t b = swizzled_descriptor(lines + S::kRowBytes);
    barrier_wait(full + 8 * stage, step / S::kStages & 1);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k) wgmma_swizzled(product, a + 2 * k, b + 2 * k, step | k);
    wgmma_commit();
    wgmma_wait<1>();
    if (step > 0 && lane == 0) barrier_arrive(previous);
    previous = empty + 8 * stage;
  }
  wgmma_wait<0>();

  // The sums lie where the stages were, once all warps have read these. A block adds up those of its own rows.
  const auto meet = [] { asm volatile("bar.sync 1, %0;" ::"n"(S::kConsumers) : "memory"); };
  meet();
  float* sums = reinterpret_cast<float*>(memory + (stages - shared_address(memory)));
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = group * kGroupRows + threadIdx.x % kGroupThreads / 32 * 16 + lane / 4 + 8 * h;
#pragma unroll
    for (int i = 0; i < COLUMNS / 8; ++i)
      *reinterpret_cast<float2*>(sums + row * S::kPitch + 2 * (lane % 4) + 8 * i) = {product[4 * i + 2 * h],
                                                                                     product[4 * i + 2 * h + 1]};
  }
  if constexpr (SLICES > 1)
    cluster_arrive(), cluster_wait();
  else
    meet();
  // All are asked for before the first is added.
  float4 part[SLICES][kItems] = {};
#pragma unroll
  for (int slice = 0; slice < SLICES; ++slice) {
    const uint32_t peer = peer_address(stages, slice);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      int row, column;
      if (place_of(i, row, column) < 0) continue;
      const int place = (rank * S::kOwnRows + row) * S::kPitch + column;
      part[slice][i] = load_peer(peer + place * static_cast<int>(sizeof(float)));
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    int row, column;
    const int64_t place = place_of(i, row, column);
    if (place < 0) continue;
    float4 y = {};
#pragma unroll
    for (int slice = 0; slice < SLICES; ++slice) {
      const float4& x = part[slice][i];
      y = {y.x + x.x, y.y + x.y, y.z + x.z, y.w + x.w};
    }
    if (params.gelu) y = {gelu(y.x), gelu(y.y), gelu(y.z), gelu(y.w)};
    if (params.scale) {
      const uint4& words = residual[i];
      const float2 low = wide ? float2{__uint_as_float(words.x), __uint_as_float(words.y)} : unpack_bf16(words.x);
      const float2 high = wide ? float2{__uint_as_float(words.z), __uint_as_float(words.w)} : unpack_bf16(words.y);
      y = {fmaf(scales[column], y.x, low.x), fmaf(scales[column + 1], y.y, low.y),
           fmaf(scales[column + 2], y.z, high.x), fmaf(scales[column + 3], y.w, high.y)};
    }
    store_four(params.out, place, wide, y);
  }
  // No block ends before the others have read its sums.
  if constexpr (SLICES > 1) cluster_arrive_relaxed(), cluster_wait();
}

template <int COLUMNS, int SLICES, int GROUPS>
MossStatus launch(const CodecLinearParams& params) {
  using S = Shape<COLUMNS, SLICES, GROUPS>;
  auto* kernel = codec_linear_cluster_kernel<COLUMNS, SLICES, GROUPS>;
  Arguments arguments = {};
  static_cast<CodecLinearParams&>(arguments) = params;
  MossStatus status = make_map(kOp, &arguments.x_map, params.x, params.rows, params.inputs, S::kRows);
  if (status == MOSS_OK)
    status = make_map(kOp, &arguments.weight_map, params.weight, params.outputs, params.inputs, COLUMNS);
  if (status == MOSS_OK)
    status = check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes), kOp,
                        "cudaFuncSetAttribute");
  if (status != MOSS_OK) return status;
  const int columns = (params.outputs + COLUMNS - 1) / COLUMNS;
  const dim3 grid(columns * SLICES, (params.rows + S::kRows - 1) / S::kRows);
  return launch_kernel(kOp, kernel, arguments, grid, dim3(S::kThreads), S::kBytes, SLICES);
}

// What there is a kernel for.
struct Variant {
  int rows, columns, slices;
  MossStatus (*launch)(const CodecLinearParams&);
};

template <int COLUMNS, int SLICES, int GROUPS>
constexpr Variant kVariant = {GROUPS * kGroupRows, COLUMNS, SLICES, launch<COLUMNS, SLICES, GROUPS>};

constexpr Variant kVariants[] = {
    kVariant<24, 1, 1>,  kVariant<24, 1, 2>,  kVariant<48, 1, 1>, kVariant<24, 2, 1>, kVariant<48, 2, 1>,
    kVariant<24, 4, 1>,  kVariant<24, 4, 2>,  kVariant<48, 8, 1>, kVariant<96, 2, 2>, kVariant<96, 4, 2>,
    kVariant<128, 4, 2>, kVariant<64, 4, 3>,  kVariant<64, 3, 3>, kVariant<64, 2, 3>, kVariant<80, 2, 3>,
    kVariant<96, 2, 3>,  kVariant<160, 2, 2>,
};

}  // namespace

MossStatus launch_clusters(const CodecLinearParams& params) {
  for (const Variant& variant : kVariants)
    if (variant.rows == params.tile_rows && variant.columns == params.tile_columns && variant.slices == params.slices)
      return variant.launch(params);
  return set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: there is no tile of %d rows, %d outputs and %d slices", kOp,
                   params.tile_rows, params.tile_columns, params.slices);
}

}  // namespace moss
