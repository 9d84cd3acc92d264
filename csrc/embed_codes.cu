// moss_embed_codes: each thread sums one vector of columns of one row.
#include "checks.h"
#include "device/vector.cuh"
#include "launch.h"

namespace moss {
namespace {

constexpr char kOp[] = "embed_codes";
constexpr int kThreads = 64;

template <typename T, int N, bool DEPENDENT>
__global__ void __launch_bounds__(kThreads) embed_codes_kernel(const EmbedCodesParams params) {
  if constexpr (DEPENDENT) {
    cudaTriggerProgrammaticLaunchCompletion();
    cudaGridDependencySynchronize();
  }
  const int64_t row = blockIdx.y;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * N;
  if (column >= params.width) return;

  Vector<T, N> sum = {};
  const int64_t text_id = params.text_ids[row * params.text_ids_stride];
  if (text_id >= 0 && text_id < params.text_vocab)
    sum = Vector<T, N>::load(static_cast<const T*>(params.embed_tokens) + text_id * params.width + column);
  const int64_t* codes = params.codes + row * params.codes_row_stride;
  const T* table = static_cast<const T*>(params.audio_embeddings) + column;
#pragma unroll 6
  for (int q = 0; q < params.codebooks; ++q, table += params.vocab * params.width) {
    const int64_t code = codes[q];
    Vector<T, N> term = {};
    if (code >= 0 && code < params.vocab && code != params.pad_id)
      term = Vector<T, N>::load(table + code * params.width);
#pragma unroll
    for (int i = 0; i < N; ++i) sum.value[i] = from_float<T>(to_float(sum.value[i]) + to_float(term.value[i]));
  }
  sum.store(static_cast<T*>(params.out) + row * params.width + column);
}

template <typename T, int N>
MossStatus launch(const EmbedCodesParams& params) {
  const dim3 grid(static_cast<unsigned>((params.width + kThreads * N - 1) / (kThreads * N)), params.batch);
  auto* kernel = params.dependent_launch ? embed_codes_kernel<T, N, true> : embed_codes_kernel<T, N, false>;
  return launch_kernel(kOp, kernel, params, grid, dim3(kThreads));
}

template <typename T>
MossStatus launch_for_width(const EmbedCodesParams& params) {
  constexpr int kVector = 16 / sizeof(T);
  return params.width % kVector == 0 ? launch<T, kVector>(params) : launch<T, 1>(params);
}

MossStatus check(const EmbedCodesParams& params) {
  MossStatus status = check_range(kOp, "batch", params.batch, 0, 65535);
  if (status == MOSS_OK) status = check_at_least(kOp, "codebooks", params.codebooks, 0);
  if (status == MOSS_OK) status = check_at_least(kOp, "text_vocab", params.text_vocab, 1);
  if (status == MOSS_OK) status = check_at_least(kOp, "vocab", params.vocab, 1);
  if (status == MOSS_OK) status = check_at_least(kOp, "width", params.width, 1);
  if (status == MOSS_OK) status = check_dtype(kOp, "dtype", params.dtype);
  const struct {
    const char* name;
    const void* pointer;
    size_t bytes;
  } pointers[] = {
      {"text_ids", params.text_ids, 8},
      {"codes", params.codes, 8},
      {"embed_tokens", params.embed_tokens, 16},
      {"audio_embeddings", params.audio_embeddings, 16},
      {"out", params.out, 16},
  };
  for (const auto& entry : pointers)
    if (status == MOSS_OK) status = check_pointer(kOp, entry.name, entry.pointer, entry.bytes);
  return status;
}

}  // namespace
}  // namespace moss

extern "C" MossStatus moss_embed_codes(const EmbedCodesParams* params) {
  using namespace moss;
  MossStatus status = check_params(kOp, params);
  if (status == MOSS_OK && params->batch == 0) return MOSS_OK;
  if (status == MOSS_OK) status = check(*params);
  if (status != MOSS_OK) return status;
  switch (params->dtype) {
    case MOSS_FLOAT32:
      return launch_for_width<float>(*params);
    case MOSS_BFLOAT16:
      return launch_for_width<__nv_bfloat16>(*params);
    default:
      return launch_for_width<__half>(*params);
  }
}
