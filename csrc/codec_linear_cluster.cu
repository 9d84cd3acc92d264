// moss_codec_linear for a few dozen rows up to 1,500, without a norm. Where tiles of the output would be too few
// to keep the multiprocessors busy, the blocks of a cluster take a slice of the inputs each, and each finishes some
// rows of the tile with the partial sums of all. The weights are on their way before the kernel waits for the one ahead
// of it; with small tiles two blocks fit on a multiprocessor, so that those of the next kernel can start. What follows
// the products runs once, from a cold instruction cache, and is kept short.
#include <cuda.h>

#include <type_traits>

#include "codec_linear.h"
#include "device/bulk_copy.cuh"
#include "device/cluster.cuh"
#include "device/gelu.cuh"
#include "device/mma.cuh"
#include "device/tensor_load.cuh"
#include "device/tile_finish.cuh"
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
constexpr int kFewRows = 512;                           // up to which weights are let go first

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
  static constexpr int kResident = kStage >= (22 << 10) ? 1 : 2;  // blocks that fit on a multiprocessor
  // Sums of the rows that a block finishes. Those of small tiles are sent to it, behind the stages; of large tiles,
  // whose sums take longer than the way there and back, it asks for them.
  static constexpr int kOwnSums = kOwnRows * kPitch * static_cast<int>(sizeof(float)), kSums = SLICES * kOwnSums;
  static constexpr bool kSent = SLICES > 1 && GROUPS == 1;
  static constexpr int kReceived = kSent ? kSums : 0;
  // Of 32 columns, which stage 1's q, k and v of 64 rows have, less: more of the attention then begins beside them.
  static constexpr int kMostStages = ((kResident == 1 ? 224 : COLUMNS == 32 ? 84 : 104) << 10) / kStage;
  static constexpr int kRoom = ((kResident == 1 ? 225 : 111) << 10) - kReceived;
  static constexpr int kStages = kMostStages * kStage < kRoom ? kMostStages : kRoom / kStage;
  static constexpr int kBeforeReceived = kStages * kStage > kSums ? kStages * kStage : kSums;
  static constexpr int kBytes = kAlignment + kBeforeReceived + kReceived;
  // Neighbouring outputs that a thread finishes at once. Lanes that ask another block for more would leave gaps.
  static constexpr int kWidth = SLICES == 1 || kSent ? 8 : 4;
};

// Neighbouring values as they are stored. Those that a thread adds at the end stay so until then: nothing waits for
// them.
template <typename T, int COUNT>
struct alignas(16) Stored {
  static constexpr int kWords = COUNT * static_cast<int>(sizeof(T)) / 4;
  using Piece = std::conditional_t<kWords == 2, uint2, uint4>;
  static constexpr int kPieces = kWords * 4 / static_cast<int>(sizeof(Piece));
  uint32_t words[kWords];

  // Past L1, since a kernel before may have written them.
  __device__ __forceinline__ void load(const T* source) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      reinterpret_cast<Piece*>(words)[i] = __ldcg(reinterpret_cast<const Piece*>(source) + i);
  }
  __device__ __forceinline__ void store(T* place) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) reinterpret_cast<Piece*>(place)[i] = reinterpret_cast<const Piece*>(words)[i];
  }
  __device__ __forceinline__ float get(int i) const {
    if constexpr (sizeof(T) == 4)
      return __uint_as_float(words[i]);
    else
      return __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
  }
  __device__ __forceinline__ void set(const float (&y)[COUNT]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      words[i] = sizeof(T) == 4 ? __float_as_uint(y[i]) : pack_bf16(y[2 * i % COUNT], y[(2 * i + 1) % COUNT]);
  }
};

// An item of what a thread finishes: a place in the block's rows of the tile, and from their first place in `out`;
// `wanted` unless it is another tile's, or nobody's.
struct Item {
  int row, column, out;
  bool wanted;
};

// One thread: all loads of a block. What a stage held is free when all consumers' warps have arrived at `empty`. Weights
// that few tiles share are not read again before all of L2 has gone through: what the kernels hand to each other stays
// there instead.
template <typename S>
__device__ __forceinline__ void produce(const Arguments& params, uint32_t stages, uint32_t full, uint32_t empty,
                                        int first_input, int steps, int first_row, int first_column) {
  const uint64_t policy = params.rows <= kFewRows ? policy_evict_first() : policy_evict_normal();
  const auto load_weights = [&](int step, int stage) {
    barrier_expect(full + 8 * stage, S::kStage);
    tensor_load(stages + stage * S::kStage + S::kRowBytes, params.weight_map, first_input + step * kStep, first_column,
                full + 8 * stage, policy);
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

template <int COLUMNS, int SLICES, int GROUPS, typename Out>
__global__ void __launch_bounds__(Shape<COLUMNS, SLICES, GROUPS>::kThreads, Shape<COLUMNS, SLICES, GROUPS>::kResident)
    codec_linear_cluster_kernel(const __grid_constant__ Arguments params) {
  using S = Shape<COLUMNS, SLICES, GROUPS>;
  constexpr int kWidth = S::kWidth, kParts = COLUMNS / kWidth;
  constexpr int kItems = (S::kOwnRows * kParts + S::kConsumers - 1) / S::kConsumers;
  extern __shared__ uint8_t memory[];
  __shared__ uint64_t barriers[2][S::kStages], sums_barrier;

  const int rank = static_cast<int>(cluster_rank()), steps = params.inputs / (SLICES * kStep);
  // A tile at the edge begins earlier, since the copy engine takes longer for what lies beyond a matrix than for the
  // same within; what the tile before finishes is left to it.
  const int own_row = blockIdx.y * S::kRows, own_column = blockIdx.x / SLICES * COLUMNS;
  const int first_row = max(min(own_row, params.rows - S::kRows), 0);
  const int first_column = max(min(own_column, params.outputs - COLUMNS), 0);
  uint32_t stages = (shared_address(memory) + kAlignment - 1) / kAlignment * kAlignment;
  uint32_t full = shared_address(barriers[0]), empty = shared_address(barriers[1]);
  asm volatile("" : "+r"(stages), "+r"(full), "+r"(empty));  // kept, as by kept_address
  const uint32_t received = shared_address(&sums_barrier);

  cudaTriggerProgrammaticLaunchCompletion();
  if (threadIdx.x == S::kConsumers) {
    prefetch_map(params.weight_map);
    prefetch_map(params.x_map);
    for (int i = 0; i < S::kStages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, S::kConsumers / 32);
    }
    if (S::kSent) barrier_init(received, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    if (S::kSent) barrier_expect(received, S::kReceived);
  }
  __syncthreads();
  if constexpr (S::kSent) cluster_arrive_relaxed();
  if (threadIdx.x >= S::kConsumers) {
    if (threadIdx.x == S::kConsumers)
      produce<S>(params, stages, full, empty, rank * steps * kStep, steps, first_row, first_column);
    __syncwarp();
    cudaGridDependencySynchronize();
    if constexpr (SLICES > 1 && !S::kSent) cluster_arrive_relaxed();
    if constexpr (SLICES > 1) cluster_wait(), cluster_arrive_relaxed(), cluster_wait();
    return;
  }

  // What this thread finishes.
  const auto item = [&](int i) {
    const int index = threadIdx.x + i * S::kConsumers, row = index / kParts, column = kWidth * (index % kParts);
    const int tile_row = rank * S::kOwnRows + row, out_row = first_row + tile_row, out_column = first_column + column;
    return Item{row, column, row * params.outputs + column,
                row < S::kOwnRows && tile_row < S::kRows && out_row >= own_row && out_row < params.rows &&
                    out_column >= own_column && out_column < params.outputs};
  };
  Out* const out = static_cast<Out*>(params.out) +
                   static_cast<int64_t>(first_row + rank * S::kOwnRows) * params.outputs + first_column;
  Stored<bf16, kWidth> scale[kItems] = {};
  Stored<Out, kWidth> residual[kItems] = {};
#pragma unroll
  for (int i = 0; i < kItems; ++i)
    if (const Item at = item(i); params.scale && at.wanted)
      scale[i].load(static_cast<const bf16*>(params.scale) + first_column + at.column);
  cudaGridDependencySynchronize();
#pragma unroll
  for (int i = 0; i < kItems; ++i)
    if (const Item at = item(i); params.scale && at.wanted) residual[i].load(out + at.out);

  const int group = warpgroup(), lane = threadIdx.x % 32;
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
  if constexpr (S::kSent) {
    fence_async_shared();
    cluster_wait();  // until the others have begun
    meet();
    if (threadIdx.x < SLICES)
      bulk_send(peer_address(stages + S::kBeforeReceived + rank * S::kOwnSums, threadIdx.x),
                stages + threadIdx.x * S::kOwnSums, S::kOwnSums, peer_address(received, threadIdx.x));
    __syncwarp();
    barrier_wait(received, 0);
    cluster_arrive_relaxed();
  } else if constexpr (SLICES > 1) {
    cluster_arrive(), cluster_wait();
  } else {
    meet();
  }
  // All are asked for before the first is added.
  float4 part[kItems][SLICES][kWidth / 4];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const Item at = item(i);
    if (!at.wanted) continue;
    const int place = at.row * S::kPitch + at.column;
#pragma unroll
    for (int slice = 0; slice < SLICES; ++slice)
#pragma unroll
      for (int k = 0; k < kWidth / 4; ++k)
        if constexpr (SLICES == 1 || S::kSent)
          part[i][slice][k] = *reinterpret_cast<const float4*>(
              sums + (S::kSent ? (S::kBeforeReceived + slice * S::kOwnSums) / 4 : 0) + place + 4 * k);
        else
          part[i][slice][k] = load_peer(peer_address(stages, slice) + rank * S::kOwnSums + place * 4);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const Item at = item(i);
    if (!at.wanted) continue;
    float y[kWidth];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      y[k] = reinterpret_cast<const float*>(part[i][0])[k];
#pragma unroll
      for (int slice = 1; slice < SLICES; ++slice) y[k] += reinterpret_cast<const float*>(part[i][slice])[k];
    }
    if (params.gelu) {
#pragma unroll
      for (float& value : y) value = sizeof(Out) == 2 ? gelu_for_bf16(value) : gelu(value);
    }
    if (params.scale) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) y[k] = fmaf(scale[i].get(k), y[k], residual[i].get(k));
    }
    residual[i].set(y);
    residual[i].store(out + at.out);
  }
  // No block ends before the others have its sums.
  if constexpr (SLICES > 1 && !S::kSent) cluster_arrive_relaxed();
  if constexpr (SLICES > 1) cluster_wait();
}

template <int COLUMNS, int SLICES, int GROUPS>
MossStatus launch(const CodecLinearParams& params) {
  using S = Shape<COLUMNS, SLICES, GROUPS>;
  auto* kernel = params.out_dtype == MOSS_FLOAT32 ? codec_linear_cluster_kernel<COLUMNS, SLICES, GROUPS, float>
                                                  : codec_linear_cluster_kernel<COLUMNS, SLICES, GROUPS, bf16>;
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
    kVariant<24, 1, 1>,  kVariant<24, 2, 1>, kVariant<24, 4, 1>, kVariant<32, 1, 1>, kVariant<40, 2, 1>,
    kVariant<48, 1, 1>,  kVariant<48, 2, 1>, kVariant<48, 4, 1>, kVariant<48, 8, 1>, kVariant<48, 2, 2>,
    kVariant<72, 1, 2>,  kVariant<80, 1, 2>, kVariant<80, 2, 2>, kVariant<96, 4, 2>, kVariant<128, 4, 2>,
    kVariant<160, 2, 2>, kVariant<48, 1, 3>, kVariant<48, 2, 3>, kVariant<48, 4, 3>, kVariant<64, 2, 3>,
    kVariant<64, 4, 3>,  kVariant<80, 2, 3>,
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
