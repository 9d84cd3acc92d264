// moss_codec_linear: for few rows, where the time is that of streaming the weights. A block takes a few outputs; its
// warps, and with long inputs the blocks of a cluster, share these, and their partial sums are added at the end. All
// weights of a thread's first batch, and those of the norm, are asked for before the kernel waits for the one ahead.
#include "checks.h"
#include "codec_linear.h"
#include "device/bulk_copy.cuh"
#include "device/cluster.cuh"
#include "device/copy_async.cuh"
#include "device/gelu.cuh"
#include "device/mma.cuh"
#include "device/tile_rotate.cuh"
#include "device/vector.cuh"
#include "launch.h"

namespace moss {
namespace {

using bf16 = __nv_bfloat16;

constexpr char kOp[] = "codec_linear";
constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kChunk = 32;     // inputs that a warp takes at once
constexpr int kTile = 8;       // rows or columns of a tile of the product
constexpr int kMaxRows = 32;
constexpr float kNormEps = 1e-5f;

// Sum and sum of squares of a row's inputs.
struct Moments {
  float sum, squares;

  __device__ __forceinline__ void add(float2 x) {
    sum += x.x + x.y;
    squares = fmaf(x.x, x.x, fmaf(x.y, x.y, squares));
  }
};

// Eight inputs of a row as they are stored.
template <typename X>
struct Inputs;

template <>
struct Inputs<bf16> {
  uint4 words;

  __device__ __forceinline__ void load(const bf16* x) { words = __ldcg(reinterpret_cast<const uint4*>(x)); }
  __device__ __forceinline__ void clear() { words = {}; }
  template <bool NORM>
  __device__ __forceinline__ uint4 operand(const uint4& norm_weight, Moments& moments) const {
    if constexpr (!NORM) return words;
    const uint32_t x[4] = {words.x, words.y, words.z, words.w};
    const uint32_t g[4] = {norm_weight.x, norm_weight.y, norm_weight.z, norm_weight.w};
    uint32_t y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      moments.add(unpack_bf16(x[i]));
      const __nv_bfloat162 product = __hmul2(reinterpret_cast<const __nv_bfloat162&>(x[i]),
                                             reinterpret_cast<const __nv_bfloat162&>(g[i]));
      y[i] = reinterpret_cast<const uint32_t&>(product);
    }
    return {y[0], y[1], y[2], y[3]};
  }
};

template <>
struct Inputs<float> {
  float4 low, high;

  __device__ __forceinline__ void load(const float* x) {
    low = __ldcg(reinterpret_cast<const float4*>(x));
    high = __ldcg(reinterpret_cast<const float4*>(x) + 1);
  }
  __device__ __forceinline__ void clear() { low = high = {}; }
  template <bool NORM>
  __device__ __forceinline__ uint4 operand(const uint4& norm_weight, Moments& moments) const {
    const float2 x[4] = {{low.x, low.y}, {low.z, low.w}, {high.x, high.y}, {high.z, high.w}};
    const uint32_t g[4] = {norm_weight.x, norm_weight.y, norm_weight.z, norm_weight.w};
    uint32_t y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 scale = NORM ? unpack_bf16(g[i]) : float2{1.0f, 1.0f};
      if constexpr (NORM) moments.add(x[i]);
      y[i] = pack_bf16(x[i].x * scale.x, x[i].y * scale.y);
    }
    return {y[0], y[1], y[2], y[3]};
  }
};

// Whether a thread's weights wait in shared memory, each thread's for itself: with the norm's, so many would leave its
// registers no room for inputs, which it would then fetch one after the other.
template <int COLUMNS, int BATCH, bool NORM>
constexpr bool kInShared = (COLUMNS + NORM) * BATCH > 10;

// Vectors of dynamic shared memory: those weights, and behind them what the blocks of a cluster send each other.
template <int COLUMNS, int BATCH, bool NORM>
constexpr int kWeightVectors = kInShared<COLUMNS, BATCH, NORM> ? BATCH * COLUMNS * kThreads : 0;

// ROWS: tiles of 8 rows. COLUMNS: tiles of 8 outputs of a block. BATCH: chunks whose weights a thread holds at once.
// SLICES: of the inputs, one for each block of a cluster; a block then finishes every SLICES-th row.
template <int ROWS, int COLUMNS, int BATCH, bool NORM, typename X, int SLICES>
__global__ void __launch_bounds__(kThreads, ROWS == 4 ? 1 : 2) codec_linear_kernel(const CodecLinearParams params) {
  constexpr int kOutputs = COLUMNS * kTile;
  constexpr int kPairs = (ROWS + 1) / 2;                         // 16 rows, as one product has
  constexpr int kPitch = kOutputs + (COLUMNS % 2 == 0) * kTile;  // so that a warp's rows lie in different banks
  constexpr bool kShared = kInShared<COLUMNS, BATCH, NORM>;
  // Chunks whose inputs a thread loads at once: as many as there is room for in registers.
  constexpr int kFit = (sizeof(X) == 4 ? 6 : kShared ? 20 : 12) / ROWS;
  constexpr int kAtOnce = kFit < BATCH ? kFit : BATCH;
  extern __shared__ uint4 own_weights[];  // [BATCH][COLUMNS][kThreads]
  __shared__ float2 partial[kPairs][kWarps][16][kPitch / 2];
  __shared__ Moments moments_of[NORM ? kWarps : 1][NORM ? ROWS * kTile : 1];
  static_assert(SLICES == 1 || !NORM);
  static_assert(sizeof(partial) + sizeof(moments_of) <= 48 << 10);  // CUDA 12 has no room for more that is not dynamic
  // Of the rows that this block finishes, from each block of the cluster.
  using Sums = float2[kPairs][16][kOutputs / 2];
  Sums* const sums_of = reinterpret_cast<Sums*>(own_weights + kWeightVectors<COLUMNS, BATCH, NORM>);

  const int rows = params.rows, outputs = params.outputs, inputs = params.inputs;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  const int slice = blockIdx.x % SLICES, first = blockIdx.x / SLICES * kOutputs;
  const int chunks = inputs / kChunk, share = (chunks + SLICES * kWarps - 1) / (SLICES * kWarps);
  const int begin = min((slice * kWarps + warp) * share, chunks), end = min(begin + share, chunks);
  const int own_input = begin * kChunk + quarter * 8;

  cudaTriggerProgrammaticLaunchCompletion();
  if constexpr (SLICES > 1) cluster_arrive_relaxed();
  const bf16* weight[COLUMNS];
  uint4 held[kShared ? 1 : BATCH][COLUMNS], gain[NORM ? BATCH : 1] = {};
  const auto load_batch = [&](int batch) {
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const bool inside = begin + batch + i < end;
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) {
        const bf16* source = weight[j] + (batch + i) * kChunk;
        if constexpr (kShared)
          copy_async(own_weights + (i * COLUMNS + j) * kThreads + threadIdx.x, source, inside);
        else
          held[i][j] = inside ? load_weights(source) : uint4{};
      }
      if constexpr (NORM) {
        const bf16* source = static_cast<const bf16*>(params.norm_weight) + own_input + (batch + i) * kChunk;
        gain[i] = inside ? load_weights(source) : uint4{};
      }
    }
    if constexpr (kShared) copy_async_commit();
  };
#pragma unroll
  for (int j = 0; j < COLUMNS; ++j) {
    const int column = min(first + j * kTile + group, outputs - 1);
    weight[j] = static_cast<const bf16*>(params.weight) + static_cast<int64_t>(column) * inputs + own_input;
  }
  load_batch(0);

  // After the products each thread finishes two neighbouring outputs of a row in each 16 rows.
  const int out_row = threadIdx.x / (kOutputs / 2), out_pair = threadIdx.x % (kOutputs / 2);
  const int column = first + 2 * out_pair;
  const bool finishes = out_row < 16 && column < outputs;
  uint32_t scale = 0;  // two, as they are stored: nothing waits for them either
  float2 weight_sum = {}, bias_sum = {};
  if (finishes && NORM) {
    weight_sum = *reinterpret_cast<const float2*>(params.norm_sums + column);
    bias_sum = *reinterpret_cast<const float2*>(params.norm_sums + outputs + column);
  }
  if (finishes && params.scale)
    scale = *reinterpret_cast<const uint32_t*>(static_cast<const bf16*>(params.scale) + column);
  cudaGridDependencySynchronize();

  // As it is stored, so that nothing waits for it before the sums are there.
  uint2 residual[kPairs] = {};
  const bool wide = params.out_dtype == MOSS_FLOAT32;
  const auto load_residual = [&](auto two) {
    using Two = decltype(two);
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      const int row = 16 * p + out_row;
      if (params.scale && finishes && row < rows)
        reinterpret_cast<Two&>(residual[p]) =
            __ldcg(static_cast<const Two*>(params.out) + (static_cast<int64_t>(row) * outputs + column) / 2);
    }
  };
  if (wide)
    load_residual(uint2{});
  else
    load_residual(uint32_t{});

  float product[kPairs][COLUMNS][4] = {};
  Moments moments[ROWS] = {};
  const X* x = static_cast<const X*>(params.x) + static_cast<int64_t>(group) * inputs + own_input;
#pragma unroll 1
  for (int batch = 0; begin + batch < end; batch += BATCH) {
    if (batch > 0) load_batch(batch);
#pragma unroll
    for (int i = 0; i < BATCH; i += kAtOnce) {
      Inputs<X> loaded[kAtOnce][ROWS];
#pragma unroll
      for (int a = 0; a < kAtOnce && i + a < BATCH; ++a) {
        const bool inside = begin + batch + i + a < end;
        const int input = (batch + i + a) * kChunk;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          loaded[a][r].clear();
          if (inside && r * kTile + group < rows)
            loaded[a][r].load(x + static_cast<int64_t>(r * kTile) * inputs + input);
        }
      }
      __syncwarp();  // else the compiler saves registers and waits for some before it asks for the next
      if constexpr (kShared) copy_async_wait<0>();
#pragma unroll
      for (int a = 0; a < kAtOnce && i + a < BATCH; ++a) {
        uint4 operand[2 * kPairs] = {};
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
          operand[r] = loaded[a][r].template operand<NORM>(gain[NORM ? i + a : 0], moments[r]);
#pragma unroll
        for (int p = 0; p < kPairs; ++p)
#pragma unroll
          for (int j = 0; j < COLUMNS; ++j)
            mma(product[p][j], operand[2 * p], operand[2 * p + 1],
                kShared ? own_weights[((i + a) * COLUMNS + j) * kThreads + threadIdx.x] : held[kShared ? 0 : i + a][j]);
      }
    }
  }

#pragma unroll
  for (int p = 0; p < kPairs; ++p)
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
      partial[p][warp][group][j * (kTile / 2) + quarter] = {product[p][j][0], product[p][j][1]};
      if (2 * p + 1 < ROWS)
        partial[p][warp][group + 8][j * (kTile / 2) + quarter] = {product[p][j][2], product[p][j][3]};
    }
  if constexpr (NORM) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int distance = 1; distance < 4; distance *= 2) {
        moments[r].sum += __shfl_xor_sync(0xffffffffu, moments[r].sum, distance);
        moments[r].squares += __shfl_xor_sync(0xffffffffu, moments[r].squares, distance);
      }
      if (quarter == 0) moments_of[warp][r * kTile + group] = moments[r];
    }
  }
  __syncthreads();

  const auto sum_of_warps = [&](int p) {
    float2 y = {};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      y.x += partial[p][w][out_row][out_pair].x;
      y.y += partial[p][w][out_row][out_pair].y;
    }
    return y;
  };
  if constexpr (SLICES > 1) {
    cluster_wait();
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      if (!finishes || 16 * p + out_row >= rows) continue;
      const float2 y = sum_of_warps(p);
      store_peer(peer_address(shared_address(&sums_of[slice][p][out_row][out_pair]), out_row % SLICES), y.x, y.y);
    }
    __syncwarp();
    cluster_arrive(), cluster_wait();
    if (out_row % SLICES != slice) return;
  }

  if (!finishes) return;
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    const int row = 16 * p + out_row;
    if (row >= rows) return;
    float2 y = {};
    if constexpr (SLICES == 1) {
      y = sum_of_warps(p);
    } else {
#pragma unroll
      for (int i = 0; i < SLICES; ++i)
        y = {y.x + sums_of[i][p][out_row][out_pair].x, y.y + sums_of[i][p][out_row][out_pair].y};
    }
    if constexpr (NORM) {
      Moments total = {};
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        total.sum += moments_of[w][row].sum;
        total.squares += moments_of[w][row].squares;
      }
      const float mean = total.sum / inputs;
      const float factor = rsqrtf(fmaxf(total.squares / inputs - mean * mean, 0.0f) + kNormEps);
      y.x = (y.x - mean * weight_sum.x) * factor + bias_sum.x;
      y.y = (y.y - mean * weight_sum.y) * factor + bias_sum.y;
    }
    if (params.gelu) y = {gelu(y.x), gelu(y.y)};
    if (params.scale) {
      const uint2 words = residual[p];
      const float2 before = wide ? float2{__uint_as_float(words.x), __uint_as_float(words.y)} : unpack_bf16(words.x);
      const float2 factor = unpack_bf16(scale);
      y = {fmaf(factor.x, y.x, before.x), fmaf(factor.y, y.y, before.y)};
    }
    const int64_t place = static_cast<int64_t>(row) * outputs + column;
    if (wide)
      *reinterpret_cast<float2*>(static_cast<float*>(params.out) + place) = y;
    else
      *reinterpret_cast<uint32_t*>(static_cast<bf16*>(params.out) + place) = pack_bf16(y.x, y.y);
  }
}

template <int ROWS, int COLUMNS, int BATCH, bool NORM, typename X, int SLICES = 1>
MossStatus launch_rows(const CodecLinearParams& params) {
  auto* kernel = codec_linear_kernel<ROWS, COLUMNS, BATCH, NORM, X, SLICES>;
  constexpr int kOutputs = COLUMNS * kTile, kSums = SLICES > 1 ? SLICES * ((ROWS + 1) / 2) * 16 * kOutputs : 0;
  constexpr int kBytes = kWeightVectors<COLUMNS, BATCH, NORM> * sizeof(uint4) + kSums * sizeof(float);
  const MossStatus status = check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), kOp, "cudaFuncSetAttribute");
  if (status != MOSS_OK) return status;
  const dim3 grid((params.outputs + kOutputs - 1) / kOutputs * SLICES);
  return launch_kernel(kOp, kernel, params, grid, dim3(kThreads), kBytes, SLICES);
}

template <int COLUMNS, int BATCH, bool NORM, typename X>
MossStatus launch(const CodecLinearParams& params) {
  if (params.rows <= 8) return launch_rows<1, COLUMNS, BATCH, NORM, X>(params);
  if (params.rows <= 16) return launch_rows<2, COLUMNS, BATCH, NORM, X>(params);
  return launch_rows<4, COLUMNS, BATCH, NORM, X>(params);
}

// With 24 outputs a block where blocks of 16 would be more than run at once: two on a multiprocessor, or of more than
// 16 rows one.
template <typename X>
MossStatus launch_norm(const CodecLinearParams& params, int share) {
  if (share <= 3) return params.rows > 16 ? launch_rows<4, 3, 3, true, X>(params) : launch<2, 3, true, X>(params);
  if constexpr (sizeof(X) == 2)
    if (params.outputs > 4096 && params.rows <= 16)
      return params.rows <= 8 ? launch_rows<1, 3, 5, true, X>(params) : launch_rows<2, 3, 5, true, X>(params);
  return launch<2, 5, true, X>(params);
}

// Blocks for most multiprocessors; a batch that holds all of a thread's weights at the codec's sizes. Each block reads
// all rows: where these are many and long, more than all weights, so that slices of them are shared.
MossStatus dispatch(const CodecLinearParams& params) {
  const int share = (params.inputs / kChunk + kWarps - 1) / kWarps;
  if (params.norm_weight)
    return params.x_dtype == MOSS_FLOAT32 ? launch_norm<float>(params, share) : launch_norm<bf16>(params, share);
  if (share <= 3) return params.outputs > 1536 ? launch<2, 3, false, bf16>(params) : launch<1, 3, false, bf16>(params);
  if (share <= 5) return params.outputs > 2048 ? launch<2, 5, false, bf16>(params) : launch<1, 5, false, bf16>(params);
  if (share <= 12)
    return params.rows > 16 ? launch_rows<4, 4, 3, false, bf16, 4>(params) : launch<1, 12, false, bf16>(params);
  if (params.rows > 8 && params.rows <= 16) return launch_rows<2, 2, 10, false, bf16, 2>(params);
  return params.rows <= 8 ? launch_rows<1, 1, 20, false, bf16>(params) : launch_rows<4, 1, 20, false, bf16>(params);
}

// What the kernels of tiles ask for beside the rest.
MossStatus check_tile(const CodecLinearParams& params) {
  MossStatus status = check_range(kOp, "slices", params.slices, 1, 8);
  if (status != MOSS_OK) return status;
  const int slice = kClusterStep * params.slices;
  if (params.norm_weight || params.x_dtype != MOSS_BFLOAT16 || params.outputs % 8 != 0 || params.inputs % slice != 0)
    return set_error(MOSS_ERROR_INVALID_ARGUMENT,
                     "`%s`: with a tile there must be no norm, `x_dtype` bfloat16, `outputs` a multiple of 8 and "
                     "`inputs` of %d, got %d and %d",
                     kOp, slice, params.outputs, params.inputs);
  if (params.partial && (params.gelu || params.scale || params.out_dtype != MOSS_FLOAT32))
    return set_error(MOSS_ERROR_INVALID_ARGUMENT,
                     "`%s`: with `partial` there must be no GELU and no scale, and `out_dtype` float32", kOp);
  status = check_pointer(kOp, "scale", params.scale, 16, true);
  return status == MOSS_OK ? check_pointer(kOp, "out", params.out, 16) : status;
}

MossStatus check_rotation(const CodecLinearParams& params) {
  const bool whole = is_wide(params) && params.tile_columns % kRotatedDim == 0;
  if (whole && params.outputs % (3 * kRotatedDim) == 0 && !params.gelu && !params.scale && !params.partial)
    return MOSS_OK;
  return set_error(MOSS_ERROR_INVALID_ARGUMENT,
                   "`%s`: with `cos_sin` there must be tiles of 128 or 192 outputs, not in slices, `outputs` a multiple of "
                   "%d, and neither `gelu` nor `scale`",
                   kOp, 3 * kRotatedDim);
}

MossStatus check(const CodecLinearParams& params) {
  MossStatus status = check_range(kOp, "rows", params.rows, 0, params.tile_columns > 0 ? kClusterMaxRows : kMaxRows);
  if (status == MOSS_OK) status = check_range(kOp, "outputs", params.outputs, 2, kMostRows);
  if (status == MOSS_OK) status = check_at_least(kOp, "inputs", params.inputs, kChunk);
  if (status == MOSS_OK && (params.outputs % 2 != 0 || params.inputs % kChunk != 0))
    status = set_error(MOSS_ERROR_INVALID_ARGUMENT,
                       "`%s`: `outputs` must be even and `inputs` a multiple of %d, got %d and %d", kOp, kChunk,
                       params.outputs, params.inputs);
  if (status == MOSS_OK) status = check_dtype(kOp, "x_dtype", params.x_dtype);
  if (status == MOSS_OK) status = check_dtype(kOp, "out_dtype", params.out_dtype);
  const bool supported = params.x_dtype == MOSS_BFLOAT16 || (params.x_dtype == MOSS_FLOAT32 && params.norm_weight);
  if (status == MOSS_OK && (!supported || params.out_dtype == MOSS_FLOAT16))
    status = set_error(MOSS_ERROR_INVALID_ARGUMENT,
                       "`%s`: `x_dtype` must be bfloat16, or float32 with a norm, `out_dtype` bfloat16 or float32", kOp);
  if (status == MOSS_OK) status = check_pointer(kOp, "x", params.x, 16);
  if (status == MOSS_OK) status = check_pointer(kOp, "weight", params.weight, 16);
  if (status == MOSS_OK) status = check_pointer(kOp, "norm_weight", params.norm_weight, 16, true);
  if (status == MOSS_OK) status = check_pointer(kOp, "norm_sums", params.norm_sums, 8, params.norm_weight == nullptr);
  if (status == MOSS_OK) status = check_pointer(kOp, "scale", params.scale, 4, true);
  if (status == MOSS_OK) status = check_pointer(kOp, "cos_sin", params.cos_sin, 8, true);
  if (status == MOSS_OK) status = check_pointer(kOp, "out", params.out, 8);
  if (status == MOSS_OK && (params.tile_columns > 0 || params.partial)) status = check_tile(params);
  if (status == MOSS_OK && params.cos_sin) status = check_rotation(params);
  return status;
}

}  // namespace
}  // namespace moss

extern "C" MossStatus moss_codec_linear(const CodecLinearParams* params) {
  using namespace moss;
  MossStatus status = check_params(kOp, params);
  if (status == MOSS_OK && params->rows == 0) return MOSS_OK;
  if (status == MOSS_OK) status = check(*params);
  if (status != MOSS_OK) return status;
  if (params->normed) return launch_normed(*params);
  if (params->partial) return launch_partial(*params);
  if (is_wide(*params)) return launch_tiles(*params);
  return params->tile_columns > 0 ? launch_clusters(*params) : dispatch(*params);
}
