// moss_local_frame_decode: a whole frame in one persistent, cooperative kernel.
#include <cuda_runtime.h>

#include "checks.h"
#include "device/local_frame_compute.cuh"

namespace moss::local_frame {
namespace {

constexpr char kOp[] = "local_frame_decode";

template <class Dims, int COLUMNS>
struct SharedMemory {
  BlockMemory<COLUMNS> memory;
  Rings<COLUMNS, COLUMNS <= 32 ? Dims::kSmallBatchScale : 1, sizeof(memory)> rings;
};

// A warp streams weights, another one activations. The sums of 32 and 64 columns need more registers than so many
// threads can have: there two idle warps complete the streams' warpgroup, which hands registers over.
template <int COLUMNS>
constexpr bool kHandsOver = COLUMNS == 32 || COLUMNS == 64;
template <int COLUMNS>
constexpr int kThreads = kComputeThreads + (kHandsOver<COLUMNS> ? 128 : 64);

template <class Dims, int COLUMNS, bool TABLE>
__global__ void __launch_bounds__(kThreads<COLUMNS>, 1)
    local_frame_kernel(const __grid_constant__ Arguments arguments) {
  extern __shared__ __align__(1024) uint8_t dynamic_memory[];
  auto& shared = *reinterpret_cast<SharedMemory<Dims, COLUMNS>*>(dynamic_memory);
  using Ring = decltype(shared.rings);
  const LocalFrameDecodeParams& params = arguments.params;
  auto* workspace = static_cast<uint8_t*>(params.workspace);
  auto* counters = reinterpret_cast<unsigned*>(workspace);
  const bool has_table = params.qkv_table != nullptr;
  const Split split(params.batch, has_table);
  if (threadIdx.x == 0) init_rings(shared.rings);
  __syncthreads();

  const auto run = [&](auto& role) {
    if constexpr (TABLE)
      run_table<Dims>(role);
    else
      run_frame<Dims>(role, has_table);
  };
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const bool elected = (threadIdx.x & 31) == 0;
  if constexpr (kHandsOver<COLUMNS>) {
    if (warp < kComputeThreads / 32)
      registers_grow<208>();
    else
      registers_shrink<72>();
  }
  if (warp < kComputeThreads / 32) {
    Compute<Dims, Ring> role{{}, {counters}, split, shared.rings, shared.memory, arguments, params, workspace, {}};
    run(role);
    leave(counters);
  } else if (warp == kComputeThreads / 32) {
    if (elected) stream_weights<Dims, TABLE>(shared.rings, static_cast<const bf16*>(params.packed), has_table);
  } else if (elected && (!kHandsOver<COLUMNS> || warp == kComputeThreads / 32 + 1)) {
    ActivationStreamer<Dims, Ring> role{{},        {counters},          split, has_table, shared.rings,
                                        workspace, policy_evict_last(), {}};
    run(role);
  }
}

template <class Dims, int COLUMNS, bool TABLE>
MossStatus launch_columns(const Arguments& arguments, int blocks) {
  auto* kernel = local_frame_kernel<Dims, COLUMNS, TABLE>;
  constexpr int kBytes = sizeof(SharedMemory<Dims, COLUMNS>);
  static_assert(kBytes <= kSharedBytes);
  const MossStatus status = check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), kOp, "cudaFuncSetAttribute");
  if (status != MOSS_OK) return status;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads<COLUMNS>);
  config.dynamicSmemBytes = kBytes;
  config.stream = static_cast<cudaStream_t>(arguments.params.stream);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return check_cuda(cudaLaunchKernelEx(&config, kernel, arguments), kOp, "cudaLaunchKernelEx");
}

template <class Dims, bool TABLE>
MossStatus launch(const Arguments& arguments) {
  int device = 0, multiprocessors = 0;
  MossStatus status = check_cuda(cudaGetDevice(&device), kOp, "cudaGetDevice");
  if (status != MOSS_OK) return status;
  status = check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), kOp,
                      "cudaDeviceGetAttribute");
  if (status != MOSS_OK) return status;
  const int wanted = arguments.params.multiprocessors;
  if (wanted < 0 || wanted > multiprocessors)
    return set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: `multiprocessors` must be 0 .. %d, got %d", kOp,
                     multiprocessors, wanted);
  // Every block has a unit of each product: none gets ahead of a block that still reads what the product before has
  // left, though it may wait for other blocks alone.
  constexpr int units = Dims::KeyValue::kUnits;
  static_assert(Dims::Projection::kUnits >= units && Dims::InnerIn::kUnits >= units &&
                Dims::InnerOut::kUnits >= units && Dims::Head::kUnits >= units);
  const int limit = wanted ? wanted : multiprocessors;
  const int blocks = limit < units ? limit : units;
  const int batch = arguments.params.batch;
  if (blocks * kMaxRows < batch)
    return set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: `multiprocessors` must be at least batch / %d = %d, got %d",
                     kOp, kMaxRows, (batch + kMaxRows - 1) / kMaxRows, blocks);
  if constexpr (TABLE) {
    return launch_columns<Dims, 64, true>(arguments, blocks);
  } else {
    if (batch <= 8) return launch_columns<Dims, 8, false>(arguments, blocks);
    if (batch <= 16) return launch_columns<Dims, 16, false>(arguments, blocks);
    if (batch <= 32) return launch_columns<Dims, 32, false>(arguments, blocks);
    if (batch <= 64) return launch_columns<Dims, 64, false>(arguments, blocks);
    return launch_columns<Dims, 128, false>(arguments, blocks);
  }
}

struct Pointer {
  const char* name;
  const void* pointer;
  size_t alignment;
  bool optional = false;
};

template <size_t COUNT>
MossStatus check_pointers(const Pointer (&pointers)[COUNT]) {
  for (const Pointer& entry : pointers) {
    const MossStatus status = check_pointer(kOp, entry.name, entry.pointer, entry.alignment, entry.optional);
    if (status != MOSS_OK) return status;
  }
  return MOSS_OK;
}

MossStatus check_model(const LocalFrameDecodeParams& params) {
  if (params.model != MOSS_LOCAL_FULL && params.model != MOSS_LOCAL_TINY)
    return set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: `model` must be a MossLocalModel, got %d", kOp,
                     static_cast<int>(params.model));
  return check_pointers({{"packed", params.packed, 128},
                         {"ln_1_weight", params.ln_1_weight, 4},
                         {"ln_1_bias", params.ln_1_bias, 4},
                         {"c_attn_bias", params.c_attn_bias, 4},
                         {"audio_embeddings", params.audio_embeddings, 16},
                         {"rope", params.rope, 8},
                         {"workspace", params.workspace, 256}});
}

MossStatus check_decode(const LocalFrameDecodeParams& params) {
  if (params.batch < 1 || params.batch > kMaxBatch)
    return set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: `batch` must be 1 .. %d, got %d", kOp, kMaxBatch,
                     params.batch);
  if (params.pool_rows < 1)
    return set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: `pool_rows` must be >= 1, got %d", kOp, params.pool_rows);
  if (params.slot_id < 0 || params.slot_id >= params.text_rows || params.pad_token_id < 0 ||
      params.pad_token_id >= params.text_rows)
    return set_error(MOSS_ERROR_INVALID_ARGUMENT,
                     "`%s`: `slot_id` and `pad_token_id` must be 0 .. %lld, got %lld and %lld", kOp,
                     static_cast<long long>(params.text_rows - 1), static_cast<long long>(params.slot_id),
                     static_cast<long long>(params.pad_token_id));
  return check_pointers({{"ln_2_weight", params.ln_2_weight, 4},
                         {"ln_2_bias", params.ln_2_bias, 4},
                         {"ln_f_weight", params.ln_f_weight, 4},
                         {"ln_f_bias", params.ln_f_bias, 4},
                         {"c_proj_bias", params.c_proj_bias, 4},
                         {"fc_in_bias", params.fc_in_bias, 4},
                         {"fc_out_bias", params.fc_out_bias, 4},
                         {"stop_head", params.stop_head, 4},
                         {"embed_tokens", params.embed_tokens, 4},
                         {"hidden", params.hidden, 4},
                         {"row_map", params.row_map, 4},
                         {"active", params.active, 1},
                         {"temperature", params.temperature, 4},
                         {"top_k", params.top_k, 4},
                         {"top_p", params.top_p, 4},
                         {"repetition_penalty", params.repetition_penalty, 4},
                         {"text_temperature", params.text_temperature, 4},
                         {"text_top_k", params.text_top_k, 4},
                         {"text_top_p", params.text_top_p, 4},
                         {"seed", params.seed, 8},
                         {"frame", params.frame, 4},
                         {"seen", params.seen, 4},
                         {"codes", params.codes, 8},
                         {"continues", params.continues, 1},
                         {"feedback", params.feedback, 4},
                         {"status", params.status, 4},
                         {"qkv_table", params.qkv_table, 16, true},
                         {"teacher_codes", params.teacher_codes, 8, true},
                         {"stop_logits", params.stop_logits, 4, true},
                         {"audio_logits", params.audio_logits, 16, true},
                         {"hidden_out", params.hidden_out, 4, true}});
}

template <class Dims>
MossStatus build_table(LocalFrameDecodeParams params, void* table) {
  constexpr int kRows = 64;
  static_assert(Dims::kVocab % kRows == 0);
  params.batch = kRows;
  const auto* embeddings = static_cast<const bf16*>(params.audio_embeddings);
  for (int64_t row = 0; row < int64_t{kCodebooks - 1} * Dims::kVocab; row += kRows) {
    params.hidden = embeddings + row * Dims::kHidden;
    const Arguments arguments{params, static_cast<bf16*>(table) + row * 3 * Dims::kHidden,
                              static_cast<int>(row / Dims::kVocab) + 1};
    const MossStatus status = launch<Dims, true>(arguments);
    if (status != MOSS_OK) return status;
  }
  return MOSS_OK;
}

}  // namespace
}  // namespace moss::local_frame

extern "C" {

MossStatus moss_local_frame_decode(const LocalFrameDecodeParams* params) {
  using namespace moss;
  using namespace moss::local_frame;
  MossStatus status = check_params(kOp, params);
  if (status == MOSS_OK) status = check_model(*params);
  if (status == MOSS_OK) status = check_decode(*params);
  if (status != MOSS_OK) return status;
  const Arguments arguments{*params, nullptr, 0};
  return params->model == MOSS_LOCAL_FULL ? launch<FullDims, false>(arguments) : launch<TinyDims, false>(arguments);
}

MossStatus moss_local_qkv_table(const LocalFrameDecodeParams* decode, void* table) {
  using namespace moss;
  using namespace moss::local_frame;
  MossStatus status = check_params(kOp, decode);
  if (status == MOSS_OK) status = check_model(*decode);
  if (status == MOSS_OK) status = check_pointers({{"table", table, 16}});
  if (status != MOSS_OK) return status;
  return decode->model == MOSS_LOCAL_FULL ? build_table<FullDims>(*decode, table)
                                          : build_table<TinyDims>(*decode, table);
}

}  // extern "C"
