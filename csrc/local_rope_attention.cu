// moss_local_rope_attention: one warp per (batch row, head); a lane holds four consecutive dims.
#include "checks.h"
#include "device/vector.cuh"
#include "launch.h"

namespace moss {
namespace {

constexpr char kOp[] = "local_rope_attention";
constexpr int kWarp = 32, kWarps = 4;
constexpr int kDims = 4;
constexpr int kMaxPositions = kWarp;  // lane p keeps the score of position p
constexpr unsigned kFullMask = 0xffffffffu;

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullMask, value, offset);
  return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(kFullMask, value, offset));
  return value;
}

// The pairs (0, 1) and (2, 3), rotated in fp32 and rounded once.
template <typename T>
__device__ __forceinline__ Vector<T, kDims> rotate(Vector<T, kDims> x, Vector<T, 2> cos, Vector<T, 2> sin) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float even = to_float(x.value[2 * i]), odd = to_float(x.value[2 * i + 1]);
    const float c = to_float(cos.value[i]), s = to_float(sin.value[i]);
    x.value[2 * i] = from_float<T>(even * c - odd * s);
    x.value[2 * i + 1] = from_float<T>(odd * c + even * s);
  }
  return x;
}

template <typename T>
__device__ __forceinline__ float partial_dot(Vector<T, kDims> a, Vector<T, kDims> b) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kDims; ++i) sum += to_float(a.value[i]) * to_float(b.value[i]);
  return sum;
}

// Attention of q over the cached positions before `position`, and the new k and v.
template <typename T>
__device__ __forceinline__ Vector<T, kDims> attend(const LocalRopeAttentionParams& params, Vector<T, kDims> q,
                                                   Vector<T, kDims> k, Vector<T, kDims> v, const T* k_cache,
                                                   const T* v_cache, bool in_head, int lane) {
  const int64_t stride = static_cast<int64_t>(params.heads) * params.head_dim;
  float score = -INFINITY;
#pragma unroll 4
  for (int p = 0; p <= params.position; ++p) {
    Vector<T, kDims> key = k;
    if (in_head && p < params.position) key = Vector<T, kDims>::load(k_cache + p * stride);
    const float dot = warp_sum(partial_dot(q, key));
    if (lane == p) score = dot * rsqrtf(static_cast<float>(params.head_dim));
  }
  const float weight = expf(score - warp_max(score));
  const float total = warp_sum(weight);

  float sum[kDims] = {};
#pragma unroll 4
  for (int p = 0; p <= params.position; ++p) {
    Vector<T, kDims> value = v;
    if (in_head && p < params.position) value = Vector<T, kDims>::load(v_cache + p * stride);
    const float w = __shfl_sync(kFullMask, weight, p);
#pragma unroll
    for (int i = 0; i < kDims; ++i) sum[i] += w * to_float(value.value[i]);
  }
  Vector<T, kDims> out;
#pragma unroll
  for (int i = 0; i < kDims; ++i) out.value[i] = from_float<T>(sum[i] / total);
  return out;
}

template <typename T, bool LOOKUP, bool DEPENDENT>
__global__ void __launch_bounds__(kWarp* kWarps) local_rope_attention_kernel(const LocalRopeAttentionParams params) {
  if constexpr (DEPENDENT) {
    cudaTriggerProgrammaticLaunchCompletion();
    cudaGridDependencySynchronize();
  }
  const int lane = threadIdx.x, head = blockIdx.x * kWarps + threadIdx.y;
  if (head >= params.heads) return;
  const int64_t row = blockIdx.y, width = static_cast<int64_t>(params.heads) * params.head_dim;
  const int dim = lane * kDims;
  const bool in_head = dim < params.head_dim;
  const int64_t column = static_cast<int64_t>(head) * params.head_dim + dim;

  Vector<T, kDims> q = {}, k = {}, v = {};
  T* const out = static_cast<T*>(params.out) + row * width + column;
  const T* source;
  if constexpr (LOOKUP) {
    const int64_t code = params.codes[row * params.codes_stride];
    const bool valid = code >= 0 && code < params.vocab;
    const int64_t entry = (params.position - 1) * params.vocab + code;
    T* const residual = static_cast<T*>(params.residual) + row * width + column;
    Vector<T, kDims> embedding = {};
    if (in_head) {
      if (valid)
        embedding = Vector<T, kDims>::load(static_cast<const T*>(params.audio_embeddings) + entry * width + column);
      else
        embedding.store(out);
      embedding.store(residual);
    }
    if (!valid) return;
    source = static_cast<const T*>(params.table) + entry * 3 * width + column;
  } else {
    source = static_cast<const T*>(params.qkv) + row * 3 * width + column;
  }
  if (in_head) {
    q = Vector<T, kDims>::load(source);
    k = Vector<T, kDims>::load(source + width);
    v = Vector<T, kDims>::load(source + 2 * width);
    if constexpr (!LOOKUP) {
      const int64_t pair = static_cast<int64_t>(params.position) * (params.head_dim / 2) + dim / 2;
      const Vector<T, 2> cos = Vector<T, 2>::load(static_cast<const T*>(params.cos) + pair);
      const Vector<T, 2> sin = Vector<T, 2>::load(static_cast<const T*>(params.sin) + pair);
      q = rotate(q, cos, sin);
      k = rotate(k, cos, sin);
    }
  }
  T* const k_cache = static_cast<T*>(params.k_cache) + row * params.positions * width + column;
  T* const v_cache = static_cast<T*>(params.v_cache) + row * params.positions * width + column;
  const Vector<T, kDims> result = attend(params, q, k, v, k_cache, v_cache, in_head, lane);
  if (in_head) {
    k.store(k_cache + params.position * width);
    v.store(v_cache + params.position * width);
    result.store(out);
  }
}

template <typename T, bool LOOKUP>
MossStatus launch(const LocalRopeAttentionParams& params) {
  auto* kernel = params.dependent_launch ? local_rope_attention_kernel<T, LOOKUP, true>
                                         : local_rope_attention_kernel<T, LOOKUP, false>;
  const dim3 grid((params.heads + kWarps - 1) / kWarps, params.batch);
  return launch_kernel(kOp, kernel, params, grid, dim3(kWarp, kWarps));
}

template <typename T>
MossStatus launch_form(const LocalRopeAttentionParams& params) {
  return params.qkv ? launch<T, false>(params) : launch<T, true>(params);
}

MossStatus check_sizes(const LocalRopeAttentionParams& params) {
  const bool lookup = params.qkv == nullptr;
  MossStatus status = check_range(kOp, "batch", params.batch, 0, 65535);
  if (status == MOSS_OK) status = check_range(kOp, "heads", params.heads, 1, 65535);
  if (status == MOSS_OK) status = check_range(kOp, "head_dim", params.head_dim, 16, kWarp * kDims);
  if (status == MOSS_OK && params.head_dim % kDims != 0)
    status = set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: `head_dim` must be a multiple of %d, got %d", kOp, kDims,
                       params.head_dim);
  if (status == MOSS_OK) status = check_range(kOp, "positions", params.positions, 1, kMaxPositions);
  if (status == MOSS_OK) status = check_range(kOp, "position", params.position, lookup ? 1 : 0, params.positions - 1);
  if (status == MOSS_OK && lookup) status = check_at_least(kOp, "vocab", params.vocab, 1);
  return status == MOSS_OK ? check_dtype(kOp, "dtype", params.dtype) : status;
}

MossStatus check_pointers(const LocalRopeAttentionParams& params) {
  const bool lookup = params.qkv == nullptr;
  const struct {
    const char* name;
    const void* pointer;
    size_t bytes;
    bool needed;
  } pointers[] = {
      {"qkv", params.qkv, 16, !lookup},
      {"cos", params.cos, 16, !lookup},
      {"sin", params.sin, 16, !lookup},
      {"codes", params.codes, 8, lookup},
      {"table", params.table, 16, lookup},
      {"audio_embeddings", params.audio_embeddings, 16, lookup},
      {"residual", params.residual, 16, lookup},
      {"k_cache", params.k_cache, 16, true},
      {"v_cache", params.v_cache, 16, true},
      {"out", params.out, 16, true},
  };
  for (const auto& entry : pointers) {
    const MossStatus status = check_pointer(kOp, entry.name, entry.pointer, entry.bytes, !entry.needed);
    if (status != MOSS_OK) return status;
  }
  return MOSS_OK;
}

}  // namespace
}  // namespace moss

extern "C" MossStatus moss_local_rope_attention(const LocalRopeAttentionParams* params) {
  using namespace moss;
  MossStatus status = check_params(kOp, params);
  if (status == MOSS_OK && params->batch == 0) return MOSS_OK;
  if (status == MOSS_OK) status = check_sizes(*params);
  if (status == MOSS_OK) status = check_pointers(*params);
  if (status != MOSS_OK) return status;
  switch (params->dtype) {
    case MOSS_FLOAT32:
      return launch_form<float>(*params);
    case MOSS_BFLOAT16:
      return launch_form<__nv_bfloat16>(*params);
    default:
      return launch_form<__half>(*params);
  }
}
