// The row phases of local_frame_decode: one block of 256 threads works on one batch row.
#pragma once
#include "device/local_frame.cuh"
#include "device/philox.cuh"
#include "device/sample_row.cuh"
#include "device/tagged.cuh"

namespace moss::local_frame {

struct ComputeSync {
  __device__ static __forceinline__ void sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
  __device__ static __forceinline__ bool any(bool value) {
    uint32_t result;
    asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %1, 0; bar.red.or.pred q, 1, 256, p; selp.u32 %0, 1, 0, q; }"
                 : "=r"(result)
                 : "r"(static_cast<uint32_t>(value))
                 : "memory");
    return result != 0;
  }
};

// One request's sampling parameters, read once per frame.
struct RowSampling {
  int64_t row, seed;
  float temperature, top_p, repetition_penalty, text_temperature, text_top_p;
  int top_k, text_top_k, frame;
};

// What the row phases keep in shared memory. A block owns the batch rows blockIdx.x, blockIdx.x + gridDim.x, ...; index
// i below is the i-th of them.
struct RowMemory {
  float2 reduce[8];
  RowSampling sampling[kMaxRows];
  int32_t seen[kCodebooks * kMaxVocab / 32];  // history of row 0, as it was before the frame
  int16_t codes[kMaxRows][kCodebooks];        // fed codes
  uint8_t live[kMaxRows];                     // active, and has not drawn stop
  uint8_t status[kMaxRows];
};

// The same, and what never lives at once: a draw, and the tile that a product rounds to bf16.
template <int COLUMNS>
struct BlockMemory : RowMemory {
  union {
    SampleShared<kComputeThreads> sample;
    alignas(128) uint8_t staging[80 * COLUMNS * 2];
  };
};

__device__ __forceinline__ RowSampling load_sampling(const LocalFrameDecodeParams& params, int b) {
  RowSampling sampling;
  const int64_t row = params.row_map[b];
  sampling.row = row;
  sampling.seed = params.seed[row];
  sampling.frame = params.frame[row];
  sampling.temperature = params.temperature[row];
  sampling.top_k = params.top_k[row];
  sampling.top_p = params.top_p[row];
  sampling.repetition_penalty = params.repetition_penalty[row];
  sampling.text_temperature = params.text_temperature[row];
  sampling.text_top_k = params.text_top_k[row];
  sampling.text_top_p = params.text_top_p[row];
  return sampling;
}

// Sum over the 256 threads, in one fixed order; every thread gets it.
__device__ __forceinline__ float block_sum(RowMemory& memory, float value) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1)
    value += __shfl_xor_sync(0xffffffffu, value, step);
  ComputeSync::sync();
  if ((threadIdx.x & 31) == 0) memory.reduce[threadIdx.x >> 5].x = value;
  ComputeSync::sync();
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < 8; ++w)
    sum += memory.reduce[w].x;
  return sum;
}

__device__ __forceinline__ float2 load_pair(const void* base, int64_t element) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(static_cast<const bf16*>(base) + element));
}

__device__ __forceinline__ void store_pair(void* base, int64_t element, float2 value) {
  *reinterpret_cast<__nv_bfloat162*>(static_cast<bf16*>(base) + element) = __float22bfloat162_rn(value);
}

// One row of the hidden state in registers: thread t holds elements 2 * (256 * i + t) and the one after.
template <class Dims>
struct Row {
  static constexpr int kPairs = (Dims::kHidden / 2 + kComputeThreads - 1) / kComputeThreads;
  float2 value[kPairs];
};

template <class Dims, typename Body>
__device__ __forceinline__ void for_pairs(Body&& body) {
#pragma unroll
  for (int i = 0; i < Row<Dims>::kPairs; ++i) {
    const int element = 2 * (kComputeThreads * i + static_cast<int>(threadIdx.x));
    if (Dims::kHidden % (2 * kComputeThreads) == 0 || element < Dims::kHidden) body(i, element);
  }
}

// Byte offset of element `element` of column `b` in packed activations.
template <int COLUMNS>
__device__ __forceinline__ int64_t packed_offset(int b, int element) {
  return (static_cast<int64_t>(element / 8) * COLUMNS + b) * 16 + (element % 8) * 2;
}

// Vectors of the model that a row phase needs: loaded while the block still waits for the phase before.
template <class Dims>
struct RowConstants {
  __nv_bfloat162 weight[Row<Dims>::kPairs], bias[Row<Dims>::kPairs], shift[Row<Dims>::kPairs];

  // LayerNorm's weight and bias, and the bias of the product before it (null: none).
  __device__ __forceinline__ void load(const void* norm_weight, const void* norm_bias, const void* linear_bias) {
    for_pairs<Dims>([&](int i, int element) {
      weight[i] = *reinterpret_cast<const __nv_bfloat162*>(static_cast<const bf16*>(norm_weight) + element);
      bias[i] = *reinterpret_cast<const __nv_bfloat162*>(static_cast<const bf16*>(norm_bias) + element);
      if (linear_bias)
        shift[i] = *reinterpret_cast<const __nv_bfloat162*>(static_cast<const bf16*>(linear_bias) + element);
    });
  }
};

// Loads value[i][s], partial sums, from `source(i, s)`; where nothing else says that they are there, waits for them.
template <int COLUMNS, typename Value, int COUNT, int SLICES, typename Source>
__device__ __forceinline__ void load_partial(Value (&value)[COUNT][SLICES], uint32_t tag, Source&& source) {
  if constexpr (kChecksTags<COLUMNS>) {
    load_tagged(value, tag, source);
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
#pragma unroll
      for (int s = 0; s < SLICES; ++s)
        value[i][s] = __ldcg(source(i, s));
    }
  }
}

// Adds the partial sums, in order of their slice, and the bias.
template <class Dims, int SLICES, int COLUMNS>
__device__ __forceinline__ void add_partial(Row<Dims>& row, const float* partial, const RowConstants<Dims>& constants,
                                            int b, uint32_t tag) {
  // A thread has all of its pairs, or (small models) none.
  static_assert(Row<Dims>::kPairs == 1 || Dims::kHidden % (2 * kComputeThreads) == 0);
  if (Dims::kHidden < 2 * kComputeThreads && 2 * threadIdx.x >= Dims::kHidden) return;
  float2 part[Row<Dims>::kPairs][SLICES];
  load_partial<COLUMNS>(part, tag, [&](int i, int s) {
    return reinterpret_cast<const float2*>(partial + (static_cast<int64_t>(s) * COLUMNS + b) * Dims::kHidden) +
           i * kComputeThreads + threadIdx.x;
  });
  for_pairs<Dims>([&](int i, int) {
    float2 sum = part[i][0];
#pragma unroll
    for (int s = 1; s < SLICES; ++s)
      sum.x += part[i][s].x, sum.y += part[i][s].y;
    const float2 shift = __bfloat1622float2(constants.shift[i]);
    row.value[i].x += sum.x + shift.x;
    row.value[i].y += sum.y + shift.y;
  });
}

// Mean of a set of numbers and the sum of their squared distances from it.
struct Moments {
  float mean, squares;
};

// Joins two sets of `count` numbers each (Chan et al.): as accurate as a second pass over the numbers.
__device__ __forceinline__ Moments join(const Moments& a, const Moments& b, float count) {
  const float distance = b.mean - a.mean;
  return {a.mean + 0.5f * distance, a.squares + b.squares + distance * distance * (0.5f * count)};
}

template <class Dims>
__device__ __forceinline__ Moments block_moments(RowMemory& memory, const Row<Dims>& row) {
  // Threads without numbers (small models) are left out: the hidden size is a power of two times the threads that have
  // some.
  constexpr int kThreadsUsed = Dims::kHidden / 2 < kComputeThreads ? Dims::kHidden / 2 : kComputeThreads;
  constexpr int kWarps = kThreadsUsed / 32;
  constexpr float kCount = static_cast<float>(Dims::kHidden) / kThreadsUsed;
  static_assert(Dims::kHidden % (2 * kThreadsUsed) == 0 && (kWarps & (kWarps - 1)) == 0);
  float sum = 0.0f;
  for_pairs<Dims>([&](int i, int) { sum += row.value[i].x + row.value[i].y; });
  Moments moments{sum * (1.0f / kCount), 0.0f};
  for_pairs<Dims>([&](int i, int) {
    const float x = row.value[i].x - moments.mean, y = row.value[i].y - moments.mean;
    moments.squares += x * x + y * y;
  });
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const Moments other{__shfl_xor_sync(0xffffffffu, moments.mean, step),
                        __shfl_xor_sync(0xffffffffu, moments.squares, step)};
    // Lanes join in the same order, so that all get the same bits.
    const bool upper = threadIdx.x & step;
    moments = join(upper ? other : moments, upper ? moments : other, kCount * step);
  }
  ComputeSync::sync();
  if ((threadIdx.x & 31) == 0) memory.reduce[threadIdx.x >> 5] = make_float2(moments.mean, moments.squares);
  ComputeSync::sync();
  Moments parts[kWarps];
#pragma unroll
  for (int w = 0; w < kWarps; ++w)
    parts[w] = {memory.reduce[w].x, memory.reduce[w].y};
#pragma unroll
  for (int width = 1; width < kWarps; width *= 2) {
#pragma unroll
    for (int w = 0; w < kWarps; w += 2 * width)
      parts[w] = join(parts[w], parts[w + width], kCount * 32 * width);
  }
  return parts[0];
}

// LayerNorm of the row, rounded to bf16 values.
template <class Dims>
__device__ __forceinline__ Row<Dims> layer_norm(RowMemory& memory, const Row<Dims>& row,
                                                const RowConstants<Dims>& constants, float epsilon) {
  const Moments moments = block_moments<Dims>(memory, row);
  const float mean = moments.mean, variance = moments.squares * (1.0f / Dims::kHidden);
  const float scale = rsqrtf(variance + epsilon);
  Row<Dims> out;
  for_pairs<Dims>([&](int i, int) {
    const float2 w = __bfloat1622float2(constants.weight[i]), c = __bfloat1622float2(constants.bias[i]);
    out.value[i] = __bfloat1622float2(__floats2bfloat162_rn((row.value[i].x - mean) * scale * w.x + c.x,
                                                            (row.value[i].y - mean) * scale * w.y + c.y));
  });
  return out;
}

template <class Dims, int COLUMNS>
__device__ __forceinline__ void store_packed(const Row<Dims>& row, uint8_t* x, int b) {
  for_pairs<Dims>([&](int i, int element) { store_pair(x + packed_offset<COLUMNS>(b, element), 0, row.value[i]); });
}

template <class Dims>
__device__ __forceinline__ void load_residual(Row<Dims>& row, const float* residual, int b) {
  for_pairs<Dims>([&](int i, int element) {
    row.value[i] = *reinterpret_cast<const float2*>(residual + static_cast<int64_t>(b) * Dims::kHidden + element);
  });
}

// The residual stays with the thread that reads it again: no fence is needed.
template <class Dims>
__device__ __forceinline__ void store_residual(const Row<Dims>& row, float* residual, int b) {
  for_pairs<Dims>([&](int i, int element) {
    *reinterpret_cast<float2*>(residual + static_cast<int64_t>(b) * Dims::kHidden + element) = row.value[i];
  });
}

template <class Dims>
__device__ __forceinline__ void load_row(Row<Dims>& row, const void* base, int64_t first) {
  for_pairs<Dims>([&](int i, int element) { row.value[i] = load_pair(base, first + element); });
}

// Products of the normed row of position 0 with the stop head; drawn together with the first code.
template <class Dims>
__device__ __forceinline__ void stop_head(RowMemory& memory, const Row<Dims>& normed,
                                          const LocalFrameDecodeParams& params, float* logits, int b) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    float dot = 0.0f;
    for_pairs<Dims>([&](int i, int element) {
      const float2 w = load_pair(params.stop_head, c * Dims::kHidden + element);
      dot += normed.value[i].x * w.x + normed.value[i].y * w.y;
    });
    dot = block_sum(memory, dot);
    if (threadIdx.x == 0) {
      logits[2 * b + c] = dot;
      if (params.stop_logits) params.stop_logits[2 * b + c] = dot;
    }
  }
}

constexpr int kIdsPerThread = 4;

// Partial logits of a row, in order of their slice.
template <class Dims, int COLUMNS>
__device__ __forceinline__ float4 load_logits(const float* partial, int b, uint32_t tag) {
  static_assert(Dims::kVocab <= kIdsPerThread * kComputeThreads);
  float4 sum = {};
  if (threadIdx.x * kIdsPerThread < Dims::kVocab) {
    float4 part[1][Dims::Head::kSlices];
    load_partial<COLUMNS>(part, tag, [&](int, int s) {
      return reinterpret_cast<const float4*>(partial + (static_cast<int64_t>(s) * COLUMNS + b) * Dims::kVocab) +
             threadIdx.x;
    });
    sum = part[0][0];
#pragma unroll
    for (int s = 1; s < Dims::Head::kSlices; ++s)
      sum.x += part[0][s].x, sum.y += part[0][s].y, sum.z += part[0][s].z, sum.w += part[0][s].w;
  }
  return sum;
}

template <class Dims>
constexpr int kSeenWords = (Dims::kVocab + 31) / 32;

template <class Dims>
__device__ __forceinline__ int32_t* seen_row(const LocalFrameDecodeParams& params, int64_t row, int codebook) {
  return params.seen + (row * kCodebooks + codebook) * kSeenWords<Dims>;
}

// Rotates the pairs of one vector of kHidden elements (all heads) for a position.
template <class Dims>
__device__ __forceinline__ void rotate_row(const void* source, void* destination, const float* rope, int position) {
  for_pairs<Dims>([&](int, int element) {
    const float2 x = load_pair(source, element);
    const float2 turn =
        reinterpret_cast<const float2*>(rope)[position * (Dims::kHeadDim / 2) + (element % Dims::kHeadDim) / 2];
    store_pair(destination, element, make_float2(x.x * turn.x - x.y * turn.y, x.y * turn.x + x.x * turn.y));
  });
}

__device__ __forceinline__ void unpack(const uint4& packed, float (&value)[8]) {
  const __nv_bfloat162* pairs = reinterpret_cast<const __nv_bfloat162*>(&packed);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __bfloat1622float2(pairs[i]);
    value[2 * i] = pair.x, value[2 * i + 1] = pair.y;
  }
}

// One head: `out` gets 8 dimensions from each lane of the first group.
template <class Dims, int ROUNDS>
__device__ __forceinline__ void attend_head(const uint4& query, const uint4 (&key)[ROUNDS], const uint4 (&val)[ROUNDS],
                                            const bool (&visible)[ROUNDS], float scale, uint8_t* destination) {
  constexpr int kChunks = Dims::kHeadDim / 8;
  constexpr int kKeys = 32 / kChunks;
  constexpr uint32_t kAll = 0xffffffffu;
  const int lane = threadIdx.x & 31, group = lane / kChunks, chunk = lane % kChunks;
  float q[8], score[ROUNDS], highest = -INFINITY;
  unpack(query, q);
#pragma unroll
  for (int r = 0; r < ROUNDS; ++r) {
    float k[8], dot = 0.0f;
    unpack(key[r], k);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      dot += q[i] * k[i];
    // Sum over the lanes of the key, then hand it to all of them.
#pragma unroll
    for (int step = 8; step > 0; step >>= 1) {
      const float other = __shfl_down_sync(kAll, dot, step);
      if (chunk < step && chunk + step < kChunks) dot += other;
    }
    dot = __shfl_sync(kAll, dot, group * kChunks < 32 ? group * kChunks : 0) * scale;
    score[r] = visible[r] ? dot : -INFINITY;
    highest = fmaxf(highest, score[r]);
  }
  float peak = highest;
#pragma unroll
  for (int g = 0; g < kKeys; ++g)
    peak = fmaxf(peak, __shfl_sync(kAll, highest, g * kChunks));
  float sum = 0.0f, out[8] = {};
#pragma unroll
  for (int r = 0; r < ROUNDS; ++r) {
    const float p = __expf(score[r] - peak);
    float v[8];
    unpack(val[r], v);
    sum += p;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      out[i] += p * v[i];
  }
  float total = 0.0f, mixed[8] = {};
#pragma unroll
  for (int g = 0; g < kKeys; ++g) {
    total += __shfl_sync(kAll, sum, g * kChunks + chunk);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      mixed[i] += __shfl_sync(kAll, out[i], g * kChunks + chunk);
  }
  if (group == 0) {
    const float inverse = 1.0f / total;
    uint4 packed;
    __nv_bfloat162* pairs = reinterpret_cast<__nv_bfloat162*>(&packed);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      pairs[i] = __floats2bfloat162_rn(mixed[2 * i] * inverse, mixed[2 * i + 1] * inverse);
    *reinterpret_cast<uint4*>(destination) = packed;
  }
}

// Attention of one row at `position` over keys 0 .. position, shared by `parts` blocks: warp w of part p takes heads
// w + 8 * p, w + 8 * (p + parts), ...; a lane holds 8 dimensions of one key. `key_row(j)` points to k of key j, v lies
// `kHidden` elements behind it.
template <class Dims, int COLUMNS, typename KeyRow>
__device__ __forceinline__ void attend(const bf16* query, KeyRow&& key_row, uint8_t* attention, int position, int b,
                                       int part, int parts) {
  constexpr int kChunks = Dims::kHeadDim / 8;  // lanes per key
  constexpr int kKeys = 32 / kChunks;          // keys per load
  constexpr int kRounds = (kCodebooks + kKeys - 1) / kKeys;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int group = lane / kChunks, chunk = lane % kChunks;
  const float scale = 1.0f / sqrtf(static_cast<float>(Dims::kHeadDim));
  const bf16* keys[kRounds];
  bool visible[kRounds];
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const int j = r * kKeys + group;
    visible[r] = group < kKeys && j <= position;
    keys[r] = key_row(visible[r] ? j : 0);
  }
#pragma unroll 1
  for (int head = warp + 8 * part; head < Dims::kHeads; head += 8 * parts) {
    const int offset = head * Dims::kHeadDim + chunk * 8;
    // All loads are in flight before the first is used.
    uint4 key[kRounds], val[kRounds];
    const uint4 q = __ldcg(reinterpret_cast<const uint4*>(query + offset));
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      key[r] = visible[r] ? __ldcg(reinterpret_cast<const uint4*>(keys[r] + offset)) : uint4{};
      val[r] = visible[r] ? __ldcg(reinterpret_cast<const uint4*>(keys[r] + Dims::kHidden + offset)) : uint4{};
    }
    attend_head<Dims>(q, key, val, visible, scale, attention + packed_offset<COLUMNS>(b, offset));
  }
}

// The row's outputs once its last code is drawn, or where it draws none.
template <class Dims>
__device__ __forceinline__ void finish_row(const RowMemory& memory, const LocalFrameDecodeParams& params, int index,
                                           int b) {
  const int tid = threadIdx.x;
  const bool live = memory.live[index];
  int64_t* codes = params.codes + static_cast<int64_t>(b) * kCodebooks;
  if (!live && tid < kCodebooks) codes[tid] = params.audio_pad_id;
  if (tid == 0) {
    params.continues[b] = live;
    params.status[b] = memory.status[index];
    if (live) params.frame[memory.sampling[index].row] = memory.sampling[index].frame + 1;
  }
  Row<Dims> row;
  load_row(row, params.embed_tokens, (live ? params.slot_id : params.pad_token_id) * Dims::kHidden);
  if (live) {
    // One rounding at each add, as the official code adds them. The fed codes are the drawn ones outside of tests.
    for (int q = 0; q < kCodebooks; ++q) {
      const int64_t first = (static_cast<int64_t>(q) * Dims::kVocab + memory.codes[index][q]) * Dims::kHidden;
      for_pairs<Dims>([&](int i, int element) {
        const float2 term = load_pair(params.audio_embeddings, first + element);
        const float2 sum = make_float2(row.value[i].x + term.x, row.value[i].y + term.y);
        row.value[i] = __bfloat1622float2(__float22bfloat162_rn(sum));
      });
    }
  }
  for_pairs<Dims>([&](int i, int element) {
    store_pair(params.feedback, static_cast<int64_t>(b) * Dims::kHidden + element, row.value[i]);
  });
}

}  // namespace moss::local_frame
