// moss_sample_head: the head's product and the draws from its logits in one launch.
//
// 128 blocks stream the weights, which they ask for before they wait for the kernel ahead; block b then draws for row
// b. The sums over the 8 slices of the inputs meet there through L2. Whoever draws polls the words themselves: kEmpty
// is no result of an addition, and the reader puts it back for the next launch.
#include "device/philox.cuh"
#include "device/sample_head.cuh"
#include "device/sample_request.cuh"
#include "device/sample_row.cuh"
#include "device/tagged.cuh"
#include "launch.h"
#include "sample_checks.h"

namespace moss {
namespace sample_head {
namespace {

constexpr char kOp[] = "sample_head";
constexpr uint32_t kEmpty = 0xffffffffu;

template <int COLUMNS>
constexpr int kSumBytes = COLUMNS * kSumStride * 4 > sizeof(SampleShared<kThreads>) ? COLUMNS * kSumStride * 4
                                                                                    : sizeof(SampleShared<kThreads>);
constexpr int kPieces = kOutputs / 4;

// Shared memory: sums, and later what the draw needs; behind that the slice of the rows.
template <int COLUMNS>
constexpr int shared_bytes(int batch) {
  return kSumBytes<COLUMNS> + (batch + COLUMNS - 1) / COLUMNS * COLUMNS * kHiddenStride * 2;
}

__device__ __forceinline__ void store_relaxed(float* destination, const float4& value) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(destination), "f"(value.x), "f"(value.y),
               "f"(value.z), "f"(value.w)
               : "memory");
}

__device__ __forceinline__ float4 add(const float4& a, const float4& b) {
  return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

// A logit in float32, after the rounding of a linear in bfloat16.
__device__ __forceinline__ float rounded(float sum) { return __bfloat162float(__float2bfloat16_rn(sum)); }

// Where the sums of row b meet: [slice, V] float32.
__device__ __forceinline__ float* row_sums(const SampleHeadParams& params, int b) {
  return static_cast<float*>(params.workspace) + b * kSlices * kVocab;
}

// Sends the sums of the rows from `first` on to whoever draws for them.
template <int COLUMNS>
__device__ __forceinline__ void send_sums(const SampleHeadParams& params, const float* sums, int first, int group,
                                          int slice, int tid) {
#pragma unroll
  for (int i = tid; i < COLUMNS * kPieces; i += kThreads) {
    const int column = i / kPieces, output = i % kPieces * 4, row = first + column;
    if (row >= params.draw.batch) break;
    store_relaxed(row_sums(params, row) + slice * kVocab + group * kOutputs + output,
                  *reinterpret_cast<const float4*>(sums + column * kSumStride + output));
  }
}

__device__ __forceinline__ bool missing(const float4& value) {
  return max(max(__float_as_uint(value.x), __float_as_uint(value.y)),
             max(__float_as_uint(value.z), __float_as_uint(value.w))) == kEmpty;
}

// Waits for the thread's 4 logits of a row, and leaves its words empty.
__device__ __forceinline__ void receive(float (&score)[4], float* sums, int tid) {
  float4* own = reinterpret_cast<float4*>(sums) + tid;
  float4 part[kSlices];
#pragma unroll
  for (int p = 0; p < kSlices; ++p) load_relaxed(part[p], own + p * (kVocab / 4));
  for (bool any = true; any;) {
    any = false;
#pragma unroll
    for (int p = 0; p < kSlices; ++p) {
      if (!missing(part[p])) continue;
      any = true;
      load_relaxed(part[p], own + p * (kVocab / 4));
    }
  }
  const float empty = __uint_as_float(kEmpty);
#pragma unroll
  for (int p = 0; p < kSlices; ++p) own[p * (kVocab / 4)] = make_float4(empty, empty, empty, empty);
#pragma unroll
  for (int p = 1; p < kSlices; ++p) part[0] = add(part[0], part[p]);
  score[0] = rounded(part[0].x), score[1] = rounded(part[0].y);
  score[2] = rounded(part[0].z), score[3] = rounded(part[0].w);
}

template <int COLUMNS>
__global__ void __launch_bounds__(kThreads, 2) sample_head_kernel(const SampleHeadParams params) {
  extern __shared__ __align__(16) unsigned char memory[];
  float* sums = reinterpret_cast<float*>(memory);
  uint16_t* staged = reinterpret_cast<uint16_t*>(memory + kSumBytes<COLUMNS>);
  const SampleCodebookParams& draw = params.draw;
  // threadIdx.z is 0, but not for the compiler: see sample_codebook.
  const int b = blockIdx.x + threadIdx.z, tid = threadIdx.x, group = blockIdx.x / kSlices, slice = blockIdx.x % kSlices;
  const uint32_t channel = static_cast<uint32_t>(draw.channel);
  Weights weights;
  weights.load(static_cast<const uint16_t*>(params.weight), group, slice, tid);
  const bool draws = b < draw.batch;
  uint64_t seed = 0;
  uint32_t frame = 0, word = 0;
  int guess = 0;
  if (draws) {
    // As sample_codebook does: a guess ahead of the wait, verified after it.
    guess = min(max(peek(draw.row_map + b), 0), draw.pool_rows - 1);
    if (tid < 32) {
      seed = peek(draw.seed + guess), frame = static_cast<uint32_t>(peek(draw.frame + guess));
      word = philox_word(seed, frame, channel);
    }
    RequestPointers(draw, guess).prefetch_all();
  }
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  stage_hidden<COLUMNS>(staged, static_cast<const uint16_t*>(params.hidden), params.hidden_row_stride, draw.batch,
                        slice, tid);
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
#pragma unroll 1
  for (int first = 0; first < draw.batch; first += COLUMNS) {
    multiply<COLUMNS>(sums, weights, staged + first * kHiddenStride, tid);
    send_sums<COLUMNS>(params, sums, first, group, slice, tid);
    __syncthreads();
  }
  if (!draws) return;
  RequestPointers pointers(draw, guess);
  const int row = load_now(draw.row_map + b);
  const bool active = draw.active[b];
  Request request = load_request<4>(pointers, kVocab, tid);
  float score[4];
  receive(score, row_sums(params, b), tid);
  int64_t* code = draw.code + b * draw.code_stride;
  if (!active) {
    if (tid == 0) *code = draw.pad_id;
    return;
  }
  if (row != guess) {
    pointers = RequestPointers(draw, row);
    request = load_request<4>(pointers, kVocab, tid);
  }
  SampleShared<kThreads>& shared = *reinterpret_cast<SampleShared<kThreads>*>(memory);
  if (tid < 32) {
    if (draw.random_words)
      word = static_cast<uint32_t>(draw.random_words[b]);
    else if (request.seed != seed || request.frame != frame)
      word = philox_word(request.seed, request.frame, channel);
    shared.word = word;
  }
  const SampleResult result =
      sample_row<kThreads, 4, BlockSync<kThreads>>(shared, score, kVocab, request.sampling, request.seen, tid);
  if (tid == 0) {
    *code = result.code;
    draw.status[b] = result.status;
    if (pointers.seen && !(result.status & kStatusEmpty))
      atomicOr(&pointers.seen[result.code >> 5], 1 << (result.code & 31));
  }
}

template <int COLUMNS>
MossStatus launch(const SampleHeadParams& params) {
  auto* kernel = sample_head_kernel<COLUMNS>;
  const MossStatus status = check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes<COLUMNS>(kMaxBatch)), kOp,
      "cudaFuncSetAttribute");
  if (status != MOSS_OK) return status;
  cudaLaunchConfig_t config = {};
  config.gridDim = kBlocks;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = shared_bytes<COLUMNS>(params.draw.batch);
  config.stream = static_cast<cudaStream_t>(params.draw.stream);
  // Cooperative: blocks wait for each other, and other work may hold multiprocessors.
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = params.draw.dependent_launch;
  config.attrs = attributes;
  config.numAttrs = 2;
  return check_cuda(cudaLaunchKernelEx(&config, kernel, params), kOp, "cudaLaunchKernelEx");
}

MossStatus launch_for_batch(const SampleHeadParams& params) {
  if (params.draw.batch <= 8) return launch<8>(params);
  if (params.draw.batch <= 32) return launch<32>(params);
  return launch<64>(params);
}

MossStatus check_head(const SampleHeadParams& params) {
  MossStatus status = check_range(kOp, "batch", params.draw.batch, 0, kMaxBatch);
  if (status == MOSS_OK && (params.draw.vocab != kVocab || params.inputs != kHidden))
    status = set_error(MOSS_ERROR_UNSUPPORTED, "`%s`: `vocab` and `inputs` must be %d and %d, got %d and %d", kOp,
                       kVocab, kHidden, params.draw.vocab, params.inputs);
  if (status == MOSS_OK && params.draw.batch > 1)
    status = check_at_least(kOp, "hidden_row_stride", params.hidden_row_stride, kHidden);
  if (status == MOSS_OK && params.hidden_row_stride % 8 != 0)
    status = set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: `hidden_row_stride` must be a multiple of 8, got %lld", kOp,
                       static_cast<long long>(params.hidden_row_stride));
  if (status == MOSS_OK) status = check_pointer(kOp, "hidden", params.hidden, 16);
  if (status == MOSS_OK) status = check_pointer(kOp, "weight", params.weight, 16);
  return status == MOSS_OK ? check_pointer(kOp, "workspace", params.workspace, 16) : status;
}

}  // namespace
}  // namespace sample_head
}  // namespace moss

extern "C" MossStatus moss_sample_head(const SampleHeadParams* params) {
  using namespace moss;
  using namespace moss::sample_head;
  MossStatus status = check_params(kOp, params);
  if (status == MOSS_OK) status = check_params(kOp, &params->draw);
  if (status == MOSS_OK && params->draw.batch == 0) return MOSS_OK;
  if (status == MOSS_OK) status = check_draw(kOp, params->draw);
  if (status == MOSS_OK) status = check_head(*params);
  return status == MOSS_OK ? launch_for_batch(*params) : status;
}
