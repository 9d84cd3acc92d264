// moss_local_frame_decode: a whole frame in one persistent, cooperative kernel.
#include <cuda_runtime.h>

#include <type_traits>

#include "device/local_frame_products.cuh"
#include "device/local_frame_rows.cuh"
#include "error.h"

namespace moss::local_frame {
namespace {

constexpr char kOp[] = "local_frame_decode";

// The chain of phases. Each role (activations, compute) walks it and does its part of every phase.
template <class Dims, class Role>
__device__ __forceinline__ void run_frame(Role& role, bool has_table) {
  role.begin_rows();
  role.template product<typename Dims::KeyValue, Role::kFirstKeyValue>(Role::kNormed, 0);
#pragma unroll 1
  for (int position = 0;; ++position) {
    if (position > 0) role.draw_rows(position);
    if (position == kCodebooks) break;
    if (position > 0 && !has_table) {
      role.template product<typename Dims::KeyValue, Role::kLaterKeyValue>(Role::kNormed, position);
      role.template product<typename Dims::Query, Role::kLaterQuery>(Role::kNormed, position);
      role.attend_rows(position);
    }
    role.template product<typename Dims::Projection, Role::kProjected>(Role::kAttention, position);
    role.middle_rows();
    role.template product<typename Dims::InnerIn, Role::kInner>(Role::kNormed, position);
    role.template product<typename Dims::InnerOut, Role::kInnerSum>(Role::kInnerX, position);
    role.end_rows(position);
    role.template product<typename Dims::Head, Role::kLogits>(Role::kNormed, position);
  }
}

// The chain that fills one chunk of the q, k, v table.
template <class Dims, class Role>
__device__ __forceinline__ void run_table(Role& role) {
  role.begin_rows();
  role.template product<typename Dims::KeyValue, Role::kLaterKeyValue>(Role::kNormed, 0);
  role.template product<typename Dims::Query, Role::kLaterQuery>(Role::kNormed, 0);
  role.table_rows();
}

struct Arguments {
  LocalFrameDecodeParams params;
  bf16* table;     // where a chunk of the table goes; null: decode a frame
  int table_rope;  // its position
};

// Names of a product's input and of what becomes of its output; the same in every role.
struct Names {
  enum Input { kNormed, kAttention, kInnerX };
  enum Output { kFirstKeyValue, kLaterKeyValue, kLaterQuery, kProjected, kInner, kInnerSum, kLogits };
};

// How blocks take part in row phases: the first `rows` blocks own the batch rows. While there are blocks enough, `parts` of
// them draw a row's code (all the same one, so none has to tell it to the others) and share its attention: block
// p * rows + r is part p of row r, and part 0 alone writes what leaves the kernel.
struct Split {
  unsigned rows, parts;
  __device__ __forceinline__ Split(int batch, bool has_table) : rows(min(static_cast<unsigned>(batch), gridDim.x)), parts(1) {
    while (has_table && parts < kMaxParts && rows * parts * 2 <= gridDim.x) parts *= 2;
  }
  __device__ __forceinline__ unsigned part() const { return blockIdx.x / rows; }
  __device__ __forceinline__ int row() const { return static_cast<int>(blockIdx.x % rows); }
};

// Brings activations into shared memory; of the row phases it only knows how many arrivals to wait for.
template <class Dims, class Ring>
struct ActivationStreamer : Names {
  Progress progress;
  Split split;
  Ring& rings;
  uint8_t* workspace;
  uint64_t policy;
  Cursor cursor;

  __device__ __forceinline__ void begin_rows() { progress.target += split.rows; }
  __device__ __forceinline__ void draw_rows(int) { progress.target += split.rows * split.parts; }
  __device__ __forceinline__ void attend_rows(int) { progress.target += split.rows; }
  __device__ __forceinline__ void middle_rows() { progress.target += split.rows; }
  __device__ __forceinline__ void end_rows(int) { progress.target += split.rows; }
  __device__ __forceinline__ void table_rows() {}

  template <class P, typename Names::Output OUTPUT>
  __device__ __forceinline__ void product(Input input, int) {
    using Work = Workspace<Dims>;
    const int64_t offset = input == kNormed ? Work::kNormed : input == kAttention ? Work::kAttention : Work::kInner;
    progress.wait();
    fence_async();
    stream_activations<P>(rings, cursor, workspace + offset, policy);
    progress.target += gridDim.x;
  }
};

template <class Dims, class Ring>
struct Compute : Names {
  static constexpr int COLUMNS = Ring::kColumns;
  using Work = Workspace<Dims>;
  Progress progress;
  Split split;
  Ring& rings;
  RowMemory& memory;
  const Arguments& arguments;
  const LocalFrameDecodeParams& params;
  uint8_t* workspace;
  Cursors cursors;
  uint32_t seen_ahead = 0;  // history bits of the next draw of the block's first row

  template <typename T>
  __device__ __forceinline__ T* work(int64_t offset) const {
    return reinterpret_cast<T*>(workspace + offset);
  }

  __device__ __forceinline__ bf16* cache(int b, int position) const {
    return work<bf16>(Work::kCache) + (static_cast<int64_t>(b) * kCodebooks + position) * 2 * Dims::kHidden;
  }

  __device__ __forceinline__ bf16* qkv(int b) const {
    return work<bf16>(Work::kQkv) + static_cast<int64_t>(b) * 3 * Dims::kHidden;
  }

  // Tells the other blocks that this one has done its part of a phase. What the copy engine will read needs a fence of
  // its own.
  __device__ __forceinline__ void arrive(bool feeds_products) {
    if (feeds_products) fence_async();
    ComputeSync::sync();
    if (threadIdx.x == 0) counter_release(progress.counter);
  }

  // Runs `body(index, row)` for the block's rows. `prepare()` runs before the block waits for the phase before.
  template <typename Prepare, typename Body>
  __device__ __forceinline__ void rows(bool after_phase, Prepare&& prepare, Body&& body) {
    if (blockIdx.x < split.rows) {
      prepare();
      if (after_phase) {
        if (threadIdx.x == 0) progress.wait();
        ComputeSync::sync();
      }
#pragma unroll 1
      for (int b = blockIdx.x, index = 0; b < params.batch; b += gridDim.x, ++index) body(index, b);
      arrive(true);
    }
    progress.target += split.rows;
  }

  __device__ __forceinline__ void normalise(const Row<Dims>& row, const RowConstants<Dims>& constants, int b) {
    store_packed<Dims, COLUMNS>(layer_norm(memory, row, constants, params.layer_norm_epsilon), workspace + Work::kNormed, b);
  }

  __device__ __forceinline__ void begin_rows() {
    if (arguments.table == nullptr && split.part() < split.parts && threadIdx.x < kMaxRows) {
      const int index = threadIdx.x, b = split.row() + index * gridDim.x;
      const bool live = b < params.batch && params.active[b];
      memory.live[index] = live, memory.status[index] = 0;
      if (live) memory.sampling[index] = load_sampling(params, b);
    }
    ComputeSync::sync();
    RowConstants<Dims> constants;
    rows(
        false, [&] { constants.load(params.ln_1_weight, params.ln_1_bias, nullptr); },
        [&](int index, int b) {
          if (arguments.table == nullptr && !memory.live[index]) return;
          Row<Dims> row;
          load_row(row, params.hidden, static_cast<int64_t>(b) * Dims::kHidden);
          store_residual(row, work<float>(Work::kResidual), b);
          normalise(row, constants, b);
        });
  }

  // Draws the code before `position`, and looks up (or prepares) what follows from it.
  __device__ __forceinline__ void draw_rows(int position) {
    const unsigned part = split.part();
    if (part < split.parts) {
      if (params.qkv_table && memory.live[0]) prefetch_keys(position);
      if (threadIdx.x == 0) progress.wait();
      ComputeSync::sync();
#pragma unroll 1
      for (int b = split.row(), index = 0; b < params.batch; b += gridDim.x, ++index) draw_row(index, b, position, part);
      arrive(true);
    }
    progress.target += split.rows * split.parts;
  }

  __device__ __forceinline__ void draw_row(int index, int b, int position, unsigned part) {
    if (memory.live[index]) draw(index, b, position, part == 0);
    if (position == kCodebooks) {
      if (part == 0) finish_row<Dims>(memory, params, index, b);
      return;
    }
    if (!memory.live[index]) return;
    const int code = memory.codes[index][position - 1];
    Row<Dims> row;
    if (part == 0) {
      load_row(row, params.audio_embeddings,
               (static_cast<int64_t>(position - 1) * Dims::kVocab + code) * Dims::kHidden);
      store_residual(row, work<float>(Work::kResidual), b);
    }
    if (params.qkv_table) {
      attend_row(index, b, position, table_row(position - 1, code), part, split.parts);
    } else {
      RowConstants<Dims> constants;
      constants.load(params.ln_1_weight, params.ln_1_bias, nullptr);
      normalise(row, constants, b);
    }
  }

  // Without the table: rotates q and k that c_attn has left, then attends.
  __device__ __forceinline__ void attend_rows(int position) {
    rows(
        true, [] {},
        [&](int index, int b) {
          if (!memory.live[index]) return;
          bf16* source = qkv(b);
          bf16* key = cache(b, position);
          rotate_row<Dims>(source, source, params.rope, position);
          rotate_row<Dims>(source + Dims::kHidden, key, params.rope, position);
          for_pairs<Dims>([&](int, int element) {
            store_pair(key, Dims::kHidden + element, load_pair(source, 2 * Dims::kHidden + element));
          });
          ComputeSync::sync();
          attend_row(index, b, position, source, 0, 1);
        });
  }

  __device__ __forceinline__ void middle_rows() {
    RowConstants<Dims> constants;
    rows(
        true, [&] { constants.load(params.ln_2_weight, params.ln_2_bias, params.c_proj_bias); },
        [&](int index, int b) {
          if (!memory.live[index]) return;
          Row<Dims> row;
          load_residual(row, work<float>(Work::kResidual), b);
          add_partial<Dims, Dims::Projection::kSlices, COLUMNS>(row, work<float>(Work::kProjected), constants, b);
          store_residual(row, work<float>(Work::kResidual), b);
          normalise(row, constants, b);
        });
  }

  __device__ __forceinline__ void end_rows(int position) {
    RowConstants<Dims> constants;
    rows(
        true, [&] { constants.load(params.ln_f_weight, params.ln_f_bias, params.fc_out_bias); },
        [&](int index, int b) {
          if (!memory.live[index]) return;
          Row<Dims> row;
          load_residual(row, work<float>(Work::kResidual), b);
          add_partial<Dims, Dims::InnerOut::kSlices, COLUMNS>(row, work<float>(Work::kInnerSum), constants, b);
          row = layer_norm(memory, row, constants, params.layer_norm_epsilon);
          store_packed<Dims, COLUMNS>(row, workspace + Work::kNormed, b);
          if (params.hidden_out) {
            for_pairs<Dims>([&](int i, int element) {
              store_pair(params.hidden_out, (static_cast<int64_t>(b) * kCodebooks + position) * Dims::kHidden + element,
                         row.value[i]);
            });
          }
          if (position == 0) stop_head(memory, row, params, work<float>(Work::kStopLogits), b);
        });
  }

  __device__ __forceinline__ void table_rows() {
    rows(
        true, [] {},
        [&](int, int b) {
          bf16* out = arguments.table + static_cast<int64_t>(b) * 3 * Dims::kHidden;
          const bf16* source = qkv(b);
          rotate_row<Dims>(source, out, params.rope, arguments.table_rope);
          rotate_row<Dims>(source + Dims::kHidden, out + Dims::kHidden, params.rope, arguments.table_rope);
          for_pairs<Dims>([&](int, int element) {
            store_pair(out, 2 * Dims::kHidden + element, load_pair(source, 2 * Dims::kHidden + element));
          });
        });
  }

  __device__ __forceinline__ const bf16* table_row(int codebook, int code) const {
    return static_cast<const bf16*>(params.qkv_table) +
           (static_cast<int64_t>(codebook) * Dims::kVocab + code) * 3 * Dims::kHidden;
  }

  // Draws and records the code before `position`; before the first one, the stop decision. One copy of the sampler.
  __device__ __forceinline__ void draw(int index, int b, int position, bool record) {
    const RowSampling& request = memory.sampling[index];
    const int tid = threadIdx.x;
#pragma unroll 1
    for (int channel = position == 1 ? 0 : position; channel <= position; ++channel) {
      const bool stop = channel == 0;
      const int codebook = channel - 1;
      int32_t* seen = stop ? nullptr : seen_row<Dims>(params, request.row, codebook);
      const uint32_t bits = stop ? 0u : index == 0 ? seen_ahead : seen_bits<kIdsPerThread>(seen, Dims::kVocab, tid);
      float4 logits;
      if (stop) {
        const float2 two = __ldcg(work<float2>(Work::kStopLogits) + b);
        logits = make_float4(two.x, two.y, 0.0f, 0.0f);
      } else {
        logits = load_logits<Dims, COLUMNS>(work<float>(Work::kLogits), b);
        if (record && params.audio_logits && tid * kIdsPerThread < Dims::kVocab)
          reinterpret_cast<float4*>(params.audio_logits +
                                    (static_cast<int64_t>(b) * kCodebooks + codebook) * Dims::kVocab)[tid] = logits;
      }
      SampleParams sampling;
      sampling.temperature = stop ? request.text_temperature : request.temperature;
      sampling.top_k = stop ? request.text_top_k : request.top_k;
      sampling.top_p = stop ? request.text_top_p : request.top_p;
      sampling.repetition_penalty = stop ? 1.0f : request.repetition_penalty;
      sampling.word = philox_word(static_cast<uint64_t>(request.seed), static_cast<uint32_t>(request.frame),
                                  static_cast<uint32_t>(channel));
      float score[kIdsPerThread] = {logits.x, logits.y, logits.z, logits.w};
      const SampleResult result = sample_row<kComputeThreads, kIdsPerThread, ComputeSync>(
          memory.sample, score, stop ? 2 : Dims::kVocab, sampling, bits, tid);
      if (tid == 0) {
        memory.status[index] |= result.status;
        if (stop) {
          memory.live[index] = result.code == 0 || params.teacher_codes != nullptr;
        } else {
          const int64_t at = static_cast<int64_t>(b) * kCodebooks + codebook;
          if (record) params.codes[at] = result.code;
          memory.codes[index][codebook] =
              static_cast<int16_t>(params.teacher_codes ? params.teacher_codes[at] : result.code);
          if (record && !(result.status & kStatusEmpty)) atomicOr(&seen[result.code >> 5], 1 << (result.code & 31));
        }
      }
      ComputeSync::sync();
      if (!memory.live[index]) return;
    }
  }

  // Asks L2 for the keys and values that the block's first row will attend to, known before its next code.
  __device__ __forceinline__ void prefetch_keys(int position) const {
    constexpr int kLines = 2 * Dims::kHidden * 2 / 128;
    for (int i = split.part() * kComputeThreads + threadIdx.x; i < (position - 1) * kLines;
         i += split.parts * kComputeThreads) {
      const int j = i / kLines;
      const bf16* row = j == 0 ? cache(split.row(), 0) : table_row(j - 1, memory.codes[0][j - 1]) + Dims::kHidden;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(row + (i % kLines) * 64));
    }
  }

  __device__ __forceinline__ void attend_row(int index, int b, int position, const bf16* query, int part, int parts) {
    const auto key_row = [&](int j) -> const bf16* {
      if (j == 0 || !params.qkv_table) return cache(b, j);
      return table_row(j - 1, memory.codes[index][j - 1]) + Dims::kHidden;
    };
    attend<Dims, COLUMNS>(query, key_row, workspace + Work::kAttention, position, b, part, parts);
  }

  template <class P, typename Names::Output OUTPUT>
  __device__ __forceinline__ void product(Input, int position) {
    constexpr bool kPartial = OUTPUT == kProjected || OUTPUT == kInnerSum || OUTPUT == kLogits;
    static_assert(kPartial || P::kSlices == 1);
#pragma unroll 1
    for (int unit = blockIdx.x; unit < P::kUnits; unit += gridDim.x) {
      if constexpr (kPartial) {
        constexpr int64_t kOffset = OUTPUT == kProjected  ? Work::kProjected
                                    : OUTPUT == kInnerSum ? Work::kInnerSum
                                                          : Work::kLogits;
        multiply_unit<P>(rings, cursors, [&](int tile, const auto& sum, int column) {
          store_partial<P, COLUMNS>(work<float>(kOffset), unit, params.batch, tile, sum, column);
        });
      } else if constexpr (OUTPUT == kInner) {
        staged_product<P>(static_cast<const bf16*>(params.fc_in_bias) + unit * P::kRows,
                          [](float x) { return __fdividef(x, 1.0f + __expf(-x)); });
        copy_staged<P>([&](int row, int b, uint2 four) {
          *reinterpret_cast<uint2*>(workspace + Work::kInner + packed_offset<COLUMNS>(b, unit * P::kRows + row)) = four;
        });
      } else {
        // q lies first in c_attn's bias and in a row of `qkv`, then k and v.
        const int first = unit * P::kRows + (OUTPUT == kLaterQuery ? 0 : Dims::kHidden);
        staged_product<P>(static_cast<const bf16*>(params.c_attn_bias) + first, [](float x) { return x; });
        copy_staged<P>([&](int row, int b, uint2 four) { store_qkv<OUTPUT>(first + row, b, four); });
      }
    }
    // The history of the next draw is read before this block says that its logits are there: a part that draws late must
    // not see the code that part 0 has recorded meanwhile.
    if (OUTPUT == kLogits && split.part() < split.parts && memory.live[0])
      seen_ahead = seen_bits<kIdsPerThread>(seen_row<Dims>(params, memory.sampling[0].row, position), Dims::kVocab,
                                            threadIdx.x);
    arrive(!kPartial);
    progress.target += gridDim.x;
  }

  template <class P, typename Finish>
  __device__ __forceinline__ void staged_product(const bf16* biases, Finish&& finish) {
    const TileBias<P> bias(biases);
    multiply_unit<P>(rings, cursors, [&](int tile, const auto& sum, int column) {
      stage_tile<P, COLUMNS>(rings.staging, tile, sum, column, bias, finish);
    });
  }

  // Hands the staged rows, four at a time, to `put(row, batch row, values)`.
  template <class P, typename Put>
  __device__ __forceinline__ void copy_staged(Put&& put) {
    ComputeSync::sync();
    for (int i = threadIdx.x; i < P::kRows / 4 * COLUMNS; i += kComputeThreads) {
      const int row = i / COLUMNS * 4, b = i % COLUMNS;
      if (b < params.batch) put(row, b, *reinterpret_cast<const uint2*>(rings.staging + packed_offset<COLUMNS>(b, row)));
    }
    ComputeSync::sync();
  }

  template <typename Names::Output OUTPUT>
  __device__ __forceinline__ void store_qkv(int element, int b, uint2 four) {
    if constexpr (OUTPUT != kFirstKeyValue) {
      *reinterpret_cast<uint2*>(qkv(b) + element) = four;
      return;
    }
    // At position 0 nothing is rotated and the one key has all the weight: the attention output is v.
    *reinterpret_cast<uint2*>(cache(b, 0) + element - Dims::kHidden) = four;
    if (element >= 2 * Dims::kHidden) {
      *reinterpret_cast<uint2*>(workspace + Work::kAttention + packed_offset<COLUMNS>(b, element - 2 * Dims::kHidden)) = four;
    }
  }
};

// Resets the counters once every block is past its last wait.
__device__ __forceinline__ void leave(unsigned* counters) {
  ComputeSync::sync();
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(counters + 32, 1u) == gridDim.x - 1) {
    counters[0] = 0;
    counters[32] = 0;
    __threadfence();
  }
}

template <class Dims, int COLUMNS>
struct SharedMemory {
  Rings<COLUMNS, COLUMNS <= 32 ? Dims::kSmallBatchScale : 1> rings;
  RowMemory memory;
};

template <class Dims, int COLUMNS, bool TABLE>
__global__ void __launch_bounds__(kThreads, 1) local_frame_kernel(const __grid_constant__ Arguments arguments) {
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
  if (warp < kComputeThreads / 32) {
    Compute<Dims, Ring> role{{}, {counters}, split, shared.rings, shared.memory, arguments, params, workspace, {}};
    run(role);
    leave(counters);
  } else if (warp == kComputeThreads / 32) {
    if (elected) stream_weights<Dims, TABLE>(shared.rings, static_cast<const bf16*>(params.packed), has_table);
  } else if (elected) {
    ActivationStreamer<Dims, Ring> role{{}, {counters}, split, shared.rings, workspace, policy_evict_last(), {}};
    run(role);
  }
}

template <class Dims, int COLUMNS, bool TABLE>
MossStatus launch_columns(const Arguments& arguments, int blocks) {
  auto* kernel = local_frame_kernel<Dims, COLUMNS, TABLE>;
  constexpr int kBytes = sizeof(SharedMemory<Dims, COLUMNS>);
  static_assert(kBytes <= 232448);
  const MossStatus status = check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), kOp, "cudaFuncSetAttribute");
  if (status != MOSS_OK) return status;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads);
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
    return set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: `multiprocessors` must be 0 .. %d, got %d", kOp, multiprocessors,
                     wanted);
  const int units = Dims::KeyValue::kUnits;
  const int limit = wanted ? wanted : multiprocessors;
  const int blocks = limit < units ? limit : units;
  const int batch = arguments.params.batch;
  if (blocks * kMaxRows < batch)
    return set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: `multiprocessors` must be at least batch / %d = %d, got %d", kOp,
                     kMaxRows, (batch + kMaxRows - 1) / kMaxRows, blocks);
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

struct Required {
  const char* name;
  const void* pointer;
  size_t alignment;
};

template <size_t COUNT>
MossStatus check_pointers(const Required (&required)[COUNT]) {
  for (const Required& entry : required) {
    if (entry.pointer == nullptr)
      return set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: `%s` must not be null", kOp, entry.name);
    if (reinterpret_cast<uintptr_t>(entry.pointer) % entry.alignment != 0)
      return set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: `%s` must be aligned to %zu bytes, got %p", kOp, entry.name,
                       entry.alignment, entry.pointer);
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
    return set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: `batch` must be 1 .. %d, got %d", kOp, kMaxBatch, params.batch);
  if (params.pool_rows < 1)
    return set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: `pool_rows` must be >= 1, got %d", kOp, params.pool_rows);
  if (params.slot_id < 0 || params.slot_id >= params.text_rows || params.pad_token_id < 0 ||
      params.pad_token_id >= params.text_rows)
    return set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: `slot_id` and `pad_token_id` must be 0 .. %lld, got %lld and %lld",
                     kOp, static_cast<long long>(params.text_rows - 1), static_cast<long long>(params.slot_id),
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
                         {"status", params.status, 4}});
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
  return decode->model == MOSS_LOCAL_FULL ? build_table<FullDims>(*decode, table) : build_table<TinyDims>(*decode, table);
}

}  // extern "C"
