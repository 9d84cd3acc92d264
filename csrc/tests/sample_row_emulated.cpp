// The CUDA C++ draw on a CPU: the body of sample_codebook's kernel, one emulated block per batch row.
#include "moss_kernels.h"
#include "simt.h"

// Of device code alone: its conversions from float count on a GPU's results.
#define static_cast simt::convert
#include "device/philox.cuh"
#include "device/sample_row.cuh"
#undef static_cast

namespace moss {
namespace {

template <int THREADS>
struct BlockSync {
  static void sync() {
    if constexpr (THREADS == 32)
      __syncwarp();
    else
      __syncthreads();
  }
  static bool any(bool value) {
    if constexpr (THREADS == 32) {
      __syncwarp();
      return __any_sync(0xffffffffu, value);
    } else {
      return __syncthreads_or(value);
    }
  }
};

template <int THREADS, int EPT>
const char* draw_row(const SampleCodebookParams& params, int b, uint32_t order) {
  const int64_t row = params.row_map[b];
  int64_t* code = params.code + b * params.code_stride;
  if (!params.active[b]) {
    *code = params.pad_id;
    return nullptr;
  }
  SampleParams sampling;
  sampling.temperature = params.temperature[row];
  sampling.top_k = params.top_k[row];
  sampling.top_p = params.top_p[row];
  sampling.repetition_penalty = params.repetition_penalty ? params.repetition_penalty[row] : 1.0f;
  const uint32_t word = params.random_words ? static_cast<uint32_t>(params.random_words[b])
                                            : philox_word(params.seed[row], params.frame[row], params.channel);
  const float* logits = static_cast<const float*>(params.logits) + b * params.logits_row_stride;
  const int64_t words = (params.vocab + 31) / 32;
  int32_t* seen = params.seen ? params.seen + (row * params.codebooks + params.codebook) * words : nullptr;

  static SampleShared<THREADS> shared;
  SampleResult results[THREADS];
  std::memset(static_cast<void*>(&shared), 0xa5, sizeof(shared));
  const char* error = simt::launch(THREADS, order, [&](int tid) {
    float score[EPT];
    for (int e = 0; e < EPT; ++e) {
      const int id = tid * EPT + e;
      // What lies behind the row must not matter.
      score[e] = id < params.vocab ? logits[id] : INFINITY;
    }
    if (tid == 0) shared.word = word;
    const uint32_t bits = seen ? seen_bits<EPT>(seen, params.vocab, tid) : 0u;
    results[tid] = sample_row<THREADS, EPT, BlockSync<THREADS>>(shared, score, params.vocab, sampling, bits, tid);
  });
  if (error) return error;
  const SampleResult result = results[0];
  for (int tid = 1; tid < 32; ++tid)
    if (results[tid].code != result.code || results[tid].status != result.status)
      return "threads return different results";
  if (result.code < 0 || result.code >= params.vocab) return "the code is outside the vocabulary";
  *code = result.code;
  params.status[b] = result.status;
  if (seen && !(result.status & kStatusEmpty)) seen[result.code >> 5] |= 1u << (result.code & 31);
  return nullptr;
}

}  // namespace
}  // namespace moss

// moss_sample_codebook on float32 logits in host memory. `order` chooses how threads take turns. Returns null or an
// error.
extern "C" const char* emulate_sample_codebook(const SampleCodebookParams* params, uint32_t order) {
  using namespace moss;
  const auto draw = params->vocab <= 32     ? draw_row<32, 1>
                    : params->vocab <= 1024 ? draw_row<256, 4>
                                            : draw_row<256, 16>;
  for (int b = 0; b < params->batch; ++b)
    if (const char* error = draw(*params, b, order)) return error;
  return nullptr;
}
