// moss_sample_codebook: one block per batch row (one warp for small vocabularies).
#include "checks.h"
#include "device/philox.cuh"
#include "device/sample_row.cuh"
#include "device/vector.cuh"
#include "launch.h"

namespace moss {
namespace {

constexpr char kOp[] = "sample_codebook";

template <int THREADS>
struct BlockSync {
  __device__ static __forceinline__ void sync() {
    if constexpr (THREADS == 32)
      __syncwarp();
    else
      __syncthreads();
  }
  __device__ static __forceinline__ bool any(bool value) {
    if constexpr (THREADS == 32) {
      __syncwarp();
      return __any_sync(0xffffffffu, value);
    } else {
      return __syncthreads_or(value);
    }
  }
};

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

// A load that stays where it is written, so that several are in flight before the first is used: the compiler does not
// move `relaxed` loads. Not `volatile`, which would bypass L1.
__device__ __forceinline__ int32_t load_now(const int32_t* pointer) {
  int32_t value;
  asm volatile("ld.relaxed.cta.global.b32 %0, [%1];" : "=r"(value) : "l"(pointer));
  return value;
}
__device__ __forceinline__ float load_now(const float* pointer) {
  float value;
  asm volatile("ld.relaxed.cta.global.f32 %0, [%1];" : "=f"(value) : "l"(pointer));
  return value;
}
__device__ __forceinline__ uint64_t load_now(const int64_t* pointer) {
  uint64_t value;
  asm volatile("ld.relaxed.cta.global.b64 %0, [%1];" : "=l"(value) : "l"(pointer));
  return value;
}

// Loads that may race with the kernel ahead: they leave no copy in L1 for those that come after the wait.
__device__ __forceinline__ int32_t peek(const int32_t* pointer) {
  int32_t value;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(pointer));
  return value;
}
__device__ __forceinline__ uint64_t peek(const int64_t* pointer) {
  uint64_t value;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(value) : "l"(pointer));
  return value;
}

// Brings a line into L2. The address is an output too: the compiler would else work it out again, after the wait.
template <typename T>
__device__ __forceinline__ void prefetch(T*& pointer) {
  asm volatile("prefetch.global.L2 [%0];" : "+l"(pointer));
  __builtin_assume(__isGlobal(pointer));
}

// Where a pool row has what a draw reads.
struct RequestPointers {
  const int64_t* seed;
  const int32_t* frame;
  const int32_t* top_k;
  const float* top_p;
  const float* temperature;
  const float* repetition_penalty;
  int32_t* seen;

  RequestPointers() = default;
  __device__ __forceinline__ RequestPointers(const SampleCodebookParams& params, int row)
      : seed(params.seed + row),
        frame(params.frame + row),
        top_k(params.top_k + row),
        top_p(params.top_p + row),
        temperature(params.temperature + row),
        repetition_penalty(params.repetition_penalty ? params.repetition_penalty + row : nullptr),
        seen(params.seen ? params.seen + (static_cast<int64_t>(row) * params.codebooks + params.codebook) *
                                             ((params.vocab + 31) / 32)
                         : nullptr) {}

  __device__ __forceinline__ void prefetch_all() {
    prefetch(seed), prefetch(frame), prefetch(top_k), prefetch(top_p), prefetch(temperature);
    if (repetition_penalty) prefetch(repetition_penalty);
    if (seen) prefetch(seen);
  }
};

struct Request {
  SampleParams sampling;
  uint32_t seen;      // bits of the thread's ids
  uint64_t seed = 0;  // this and `frame` in the first warp alone, which makes the random word
  uint32_t frame = 0;
};

template <int EPT>
__device__ __forceinline__ Request load_request(const RequestPointers& at, int vocab, int tid) {
  Request request;
  request.sampling.temperature = load_now(at.temperature);
  request.sampling.repetition_penalty = at.repetition_penalty ? load_now(at.repetition_penalty) : 1.0f;
  request.seen = at.seen ? seen_bits<EPT>(at.seen, vocab, tid) : 0u;
  request.sampling.top_k = load_now(at.top_k);
  request.sampling.top_p = load_now(at.top_p);
  if (tid < 32) request.seed = load_now(at.seed), request.frame = static_cast<uint32_t>(load_now(at.frame));
  return request;
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

MossStatus check_sizes(const SampleCodebookParams& params) {
  MossStatus status = check_range(kOp, "batch", params.batch, 0, 65535);
  if (status == MOSS_OK) status = check_range(kOp, "vocab", params.vocab, 2, 4096);
  if (status == MOSS_OK) status = check_at_least(kOp, "pool_rows", params.pool_rows, 1);
  if (status == MOSS_OK) status = check_at_least(kOp, "channel", params.channel, 0);
  if (status == MOSS_OK && params.seen) status = check_range(kOp, "codebook", params.codebook, 0, params.codebooks - 1);
  if (status == MOSS_OK && params.batch > 1 && params.logits_row_stride < params.vocab)
    status =
        set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: `logits_row_stride` must be >= vocab = %d elements, got %lld",
                  kOp, params.vocab, static_cast<long long>(params.logits_row_stride));
  if (status == MOSS_OK && params.batch > 1) status = check_at_least(kOp, "code_stride", params.code_stride, 1);
  return status == MOSS_OK ? check_dtype(kOp, "logits_dtype", params.logits_dtype) : status;
}

MossStatus check_pointers(const SampleCodebookParams& params) {
  const size_t element = params.logits_dtype == MOSS_FLOAT32 ? 4 : 2;
  const struct {
    const char* name;
    const void* pointer;
    size_t bytes;
    bool optional;
  } pointers[] = {
      {"logits", params.logits, element, false},
      {"row_map", params.row_map, 4, false},
      {"active", params.active, 1, false},
      {"temperature", params.temperature, 4, false},
      {"top_k", params.top_k, 4, false},
      {"top_p", params.top_p, 4, false},
      {"repetition_penalty", params.repetition_penalty, 4, true},
      {"seed", params.seed, 8, false},
      {"frame", params.frame, 4, false},
      {"seen", params.seen, 4, true},
      {"code", params.code, 8, false},
      {"status", params.status, 4, false},
      {"random_words", params.random_words, 8, true},
  };
  for (const auto& entry : pointers) {
    const MossStatus status = check_pointer(kOp, entry.name, entry.pointer, entry.bytes, entry.optional);
    if (status != MOSS_OK) return status;
  }
  return MOSS_OK;
}

}  // namespace
}  // namespace moss

extern "C" MossStatus moss_sample_codebook(const SampleCodebookParams* params) {
  using namespace moss;
  MossStatus status = check_params(kOp, params);
  if (status == MOSS_OK && params->batch == 0) return MOSS_OK;
  if (status == MOSS_OK) status = check_sizes(*params);
  if (status == MOSS_OK) status = check_pointers(*params);
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
