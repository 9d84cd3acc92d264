// moss_codec_linear that leaves the rows of the next norm, too: scale times the product is added to the residual
// stream, and the stream is normalised while it is in registers. A row lies in the tiles of eight blocks, which tell
// each other its moments. The weights, the scale and the norm are on their way before the kernel waits for the one
// ahead of it.
#include <cuda.h>

#include "checks.h"
#include "codec_linear.h"
#include "device/mma.cuh"
#include "device/row_moments.cuh"
#include "device/tile_product.cuh"
#include "launch.h"
#include "tensor_map.h"

namespace moss {
namespace {

using bf16 = __nv_bfloat16;

constexpr char kOp[] = "codec_linear";
constexpr int kColumns = 96, kWidth = kParts * kColumns;
constexpr int kRuns = kColumns / 32;  // of eight neighbours that a thread has of a row

struct Arguments : CodecLinearParams {
  CUtensorMap x_map, weight_map;
  int steps, box_rows;
};

// Leaves room for blocks of other kernels.
template <int GROUPS>
using Memory = Shared<kColumns, GROUPS, 0, 198 << 10>;

__device__ __forceinline__ uint32_t& word(uint4& words, int i) { return reinterpret_cast<uint32_t*>(&words)[i]; }

__device__ __forceinline__ uint32_t normalised(float2 x, float mean, float factor, uint32_t weight, uint32_t bias) {
  const float2 w = unpack_bf16(weight), b = unpack_bf16(bias);
  return pack_bf16(fmaf((x.x - mean) * factor, w.x, b.x), fmaf((x.y - mean) * factor, w.y, b.y));
}

// Of a thread's sums, two neighbours of run `run` in the lower or upper row: pair `i` of four.
__device__ __forceinline__ float2& pair_of(float (&sum)[kColumns / 2], int run, int i, int half) {
  return *reinterpret_cast<float2*>(&sum[4 * (4 * run + i) + 2 * half]);
}

// For a part that has left: its columns of a lane's rows. `stream`, `normed`: where these begin.
__device__ __forceinline__ void normalise_part(const Arguments& arguments, const RowExchange& exchange,
                                               const RowNorm& norm, const bf16* stream, bf16* normed, int part) {
#pragma unroll 1
  for (int column = part * kColumns + threadIdx.x % 4 * 8; column < (part + 1) * kColumns; column += 32) {
    uint4 weight = load_weights(static_cast<const bf16*>(arguments.next_norm_weight) + column);
    uint4 bias = load_weights(static_cast<const bf16*>(arguments.next_norm_bias) + column);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (exchange.inside[half]) {
        uint4 words = __ldcg(reinterpret_cast<const uint4*>(stream + 8 * half * kWidth + column));
#pragma unroll
        for (int i = 0; i < 4; ++i)
          word(words, i) = normalised(unpack_bf16(word(words, i)), norm.mean[half], norm.factor[half], word(weight, i),
                                      word(bias, i));
        *reinterpret_cast<uint4*>(normed + 8 * half * kWidth + column) = words;
      }
  }
}

template <int GROUPS>
__device__ __forceinline__ void consume(const Arguments& arguments, Memory<GROUPS> shared, int first_row) {
  const int part = blockIdx.x, row = first_row + threadIdx.x / 32 * kWarpRows + threadIdx.x % 32 / 4;
  const int column = part * kColumns + threadIdx.x % 4 * 8;  // of the first run
  bf16* const stream = static_cast<bf16*>(arguments.out) + static_cast<int64_t>(row) * kWidth;
  bf16* const normed = static_cast<bf16*>(arguments.normed) + static_cast<int64_t>(row) * kWidth;
  uint4 scale[kRuns], weight[kRuns], bias[kRuns], words[2][kRuns] = {};
#pragma unroll
  for (int run = 0; run < kRuns; ++run) {
    const int place = column + 32 * run;
    scale[run] = load_weights(static_cast<const bf16*>(arguments.scale) + place);
    weight[run] = load_weights(static_cast<const bf16*>(arguments.next_norm_weight) + place);
    bias[run] = load_weights(static_cast<const bf16*>(arguments.next_norm_bias) + place);
  }
  cudaGridDependencySynchronize();
  const RowExchange exchange(static_cast<SharedRows*>(arguments.moments) + row / kWarpRows, part, row < arguments.rows,
                             row + 8 < arguments.rows);
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (exchange.inside[half])
#pragma unroll
      for (int run = 0; run < kRuns; ++run)
        words[half][run] = __ldcg(reinterpret_cast<const uint4*>(stream + 8 * half * kWidth + column + 32 * run));

  Ring<shared.kStages> ring;
  float sum[kColumns / 2];
  multiply(sum, shared, ring, arguments.steps, warpgroup(), true);
  if (row - threadIdx.x % 32 / 4 >= arguments.rows) return;  // the warp has no rows

  // Sums become the stream as it is stored.
  PartMoments own[2] = {};
#pragma unroll
  for (int run = 0; run < kRuns; ++run) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 factor = unpack_bf16(word(scale[run], i));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float2& x = pair_of(sum, run, i, half);
        const float2 old = unpack_bf16(word(words[half][run], i));
        word(words[half][run], i) = pack_bf16(fmaf(factor.x, x.x, old.x), fmaf(factor.y, x.y, old.y));
        x = unpack_bf16(word(words[half][run], i));
        own[half].sum += x.x + x.y;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (exchange.inside[half])
        *reinterpret_cast<uint4*>(stream + 8 * half * kWidth + column + 32 * run) = words[half][run];
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) own[half].sum = quad_sum(own[half].sum);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float mean = own[half].sum * (1.0f / kColumns);
#pragma unroll
    for (int run = 0; run < kRuns; ++run)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = pair_of(sum, run, i, half), distance = {x.x - mean, x.y - mean};
        own[half].squares = fmaf(distance.x, distance.x, fmaf(distance.y, distance.y, own[half].squares));
      }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) own[half].squares = quad_sum(own[half].squares);

  exchange.send(own);
  RowNorm norm;
  const uint32_t before = exchange.collect(norm, kColumns);
  if (before == kLeft) return;
#pragma unroll
  for (int run = 0; run < kRuns; ++run)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 result;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        word(result, i) = normalised(pair_of(sum, run, i, half), norm.mean[half], norm.factor[half],
                                     word(weight[run], i), word(bias[run], i));
      if (exchange.inside[half]) *reinterpret_cast<uint4*>(normed + 8 * half * kWidth + column + 32 * run) = result;
    }
  uint32_t left = exchange.left_to_do(before);
#pragma unroll 1
  for (; left; left &= left - 1) normalise_part(arguments, exchange, norm, stream, normed, __ffs(left) - 1);
}

template <int GROUPS>
__global__ void __launch_bounds__(128 * GROUPS + 32, 1)
    codec_linear_norm_kernel(const __grid_constant__ Arguments arguments) {
  extern __shared__ char memory[];
  const Memory<GROUPS> shared{kept_address(memory)};
  constexpr int kProducer = 128 * GROUPS;
  begin_tile(arguments, shared);
  const int first_row = blockIdx.y * shared.kRows;
  if (threadIdx.x < kProducer) return consume<GROUPS>(arguments, shared, first_row);
  if (threadIdx.x > kProducer) return;
  produce_tile(arguments, shared, first_row, 0,
               [&](uint32_t destination, int input, uint32_t barrier, uint64_t policy) {
                 tensor_load_runs(destination, arguments.weight_map, input, blockIdx.x * kRuns, barrier, policy);
               });
}

template <int GROUPS>
MossStatus launch(const CodecLinearParams& params) {
  using Own = Memory<GROUPS>;
  Arguments arguments = {};
  static_cast<CodecLinearParams&>(arguments) = params;
  arguments.steps = params.inputs / kStep;
  arguments.box_rows = Own::kRows;
  MossStatus status = make_map(kOp, &arguments.x_map, params.x, params.rows, params.inputs, Own::kRows);
  if (status == MOSS_OK)
    status = make_runs_map(kOp, &arguments.weight_map, params.weight, params.outputs, params.inputs, kColumns);
  const auto kernel = codec_linear_norm_kernel<GROUPS>;
  if (status == MOSS_OK)
    status = check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Own::kBytes), kOp,
                        "cudaFuncSetAttribute");
  if (status != MOSS_OK) return status;
  // The blocks of a row follow each other, so that they run at once.
  const dim3 grid(kParts, (params.rows + Own::kRows - 1) / Own::kRows);
  return launch_kernel(kOp, kernel, arguments, grid, dim3(128 * GROUPS + 32), Own::kBytes);
}

}  // namespace

MossStatus launch_normed(const CodecLinearParams& params) {
  if (params.outputs != kWidth || params.slices != 1 || params.tile_columns != kColumns || params.gelu ||
      params.cos_sin || params.partial || params.out_dtype != MOSS_BFLOAT16)
    return set_error(
        MOSS_ERROR_INVALID_ARGUMENT,
        "`%s`: with `normed` there must be %d outputs, bfloat16, in tiles of %d, not in slices, and neither "
        "`gelu` nor `cos_sin`, got %d outputs in tiles of %d and %d slices, `out_dtype` %d, `gelu` %d, `cos_sin` %p",
        kOp, kWidth, kColumns, params.outputs, params.tile_columns, params.slices, static_cast<int>(params.out_dtype),
        params.gelu, static_cast<const void*>(params.cos_sin));
  MossStatus status = check_pointer(kOp, "scale", params.scale, 16);
  if (status == MOSS_OK) status = check_pointer(kOp, "next_norm_weight", params.next_norm_weight, 16);
  if (status == MOSS_OK) status = check_pointer(kOp, "next_norm_bias", params.next_norm_bias, 16);
  if (status == MOSS_OK) status = check_pointer(kOp, "normed", params.normed, 16);
  if (status == MOSS_OK) status = check_pointer(kOp, "moments", params.moments, 128);
  if (status != MOSS_OK) return status;
  if (params.tile_rows == 64) return launch<1>(params);
  if (params.tile_rows == 128) return launch<2>(params);
  return set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: with `normed` there must be tiles of 64 or 128 rows, got %d",
                   kOp, params.tile_rows);
}

}  // namespace moss
