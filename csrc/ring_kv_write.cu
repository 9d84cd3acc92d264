// moss_ring_kv_write: each thread moves one 16-byte vector of a key and the same one of its value.
#include "checks.h"
#include "device/rotate.cuh"
#include "launch.h"

namespace moss {
namespace {

constexpr char kOp[] = "ring_kv_write";
constexpr int kThreads = 128;
constexpr int kDimMultiple = 8, kMaxDim = 256;

template <typename T, bool DEPENDENT>
__global__ void __launch_bounds__(kThreads) ring_kv_write_kernel(const RingKvWriteParams params) {
  constexpr int N = 16 / sizeof(T);
  if constexpr (DEPENDENT) {
    cudaTriggerProgrammaticLaunchCompletion();
    cudaGridDependencySynchronize();
  }
  const int64_t row = blockIdx.y;
  const int width = params.heads * params.head_dim;
  const int64_t index = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * N;
  const int valid = params.valid[row];
  // Of an oversized chunk the last tokens stay; the others would be written to the same places.
  const int64_t token = index / width + max(valid - params.capacity, 0);
  if (token >= valid) return;

  const int column = static_cast<int>(index % width), head = column / params.head_dim, dim = column % params.head_dim;
  const int64_t source = row * params.tokens + token;
  const T* k = static_cast<const T*>(params.qkv) + source * 3 * width + width + column;
  const auto value = Vector<T, N>::load(k + width);
  auto key = Vector<T, N>::load(k);
  if (params.cos_sin) key = rotate(key, params.cos_sin + source * params.head_dim + dim);

  const int64_t slot = params.slots[row];
  const int64_t position = (params.offset[slot] + token) % params.capacity;
  const int64_t target = ((slot * params.heads + head) * params.capacity + position) * params.head_dim + dim;
  key.store(static_cast<T*>(params.ring_k) + target);
  value.store(static_cast<T*>(params.ring_v) + target);
}

template <typename T>
MossStatus launch(const RingKvWriteParams& params) {
  const int64_t kept = params.tokens < params.capacity ? params.tokens : params.capacity;
  const int64_t vectors = kept * params.heads * params.head_dim * static_cast<int64_t>(sizeof(T)) / 16;
  const dim3 grid(static_cast<unsigned>((vectors + kThreads - 1) / kThreads), params.batch);
  auto* kernel = params.dependent_launch ? ring_kv_write_kernel<T, true> : ring_kv_write_kernel<T, false>;
  return launch_kernel(kOp, kernel, params, grid, dim3(kThreads));
}

MossStatus check(const RingKvWriteParams& params) {
  MossStatus status = check_range(kOp, "batch", params.batch, 0, 65535);
  if (status == MOSS_OK) status = check_at_least(kOp, "tokens", params.tokens, 0);
  if (status == MOSS_OK) status = check_range(kOp, "heads", params.heads, 1, 65535);
  if (status == MOSS_OK) status = check_range(kOp, "head_dim", params.head_dim, kDimMultiple, kMaxDim);
  if (status == MOSS_OK && params.head_dim % kDimMultiple != 0)
    status = set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: `head_dim` must be a multiple of %d, got %d", kOp,
                       kDimMultiple, params.head_dim);
  if (status == MOSS_OK) status = check_at_least(kOp, "capacity", params.capacity, 1);
  if (status == MOSS_OK) status = check_dtype(kOp, "dtype", params.dtype);
  const struct {
    const char* name;
    const void* pointer;
    size_t bytes;
  } pointers[] = {
      {"qkv", params.qkv, 16},    {"ring_k", params.ring_k, 16}, {"ring_v", params.ring_v, 16},
      {"slots", params.slots, 4}, {"valid", params.valid, 4},    {"offset", params.offset, 8},
  };
  for (const auto& entry : pointers)
    if (status == MOSS_OK) status = check_pointer(kOp, entry.name, entry.pointer, entry.bytes);
  if (status == MOSS_OK) status = check_pointer(kOp, "cos_sin", params.cos_sin, 16, true);
  return status;
}

}  // namespace
}  // namespace moss

extern "C" MossStatus moss_ring_kv_write(const RingKvWriteParams* params) {
  using namespace moss;
  MossStatus status = check_params(kOp, params);
  if (status == MOSS_OK && (params->batch == 0 || params->tokens == 0)) return MOSS_OK;
  if (status == MOSS_OK) status = check(*params);
  if (status != MOSS_OK) return status;
  switch (params->dtype) {
    case MOSS_FLOAT32:
      return launch<float>(*params);
    case MOSS_BFLOAT16:
      return launch<__nv_bfloat16>(*params);
    default:
      return launch<__half>(*params);
  }
}
