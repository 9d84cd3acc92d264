// moss_sample_codebook: one block per batch row (one warp for small vocabularies).
#include "checks.h"
#include "device/philox.cuh"
#include "device/sample_request.cuh"
#include "device/sample_row.cuh"
#include "device/vector.cuh"
#include "launch.h"
#include "sample_checks.h"

namespace moss {
namespace {

constexpr char kOp[] = "sample_codebook";

// EPT consecutive logits, by accesses of up to 16 bytes where the row allows it. Kept as they are: a conversion would
// wait for them.
template <typename T, int EPT>
__device__ __forceinline__ void load_logits(const T* row, int vocab, int tid, T (&logit)[EPT]) {
  constexpr int kCount = EPT * sizeof(T) < 16 ? EPT : 16 / sizeof(T);
  using Chunk = Vector<T, kCount>;
  if ((reinterpret_cast<uintptr_t>(row) % sizeof(Chunk)) == 0 && (tid + 1) * EPT <= vocab) {
#pragma unroll
    for (int first = 0; first < EPT; first += kCount) {
      const Chunk chunk = Chunk::load(row + tid * EPT + first);
#pragma unroll
      for (int i = 0; i < kCount; ++i) logit[first + i] = chunk.value[i];
    }
    return;
  }
#pragma unroll
  for (int e = 0; e < EPT; ++e) {
    const int id = tid * EPT + e;
    logit[e] = id < vocab ? row[id] : from_float<T>(0.0f);
  }
}

// With the 1, the compiler keeps the addresses made ahead of the wait in registers.
template <typename T, int THREADS, int EPT, bool DEPENDENT>
__global__ void __launch_bounds__(THREADS, 1) sample_codebook_kernel(const SampleCodebookParams params) {
  __shared__ SampleShared<THREADS> shared;
  // threadIdx.z is 0, but not for the compiler: values that all threads share would take the slower uniform units.
  const int b = blockIdx.x + threadIdx.z, tid = threadIdx.x;
  const uint32_t channel = static_cast<uint32_t>(params.channel);
  const T* logits = static_cast<const T*>(params.logits) + b * params.logits_row_stride;
  const int32_t* row_map = params.row_map + b;
  const uint8_t* active_flag = params.active + b;
  int64_t* code = params.code + b * params.code_stride;
  uint64_t seed = 0;
  uint32_t frame = 0;
  int guess;
  RequestPointers pointers;
  if constexpr (DEPENDENT) {
    // The kernel ahead may still write what is read here. It seldom does, and then the random word is ready before the
    // wait ends, and loads after it need not wait for the row.
    guess = min(max(peek(row_map), 0), params.pool_rows - 1);
    pointers = RequestPointers(params, guess);
    if (tid < 32) {
      seed = peek(pointers.seed), frame = static_cast<uint32_t>(peek(pointers.frame));
      shared.word = philox_word(seed, frame, channel);
    }
    prefetch(logits), prefetch(row_map), prefetch(active_flag);
    pointers.prefetch_all();
    cudaGridDependencySynchronize();
    // Not ahead of the wait: launch after launch would then crowd the multiprocessors with blocks that wait.
    cudaTriggerProgrammaticLaunchCompletion();
  } else {
    guess = *row_map;
    pointers = RequestPointers(params, guess);
  }
  const int row = load_now(row_map);
  const bool active = *active_flag;
  T logit[EPT];
  load_logits<T, EPT>(logits, params.vocab, tid, logit);
  Request request = load_request<EPT>(pointers, params.vocab, tid);
  if (!active) {
    if (tid == 0) *code = params.pad_id;
    return;
  }
  if (row != guess) {
    pointers = RequestPointers(params, row);
    request = load_request<EPT>(pointers, params.vocab, tid);
  }
  if (tid < 32) {
    if (params.random_words)
      shared.word = static_cast<uint32_t>(params.random_words[b]);
    else if (!DEPENDENT || request.seed != seed || request.frame != frame)
      shared.word = philox_word(request.seed, request.frame, channel);
  }
  float score[EPT];
#pragma unroll
  for (int e = 0; e < EPT; ++e) score[e] = to_float(logit[e]);
  const SampleResult result =
      sample_row<THREADS, EPT, BlockSync<THREADS>>(shared, score, params.vocab, request.sampling, request.seen, tid);
  if (tid == 0) {
    *code = result.code;
    params.status[b] = result.status;
    if (pointers.seen && !(result.status & kStatusEmpty))
      atomicOr(&pointers.seen[result.code >> 5], 1 << (result.code & 31));
  }
}

template <typename T, int THREADS, int EPT>
MossStatus launch(const SampleCodebookParams& params) {
  auto* kernel = params.dependent_launch ? sample_codebook_kernel<T, THREADS, EPT, true>
                                         : sample_codebook_kernel<T, THREADS, EPT, false>;
  return launch_kernel(kOp, kernel, params, dim3(params.batch), dim3(THREADS));
}

template <typename T>
MossStatus launch_for_vocab(const SampleCodebookParams& params) {
  if (params.vocab <= 32) return launch<T, 32, 1>(params);
  if (params.vocab <= 1024) return launch<T, 256, 4>(params);
  return launch<T, 256, 16>(params);
}

MossStatus check_logits(const SampleCodebookParams& params) {
  MossStatus status = check_dtype(kOp, "logits_dtype", params.logits_dtype);
  if (status == MOSS_OK && params.batch > 1 && params.logits_row_stride < params.vocab)
    status =
        set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: `logits_row_stride` must be >= vocab = %d elements, got %lld",
                  kOp, params.vocab, static_cast<long long>(params.logits_row_stride));
  if (status != MOSS_OK) return status;
  return check_pointer(kOp, "logits", params.logits, params.logits_dtype == MOSS_FLOAT32 ? 4 : 2);
}

}  // namespace
}  // namespace moss

extern "C" MossStatus moss_sample_codebook(const SampleCodebookParams* params) {
  using namespace moss;
  MossStatus status = check_params(kOp, params);
  if (status == MOSS_OK && params->batch == 0) return MOSS_OK;
  if (status == MOSS_OK) status = check_draw(kOp, *params);
  if (status == MOSS_OK) status = check_logits(*params);
  if (status != MOSS_OK) return status;
  switch (params->logits_dtype) {
    case MOSS_FLOAT32:
      return launch_for_vocab<float>(*params);
    case MOSS_BFLOAT16:
      return launch_for_vocab<__nv_bfloat16>(*params);
    default:
      return launch_for_vocab<__half>(*params);
  }
}
