// The roles that walk the chain of phases of local_frame_decode: the one that brings activations, and the one that
// computes.
#pragma once
#include "device/local_frame_products.cuh"
#include "device/local_frame_rows.cuh"

namespace moss::local_frame {

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
    role.middle_rows(position);
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
  static __device__ constexpr bool is_partial(Output output) {
    return output == kProjected || output == kInnerSum || output == kLogits;
  }
  // Whether the blocks arrive at the common counter once they have stored it.
  template <int COLUMNS>
  static __device__ constexpr bool is_counted(Output output) {
    return is_partial(output) ? kCountsPartial<COLUMNS> : output != kInner;
  }
  // Of partial sums.
  static __device__ __forceinline__ uint32_t tag(int position) { return position & 1; }
};

// How blocks take part in row phases: the first `rows` blocks own the batch rows. While there are blocks enough,
// `parts` of them draw a row's code (all the same one, so none has to tell it to the others) and share its attention:
// block p * rows + r is part p of row r, and part 0 alone writes what leaves the kernel.
struct Split {
  unsigned rows, parts;
  __device__ __forceinline__ Split(int batch, bool has_table)
      : rows(min(static_cast<unsigned>(batch), gridDim.x)), parts(1) {
    while (has_table && parts < kMaxParts && rows * parts * 2 <= gridDim.x)
      parts *= 2;
  }
  __device__ __forceinline__ unsigned part() const { return blockIdx.x / rows; }
  __device__ __forceinline__ int row() const { return static_cast<int>(blockIdx.x % rows); }
};

// Units of fc_in that make the activations of one slice of fc_out.
template <class Dims>
constexpr int kUnitsOfSlice = Dims::InnerIn::kUnits / Dims::InnerOut::kSlices;

// Brings activations into shared memory; of the row phases it only knows how many arrivals to wait for.
template <class Dims, class Ring>
struct ActivationStreamer : Names {
  Progress progress;
  Split split;
  bool has_table;
  Ring& rings;
  uint8_t* workspace;
  uint64_t policy;
  Cursor cursor;

  __device__ __forceinline__ void begin_rows() { progress.target += split.rows; }
  __device__ __forceinline__ void draw_rows(int) {
    if (!has_table) progress.target += split.rows;
  }
  __device__ __forceinline__ void attend_rows(int) { progress.target += split.rows; }
  __device__ __forceinline__ void middle_rows(int) { progress.target += split.rows; }
  __device__ __forceinline__ void end_rows(int) { progress.target += split.rows; }
  __device__ __forceinline__ void table_rows() {}

  // The part that attends with the heads of a slice of c_proj's inputs: see `attend`.
  __device__ __forceinline__ unsigned part_of_slice(int slice) const {
    constexpr int kHeads = Dims::Projection::kK16 * 16 / Dims::kHeadDim;
    static_assert(kWarps % kHeads == 0);
    return slice * kHeads / kWarps % split.parts;
  }

  template <class P, typename Names::Output OUTPUT>
  __device__ __forceinline__ void product(Input input, int position) {
    using Work = Workspace<Dims>;
    const int64_t offset = input == kNormed ? Work::kNormed : input == kAttention ? Work::kAttention : Work::kInner;
    stream_activations<P>(rings, cursor, workspace + offset, policy, [&](int slice) {
      if constexpr (OUTPUT == kInnerSum)
        counter_wait(progress.counter + kSliceArrivals + slice, (position + 1) * kUnitsOfSlice<Dims>);
      else if (OUTPUT == kProjected && has_table && position > 0)
        counter_wait(progress.counter + kPartArrivals + part_of_slice(slice), position * split.rows);
      else
        progress.wait();
    });
    if (Names::is_counted<Ring::kColumns>(OUTPUT)) progress.target += gridDim.x;
  }
};

template <class Dims, class Ring>
struct Compute : Names {
  static constexpr int COLUMNS = Ring::kColumns;
  using Work = Workspace<Dims>;
  Progress progress;
  Split split;
  Ring& rings;
  BlockMemory<COLUMNS>& memory;
  const Arguments& arguments;
  const LocalFrameDecodeParams& params;
  uint8_t* workspace;
  Cursors cursors;

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

  // Tells the other blocks that this one has done its part of a phase, whose output the copy engine may read.
  __device__ __forceinline__ void arrive(unsigned counter = kArrivals) {
    fence_async_global();
    ComputeSync::sync();
    if (threadIdx.x == 0) counter_release(progress.counter + counter);
  }

  // The same for the units of fc_in.
  __device__ __forceinline__ void arrive_slices() {
    static_assert(Dims::InnerIn::kRows * kUnitsOfSlice<Dims> == Dims::InnerOut::kK16 * 16);
    static_assert(Dims::InnerOut::kSlices <= kMaxSlices);
    fence_async_global();
    ComputeSync::sync();
    if (threadIdx.x != 0) return;
    for (int unit = blockIdx.x; unit < Dims::InnerIn::kUnits; unit += gridDim.x)
      counter_release(progress.counter + kSliceArrivals + unit / kUnitsOfSlice<Dims>);
  }

  // The same for partial sums.
  __device__ __forceinline__ void arrive_partial() {
    ComputeSync::sync();
    if (threadIdx.x != 0) return;
    if constexpr (kChecksTags<COLUMNS>)
      counter_add(progress.counter);
    else
      counter_release(progress.counter);
  }

  // Waits for the arrivals of all phases so far.
  __device__ __forceinline__ void wait() const {
    if (threadIdx.x == 0) progress.wait();
    ComputeSync::sync();
  }

  // Runs `body(index, row)` for the block's rows. `prepare()` runs before the block waits for the phase before.
  template <typename Prepare, typename Body>
  __device__ __forceinline__ void rows(bool after_phase, Prepare&& prepare, Body&& body) {
    if (blockIdx.x < split.rows) {
      prepare();
      if (after_phase) wait();
#pragma unroll 1
      for (int b = blockIdx.x, index = 0; b < params.batch; b += gridDim.x, ++index)
        body(index, b);
      arrive();
    }
    progress.target += split.rows;
  }

  __device__ __forceinline__ void normalise(const Row<Dims>& row, const RowConstants<Dims>& constants, int b) {
    store_packed<Dims, COLUMNS>(layer_norm(memory, row, constants, params.layer_norm_epsilon),
                                workspace + Work::kNormed, b);
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
    if (arguments.table == nullptr && split.part() < split.parts && memory.live[0]) read_history();
  }

  // Before any code is drawn: a part that draws late must not see the code that part 0 has recorded meanwhile.
  __device__ __forceinline__ void read_history() {
    const int32_t* seen = seen_row<Dims>(params, memory.sampling[0].row, 0);
    for (int i = threadIdx.x; i < kCodebooks * kSeenWords<Dims>; i += kComputeThreads)
      memory.seen[i] = seen[i];
  }

  // Draws the code before `position`, and looks up (or prepares) what follows from it.
  __device__ __forceinline__ void draw_rows(int position) {
    const unsigned part = split.part();
    if (part < split.parts) {
      if (params.qkv_table && memory.live[0]) prefetch_keys(position);
      if (kCountsPartial<COLUMNS>) wait();
#pragma unroll 1
      for (int b = split.row(), index = 0; b < params.batch; b += gridDim.x, ++index)
        draw_row(index, b, position, part);
      // With the table the blocks of a part have a counter; without it there is one part.
      arrive(params.qkv_table ? kPartArrivals + part : kArrivals);
    }
    if (!params.qkv_table) progress.target += split.rows;
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

  __device__ __forceinline__ void middle_rows(int position) {
    RowConstants<Dims> constants;
    rows(
        kCountsPartial<COLUMNS>, [&] { constants.load(params.ln_2_weight, params.ln_2_bias, params.c_proj_bias); },
        [&](int index, int b) {
          if (!memory.live[index]) return;
          Row<Dims> row;
          load_residual(row, work<float>(Work::kResidual), b);
          add_partial<Dims, Dims::Projection::kSlices, COLUMNS>(row, work<float>(Work::kProjected), constants, b,
                                                                tag(position));
          store_residual(row, work<float>(Work::kResidual), b);
          normalise(row, constants, b);
        });
  }

  __device__ __forceinline__ void end_rows(int position) {
    RowConstants<Dims> constants;
    rows(
        kCountsPartial<COLUMNS>, [&] { constants.load(params.ln_f_weight, params.ln_f_bias, params.fc_out_bias); },
        [&](int index, int b) {
          if (!memory.live[index]) return;
          Row<Dims> row;
          load_residual(row, work<float>(Work::kResidual), b);
          add_partial<Dims, Dims::InnerOut::kSlices, COLUMNS>(row, work<float>(Work::kInnerSum), constants, b,
                                                              tag(position));
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
      const int32_t* history = index == 0 ? memory.seen + codebook * kSeenWords<Dims> : seen;
      const uint32_t bits = stop ? 0u : seen_bits<kIdsPerThread>(history, Dims::kVocab, tid);
      float4 logits;
      if (stop) {
        const float2 two = __ldcg(work<float2>(Work::kStopLogits) + b);
        logits = make_float4(two.x, two.y, 0.0f, 0.0f);
      } else {
        logits = load_logits<Dims, COLUMNS>(work<float>(Work::kLogits), b, tag(codebook));
        if (record && params.audio_logits && tid * kIdsPerThread < Dims::kVocab)
          reinterpret_cast<float4*>(params.audio_logits +
                                    (static_cast<int64_t>(b) * kCodebooks + codebook) * Dims::kVocab)[tid] = logits;
      }
      SampleParams sampling;
      sampling.temperature = stop ? request.text_temperature : request.temperature;
      sampling.top_k = stop ? request.text_top_k : request.top_k;
      sampling.top_p = stop ? request.text_top_p : request.top_p;
      sampling.repetition_penalty = stop ? 1.0f : request.repetition_penalty;
      if (tid < 32)
        memory.sample.word = philox_word(static_cast<uint64_t>(request.seed), static_cast<uint32_t>(request.frame),
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
    constexpr bool kPartial = Names::is_partial(OUTPUT);
    static_assert(kPartial || P::kSlices == 1);
#pragma unroll 1
    for (int unit = blockIdx.x; unit < P::kUnits; unit += gridDim.x) {
      if constexpr (kPartial) {
        constexpr int64_t kOffset = OUTPUT == kProjected  ? Work::kProjected
                                    : OUTPUT == kInnerSum ? Work::kInnerSum
                                                          : Work::kLogits;
        multiply_unit<P>(rings, cursors, [&](int tile, const auto& sum, int column) {
          store_partial<P, COLUMNS>(work<float>(kOffset), unit, params.batch, tile, sum, column, tag(position));
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
    if constexpr (OUTPUT == kInner) arrive_slices();
    if constexpr (Names::template is_counted<COLUMNS>(OUTPUT)) {
      if constexpr (kPartial)
        arrive_partial();
      else
        arrive();
      progress.target += gridDim.x;
    }
  }

  template <class P, typename Finish>
  __device__ __forceinline__ void staged_product(const bf16* biases, Finish&& finish) {
    const TileBias<P> bias(biases);
    multiply_unit<P>(rings, cursors, [&](int tile, const auto& sum, int column) {
      stage_tile<P, COLUMNS>(memory.staging, tile, sum, column, bias, finish);
    });
  }

  // Hands the staged rows, four at a time, to `put(row, batch row, values)`.
  template <class P, typename Put>
  __device__ __forceinline__ void copy_staged(Put&& put) {
    ComputeSync::sync();
    for (int i = threadIdx.x; i < P::kRows / 4 * COLUMNS; i += kComputeThreads) {
      const int row = i / COLUMNS * 4, b = i % COLUMNS;
      if (b < params.batch)
        put(row, b, *reinterpret_cast<const uint2*>(memory.staging + packed_offset<COLUMNS>(b, row)));
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
      *reinterpret_cast<uint2*>(workspace + Work::kAttention + packed_offset<COLUMNS>(b, element - 2 * Dims::kHidden)) =
          four;
    }
  }
};

// Resets the counters once every block is past its last wait.
__device__ __forceinline__ void leave(unsigned* counters) {
  ComputeSync::sync();
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(counters + kExits, 1u) == gridDim.x - 1) {
    for (int i = 0; i <= kExits; ++i)
      counters[i] = 0;
    __threadfence();
  }
}

}  // namespace moss::local_frame
