// moss_codec_linear for many rows, without a norm, where blocks take several tiles of the output, so that what follows
// the products of one can be hidden by those of the next. A block's two consumers, warpgroups that have a tile each,
// take turns on the tensor cores: one finishes its tile in shared memory while the other multiplies. One more thread
// keeps the copy engine ahead, and one more for each consumer has it bring the residual stream and store what is
// finished.
#include <cuda.h>

#include "codec_linear.h"
#include "device/tile_finish.cuh"
#include "device/tile_rotate.cuh"
#include "device/tile_turns.cuh"
#include "tile_launch.h"

namespace moss {
namespace {

constexpr char kOp[] = "codec_linear";
constexpr int kThreads = 128 * (1 + kTurnConsumers);
// Columns of 64 rows that are finished at a time, of a tile of so many.
constexpr int part_columns(int columns) { return columns % 64 ? 48 : 64; }

using Arguments = TileArguments;

// Shared memory for tiles of N columns: after the stages places for BUFFERS parts of each consumer's output, which
// hold the residual stream before. Each has two barriers: `ready` with the stream, or for what overwrites it, and
// `finished` by the consumer's four warps.
template <int N, int BUFFERS>
struct Memory : Shared<N, kHalves, kTurnConsumers * BUFFERS * kGroupRows * part_columns(N) * 2> {
  static constexpr int kPartColumns = part_columns(N), kPitch = kPartColumns * 2, kPartBytes = kGroupRows * kPitch;
  using Base = Shared<N, kHalves, kTurnConsumers * BUFFERS * kPartBytes>;
  static constexpr int kBuffers = BUFFERS, kColumnParts = N / kPartColumns, kParts = kHalves * kColumnParts;
  static_assert(N % kPartColumns == 0 && kParts % kBuffers == 0);

  // Of eight columns in a row of a part, with the swizzle of 64 columns.
  static __device__ __forceinline__ int offset(int row, int eight) {
    return row * kPitch + (kPartColumns == 64 ? eight ^ row % 8 : eight) * 16;
  }

  __device__ __forceinline__ uint32_t part(int group, int buffer) const {
    return this->extra() + (group * kBuffers + buffer) * kPartBytes;
  }
  __device__ __forceinline__ uint32_t ready(int group, int buffer) const {
    return this->full(Base::kStages + group * kBuffers + buffer);
  }
  __device__ __forceinline__ uint32_t finished(int group, int buffer) const { return ready(group, buffer) + 8; }

  // By one thread, ahead of a barrier of the block.
  __device__ __forceinline__ void init_barriers() const {
    for (int i = 0; i < kTurnConsumers * kBuffers; ++i) {
      barrier_init(ready(0, i), 1);
      barrier_init(finished(0, i), 4);
    }
    init_stages(*this);
  }
};

// First row and column of a tile. Columns vary fastest: the weights fit in L2, so that the rows are read from memory
// once.
template <int N>
struct Tile {
  int row, column;

  __device__ __forceinline__ Tile(const Arguments& arguments, int index)
      : row(index / arguments.column_tiles * kGroupRows * kHalves), column(index % arguments.column_tiles * N) {}
};

// Weights of the first stages come before the wait for the kernel ahead.
template <int N, int BUFFERS>
__device__ __forceinline__ void produce(const Arguments& arguments, Memory<N, BUFFERS> shared) {
  const auto load_weights = [&](const Tile<N>& tile, int step, int stage) {
    barrier_expect(shared.full(stage), shared.kStageBytes);
    tensor_load(shared.weights(stage), arguments.weight_map, step * kStep, tile.column, shared.full(stage));
  };
  const auto load_rows = [&](const Tile<N>& tile, int step, int stage) {
    tensor_load(shared.rows(stage), arguments.x_map, step * kStep, tile.row, shared.full(stage));
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

// Stores a consumer's parts, and brings the residual stream of a later one where one has been stored. The last wait is
// for memory, the others until the copy engine has read a part.
template <int N, int BUFFERS, Finish FINISH>
__device__ __forceinline__ void store(const Arguments& arguments, Memory<N, BUFFERS> shared, int group) {
  const int begin = blockIdx.x + group * gridDim.x, stride = kTurnConsumers * gridDim.x;
  const auto row_of = [&](const Tile<N>& tile, int part) { return tile.row + part / shared.kColumnParts * kGroupRows; };
  const auto column_of = [&](const Tile<N>& tile, int part) {
    return tile.column + part % shared.kColumnParts * shared.kPartColumns;
  };
  const auto prepare = [&](int index, int part) {
    if (index >= arguments.tiles) return;
    const int buffer = part % shared.kBuffers;
    const uint32_t ready = shared.ready(group, buffer);
    if (FINISH != kResidual) return barrier_arrive(ready);
    const Tile<N> tile(arguments, index);
    barrier_expect(ready, shared.kPartBytes);
    tensor_load(shared.part(group, buffer), arguments.out_map, column_of(tile, part), row_of(tile, part), ready);
  };
  cudaGridDependencySynchronize();
  for (int part = 0; part < shared.kBuffers; ++part) prepare(begin, part);
  uint32_t parity = 0;  // of a tile's first part
  for (int index = begin; index < arguments.tiles; index += stride, parity ^= shared.kParts / shared.kBuffers & 1) {
    const Tile<N> tile(arguments, index);
    for (int part = 0; part < shared.kParts; ++part) {
      const int buffer = part % shared.kBuffers, later = part + shared.kBuffers;
      const int row = row_of(tile, part), column = column_of(tile, part);
      barrier_wait(shared.finished(group, buffer), parity ^ (part / shared.kBuffers & 1));
      if (row < arguments.rows && column < arguments.outputs)
        tensor_store(arguments.out_map, column, row, shared.part(group, buffer));
      asm volatile("cp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group.read 0;" ::: "memory");
      later < shared.kParts ? prepare(index, later) : prepare(index + stride, later - shared.kParts);
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Finishes a consumer's sums in shared memory, part by part. `parity`: of the first part.
template <Finish FINISH, int N, int BUFFERS>
__device__ __forceinline__ void finish_parts(const float (&sum)[kHalves][N / 2], const Arguments& arguments,
                                             Memory<N, BUFFERS> shared, int group, int first_column, uint32_t parity) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 8;
#pragma unroll
  for (int part = 0; part < shared.kParts; ++part) {
    const int buffer = part % shared.kBuffers, column = part % shared.kColumnParts * shared.kPartColumns;
    barrier_wait(shared.ready(group, buffer), parity ^ (part / shared.kBuffers & 1));
    const float* const own = sum[part / shared.kColumnParts] + column / 2;
    const uint32_t place = shared.part(group, buffer);
    constexpr int kQuads = shared.kPartColumns / 32;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad)
      finish_quad<FINISH>(own + 16 * quad, arguments, first_column + column + 32 * quad,
                          place + shared.offset(row, quad * 4 + lane / 8), 8 * shared.kPitch);
    if constexpr (shared.kPartColumns % 32)
      finish_square<FINISH>(own + 16 * kQuads, arguments, first_column + column + 32 * kQuads,
                            place + shared.offset(row + lane / 16 * 8, kQuads * 4 + lane / 8 % 2));
    fence_async_shared();
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.finished(group, buffer));
  }
}

template <int N, int BUFFERS, Finish FINISH>
__device__ __forceinline__ void consume(const Arguments& arguments, Memory<N, BUFFERS> shared) {
  const int group = warpgroup() - 1, steps = arguments.inputs / kStep;
  Ring<shared.kStages> ring;
  skip(ring, group * steps);
  uint32_t parity = 0;
  if (group == 1) named_arrive(turn_of(0));
  if (FINISH == kRotate) cudaGridDependencySynchronize();  // ahead of reads of angles
  for (int index = blockIdx.x + group * gridDim.x; index < arguments.tiles; index += kTurnConsumers * gridDim.x) {
    const Tile<N> tile(arguments, index);
    float sum[kHalves][N / 2];
    TileAngles angles[kHalves];
    if (FINISH == kRotate && tile.column < arguments.rotated)
      for (int half = 0; half < kHalves; ++half) angles[half].load(arguments, tile.row + half * kGroupRows);
    multiply_in_turn<kHalves>(sum, shared, ring, steps, group, index + gridDim.x < arguments.tiles);
    skip(ring, steps);
    if constexpr (FINISH == kRotate)
#pragma unroll
      for (int half = 0; half < kHalves; ++half) angles[half].turn<N>(sum[half], arguments.rotated - tile.column);
    finish_parts<FINISH>(sum, arguments, shared, group, tile.column, parity);
    parity ^= shared.kParts / shared.kBuffers & 1;
  }
}

template <int N, int BUFFERS, Finish FINISH>
__global__ void __launch_bounds__(kThreads, 1)
    codec_linear_pingpong_kernel(const __grid_constant__ Arguments arguments) {
  extern __shared__ char memory[];
  const Memory<N, BUFFERS> shared{{kept_address(memory)}};
  cudaTriggerProgrammaticLaunchCompletion();
  if (threadIdx.x == 0) shared.init_barriers();
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_shrink<24>();
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) produce(arguments, shared);
    if (threadIdx.x == 96 && arguments.dependent_launch) prefetch_weights(arguments);
    if (threadIdx.x % 32 == 0 && warp > 0 && warp <= kTurnConsumers)
      store<N, BUFFERS, FINISH>(arguments, shared, warp - 1);
  } else {
    registers_grow<240>();
    consume<N, BUFFERS, FINISH>(arguments, shared);
  }
}

// Of tiles of whole heads that leave each thread registers for the angles of its rows.
template <int N, int BUFFERS>
constexpr void (*rotating())(Arguments) {
  if constexpr (N == 128) return codec_linear_pingpong_kernel<N, BUFFERS, kRotate>;
  return nullptr;
}

template <int N, int BUFFERS>
MossStatus launch(const CodecLinearParams& params, int multiprocessors) {
  using Block = Memory<N, BUFFERS>;
  const TileShape shape = {Block::kRows, N, Block::kRows, kGroupRows, Block::kPartColumns, kThreads, Block::kBytes};
  return launch_tiled(
      kOp, params, multiprocessors, shape,
      {codec_linear_pingpong_kernel<N, BUFFERS, kStore>, codec_linear_pingpong_kernel<N, BUFFERS, kGelu>,
       codec_linear_pingpong_kernel<N, BUFFERS, kResidual>, rotating<N, BUFFERS>()});
}

}  // namespace

MossStatus launch_pingpong(const CodecLinearParams& params, int multiprocessors) {
  switch (params.tile_columns) {
    case 192:
      return launch<192, 3>(params, multiprocessors);
    case 144:
      return launch<144, 3>(params, multiprocessors);
    case 128:
      return launch<128, 4>(params, multiprocessors);
    default:
      return launch<96, 4>(params, multiprocessors);
  }
}

}  // namespace moss
