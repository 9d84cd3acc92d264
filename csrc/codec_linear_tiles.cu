// moss_codec_linear for many rows, without a norm, where the time is that of the tensor cores. A block stays and takes
// several tiles of the output, of 64 rows for each of its two or three consumer warpgroups; one more thread keeps the
// copy engine ahead, into the next tile while the consumers finish one. The copy engine also brings the residual stream
// and stores what is finished, from shared memory, which one more thread for each consumer asks it to. Where blocks
// take several tiles of 128 rows, consumers had better have a tile each: codec_linear_pingpong.cu.
#include <cuda.h>

#include "codec_linear.h"
#include "device/tile_finish.cuh"
#include "device/tile_product.cuh"
#include "device/tile_rotate.cuh"
#include "tile_launch.h"

namespace moss {
namespace {

constexpr char kOp[] = "codec_linear";

using Arguments = TileArguments;

// Shared memory: after the stages a tile of the output, which holds the residual stream before; of each consumer's rows
// parts of kPart columns, with a swizzle as wide where there is one. Each consumer's rows have three barriers: `loaded`
// with the stream, `finished` by its four warps, and `stored`, after which they may be written again.
template <int N, int CONSUMERS>
struct Memory : Shared<N, CONSUMERS, kGroupRows * CONSUMERS * N * 2> {
  using Base = Shared<N, CONSUMERS, kGroupRows * CONSUMERS * N * 2>;
  static constexpr int kPart = N % 64 == 0 ? 64 : N % 32 == 0 ? 32 : N, kPitch = kPart * 2;
  static constexpr bool kSwizzled = N % 32 == 0;
  static constexpr int kPartBytes = kGroupRows * kPitch, kGroupBytes = kGroupRows * N * 2;
  // Boxes of a stage's rows. Two leave out a half that lies beyond the matrix, for which the copy engine takes longer
  // than for the same within; three take longer than one.
  static constexpr int kBoxes = CONSUMERS == 2 ? 2 : 1, kBoxRows = Base::kRows / kBoxes;
  static constexpr int kBoxBytes = Base::kRowBytes / kBoxes;

  __device__ __forceinline__ uint32_t part(int group, int index) const {
    return this->extra() + group * kGroupBytes + index * kPartBytes;
  }
  // Of eight columns in a row of a part.
  static __device__ __forceinline__ int offset(int row, int eight) {
    return row * kPitch + (kSwizzled ? eight ^ row * kPitch / 128 % (kPitch / 16) : eight) * 16;
  }
  __device__ __forceinline__ uint32_t loaded(int group) const { return this->full(Base::kStages + group); }
  __device__ __forceinline__ uint32_t stored(int group) const { return this->empty(Base::kStages + group); }
  __device__ __forceinline__ uint32_t finished(int group) const {
    return this->full(Base::kStages + CONSUMERS + group);
  }

  // By one thread, ahead of a barrier of the block.
  __device__ __forceinline__ void init_barriers() const {
    for (int group = 0; group < CONSUMERS; ++group) {
      barrier_init(loaded(group), 1);
      barrier_init(stored(group), 1);
      barrier_init(finished(group), 4);
    }
    Base::init_barriers();
  }
};

// First row and column of a tile. Columns vary fastest: the weights fit in L2, so that the rows are read from memory
// once.
template <int N, int CONSUMERS>
struct Tile {
  int row, column;

  __device__ __forceinline__ Tile(const Arguments& arguments, int index)
      : row(index / arguments.column_tiles * kGroupRows * CONSUMERS), column(index % arguments.column_tiles * N) {}
};

// Loads the residual stream of a tile, each consumer's where the tile before has been stored.
template <int N, int CONSUMERS>
__device__ __forceinline__ void load_stream(const Arguments& arguments, Memory<N, CONSUMERS> shared,
                                            const Tile<N, CONSUMERS>& tile, uint32_t parity) {
  for (int group = 0; group < CONSUMERS; ++group) {
    barrier_wait(shared.stored(group), parity ^ 1);
    barrier_expect(shared.loaded(group), shared.kGroupBytes);
    for (int i = 0; i < N / shared.kPart; ++i)
      tensor_load(shared.part(group, i), arguments.out_map, tile.column + i * shared.kPart,
                  tile.row + group * kGroupRows, shared.loaded(group));
  }
}

// Weights of the first stages come before the wait for the kernel ahead; the residual stream after the first stages of
// its tile, which the product needs sooner.
template <int N, int CONSUMERS, Finish FINISH>
__device__ __forceinline__ void produce(const Arguments& arguments, Memory<N, CONSUMERS> shared) {
  using Place = Tile<N, CONSUMERS>;
  const auto load_weights = [&](const Place& tile, int step, int stage) {
    const int boxes = min(shared.kBoxes, (arguments.rows - tile.row + shared.kBoxRows - 1) / shared.kBoxRows);
    barrier_expect(shared.full(stage), boxes * shared.kBoxBytes + shared.kStageBytes - shared.kRowBytes);
    tensor_load(shared.weights(stage), arguments.weight_map, step * kStep, tile.column, shared.full(stage));
  };
  const auto load_rows = [&](const Place& tile, int step, int stage) {
    for (int i = 0; i < shared.kBoxes; ++i)
      if (const int row = tile.row + i * shared.kBoxRows; row < arguments.rows)
        tensor_load(shared.rows(stage) + i * shared.kBoxBytes, arguments.x_map, step * kStep, row, shared.full(stage));
  };
  Ring<shared.kStages> ring;
  const Place first(arguments, blockIdx.x);
  const int steps = arguments.inputs / kStep, early = min(steps, shared.kStages);
  for (int i = 0; i < early; ++i) load_weights(first, i, i);
  cudaGridDependencySynchronize();
  for (int i = 0; i < early; ++i, ring.advance()) load_rows(first, i, i);
  if (FINISH == kResidual) load_stream(arguments, shared, first, 0);
  int begin = early;
  uint32_t parity = 0;
  for (int index = blockIdx.x; index < arguments.tiles; index += gridDim.x, begin = 0, parity ^= 1) {
    const Place tile(arguments, index);
    for (int step = begin; step < steps; ++step, ring.advance()) {
      barrier_wait(shared.empty(ring.stage), ring.parity ^ 1);
      load_weights(tile, step, ring.stage);
      load_rows(tile, step, ring.stage);
      if (FINISH == kResidual && begin == 0 && step == early - 1) load_stream(arguments, shared, tile, parity);
    }
  }
}

// Stores what a consumer has finished of each tile. The last wait is for memory, the others until the copy engine has
// read the tile.
template <int N, int CONSUMERS>
__device__ __forceinline__ void store(const Arguments& arguments, Memory<N, CONSUMERS> shared, int group) {
  uint32_t parity = 0;
  cudaGridDependencySynchronize();
  for (int index = blockIdx.x; index < arguments.tiles; index += gridDim.x, parity ^= 1) {
    const Tile<N, CONSUMERS> tile(arguments, index);
    const int row = tile.row + group * kGroupRows;
    barrier_wait(shared.finished(group), parity);
    for (int i = 0; i < N / shared.kPart && row < arguments.rows; ++i)
      if (tile.column + i * shared.kPart < arguments.outputs)
        tensor_store(arguments.out_map, tile.column + i * shared.kPart, row, shared.part(group, i));
    asm volatile("cp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group.read 0;" ::: "memory");
    barrier_arrive(shared.stored(group));
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Finishes a consumer's sums in shared memory.
template <int N, int CONSUMERS, Finish FINISH>
__device__ __forceinline__ void finish_sums(const float (&sum)[N / 2], const Arguments& arguments,
                                            Memory<N, CONSUMERS> shared, int group, int first_column) {
  constexpr int kQuads = shared.kPart / 32;  // of four matrices in a part
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 8;
#pragma unroll
  for (int quad = 0; quad < N / 32; ++quad)
    finish_quad<FINISH>(sum + 16 * quad, arguments, first_column + 32 * quad,
                        shared.part(group, quad / kQuads) + shared.offset(row, quad % kQuads * 4 + lane / 8),
                        8 * shared.kPitch);
  if constexpr (N % 32)
    finish_square<FINISH>(sum + N / 32 * 16, arguments, first_column + N / 32 * 32,
                          shared.part(group, 0) + shared.offset(row + lane / 16 * 8, N / 32 * 4 + lane / 8 % 2));
}

template <int N, int CONSUMERS, Finish FINISH>
__device__ __forceinline__ void consume(const Arguments& arguments, Memory<N, CONSUMERS> shared) {
  Ring<shared.kStages> ring;
  const int group = warpgroup() - 1;
  uint32_t parity = 0;
  cudaGridDependencySynchronize();
  for (int index = blockIdx.x; index < arguments.tiles; index += gridDim.x, parity ^= 1) {
    const Tile<N, CONSUMERS> tile(arguments, index);
    float sum[N / 2];
    TileAngles angles;
    if (FINISH == kRotate && tile.column < arguments.rotated) angles.load(arguments, tile.row + group * kGroupRows);
    multiply(sum, shared, ring, arguments.inputs / kStep, group, tile.row + group * kGroupRows < arguments.rows);
    if (FINISH == kResidual)
      barrier_wait(shared.loaded(group), parity);
    else
      barrier_wait(shared.stored(group), parity ^ 1);
    if constexpr (FINISH == kRotate) angles.turn<N>(sum, arguments.rotated - tile.column);
    finish_sums<N, CONSUMERS, FINISH>(sum, arguments, shared, group, tile.column);
    fence_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared.finished(group));
  }
}

template <int N, int CONSUMERS, Finish FINISH>
__global__ void __launch_bounds__(128 * (1 + CONSUMERS), 1)
    codec_linear_tiles_kernel(const __grid_constant__ Arguments arguments) {
  extern __shared__ char memory[];
  const Memory<N, CONSUMERS> shared{{kept_address(memory)}};
  cudaTriggerProgrammaticLaunchCompletion();
  if (threadIdx.x == 0) shared.init_barriers();
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_shrink<32>();
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) produce<N, CONSUMERS, FINISH>(arguments, shared);
    if (threadIdx.x == 32 && arguments.dependent_launch) prefetch_weights(arguments);
    if (threadIdx.x % 32 == 0 && warp > 0 && warp <= CONSUMERS) store(arguments, shared, warp - 1);
  } else {
    registers_grow<CONSUMERS == 2 ? 232 : 160>();
    consume<N, CONSUMERS, FINISH>(arguments, shared);
  }
}

// Of tiles of whole heads.
template <int N, int CONSUMERS>
constexpr void (*rotating())(Arguments) {
  if constexpr (N % kRotatedDim == 0) return codec_linear_tiles_kernel<N, CONSUMERS, kRotate>;
  return nullptr;
}

template <int N, int CONSUMERS>
MossStatus launch(const CodecLinearParams& params, int multiprocessors) {
  using Block = Memory<N, CONSUMERS>;
  const bool in_turns = CONSUMERS == 2 && N != 160 && !(params.cos_sin && N == 192);  // that rotates nothing
  if (in_turns && count_tiles(params, Block::kRows, N) > multiprocessors)
    return launch_pingpong(params, multiprocessors);
  const TileShape shape = {Block::kRows, N, Block::kBoxRows, kGroupRows, Block::kPart, 128 * (1 + CONSUMERS),
                           Block::kBytes};
  return launch_tiled(kOp, params, multiprocessors, shape,
                      {codec_linear_tiles_kernel<N, CONSUMERS, kStore>, codec_linear_tiles_kernel<N, CONSUMERS, kGelu>,
                       codec_linear_tiles_kernel<N, CONSUMERS, kResidual>, rotating<N, CONSUMERS>()});
}

// What there is a kernel for.
struct Variant {
  int rows, columns;
  MossStatus (*launch)(const CodecLinearParams&, int multiprocessors);
};

template <int N, int CONSUMERS>
constexpr Variant kVariant = {kGroupRows * CONSUMERS, N, launch<N, CONSUMERS>};

constexpr Variant kVariants[] = {kVariant<192, 3>, kVariant<96, 3>,  kVariant<192, 2>, kVariant<160, 2>,
                                 kVariant<144, 2>, kVariant<128, 2>, kVariant<96, 2>};

}  // namespace

MossStatus launch_tiles(const CodecLinearParams& params) {
  if (params.out_dtype != MOSS_BFLOAT16 || (params.scale && params.gelu))
    return set_error(MOSS_ERROR_INVALID_ARGUMENT,
                     "`%s`: with a tile of %d outputs `out_dtype` must be bfloat16, and `gelu` 0 with `scale`", kOp,
                     params.tile_columns);
  for (const Variant& variant : kVariants) {
    if (variant.rows != params.tile_rows || variant.columns != params.tile_columns || params.slices != 1) continue;
    int device = 0, multiprocessors = 0;
    MossStatus status = check_cuda(cudaGetDevice(&device), kOp, "cudaGetDevice");
    if (status == MOSS_OK)
      status = check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), kOp,
                          "cudaDeviceGetAttribute");
    return status == MOSS_OK ? variant.launch(params, multiprocessors) : status;
  }
  return set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: there is no tile of %d rows, %d outputs and %d slices", kOp,
                   params.tile_rows, params.tile_columns, params.slices);
}

}  // namespace moss
