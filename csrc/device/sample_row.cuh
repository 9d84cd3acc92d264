// One draw from one row of logits by the threads of one block: exact integer weights, so that the code is a function of
// the logits and the parameters alone. Shared by sample_codebook and local_frame_decode.
//
// Thread t holds the scores of ids t*EPT .. t*EPT+EPT-1. Two ways lead to the same code:
//   list   a histogram of the scores bounds the top_k set; when that holds at most 64 codes (the usual case), sums over
//          all pairs of them replace sorting;
//   radix  otherwise exact radix selection of the top_k and top_p thresholds over all ids.
#pragma once
#include <cstdint>

namespace moss {

constexpr int kStatusNonfinite = 1;
constexpr int kStatusEmpty = 2;

struct SampleParams {
  float temperature;         // not >= 1e-5: greedy
  int top_k;                 // outside 1 .. V-1: off
  float top_p;               // outside (0, 1): off
  float repetition_penalty;  // not > 0: 1
};

struct SampleResult {
  int code;
  int status;
};

constexpr int kSampleBins = 128;
constexpr int kListCapacity = 64;

// Sync::sync() is a barrier of the THREADS threads; Sync::any(p) is one that also tells whether p held in any thread.
template <int THREADS>
struct SampleShared {
  static constexpr int kWarps = THREADS / 32;
  static_assert(kWarps <= 8);
  union {
    alignas(16) uint32_t bins[256];
    unsigned long long weight_bins[256];
    unsigned long long pair_sums[kWarps][kListCapacity];
  };
  unsigned long long list[kWarps][kListCapacity];  // key << 32 | id: what each warp listed, ascending by id
  unsigned long long warp_sum[kWarps];
  alignas(16) uint32_t warp_key[kWarps];
  alignas(16) uint32_t warp_low[kWarps];
  uint32_t word;                 // the random word of the draw
  alignas(8) uint8_t listed[8];  // entries in each warp's part of `list`
  uint32_t digit;
  uint32_t below;
  uint32_t edge_weight;
  unsigned long long weight_before;
  int code;
};

// Order-preserving map of a float to an unsigned integer, -0.0 equal to +0.0. No float maps to 0 but a NaN, so 0 is
// free for "no candidate".
__device__ __forceinline__ uint32_t order_key(float value) {
  const uint32_t bits = __float_as_uint(__fadd_rn(value, 0.0f));
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}

__device__ __forceinline__ float key_value(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) ? key ^ 0x80000000u : ~key);
}

// round_half_even(2^30 * exp(u)) for u <= 0 by a fixed polynomial, each operation rounded on its own; 0 below 2^-32.
__device__ __forceinline__ uint32_t integer_weight(float u) {
  const float exponent = __fmul_rn(u, __uint_as_float(0x3fb8aa3bu));
  const bool counts = exponent >= -32.0f;
  const float t = counts ? exponent : -32.0f;
  const float n = floorf(t);
  const float g = __fsub_rn(t, n);
  float p = __uint_as_float(0x3962a0d6u);
  p = __fadd_rn(__fmul_rn(p, g), __uint_as_float(0x3aa36b1bu));
  p = __fadd_rn(__fmul_rn(p, g), __uint_as_float(0x3c1e85cbu));
  p = __fadd_rn(__fmul_rn(p, g), __uint_as_float(0x3d634488u));
  p = __fadd_rn(__fmul_rn(p, g), __uint_as_float(0x3e75feacu));
  p = __fadd_rn(__fmul_rn(p, g), __uint_as_float(0x3f317216u));
  p = __fadd_rn(__fmul_rn(p, g), __uint_as_float(0x3f800000u));
  const float scale = __int_as_float((static_cast<int>(n) + 30 + 127) << 23);
  const uint32_t weight = __float2uint_rn(__fmul_rn(p, scale));
  return counts ? weight : 0u;
}

// Division of many scores by one number: __fdiv_rn's own steps, without its branch for each quotient.
struct Divisor {
  float value, reciprocal;

  __device__ __forceinline__ explicit Divisor(float divisor) : value(divisor) {
    const float estimate = __fdividef(1.0f, divisor);
    reciprocal = __fmaf_rn(estimate, __fmaf_rn(estimate, -divisor, 1.0f), estimate);
  }

  // Whether `divide` rounds like division for every `plain_score`, and for their products and quotients with another
  // plain divisor: nothing comes near overflow or underflow.
  __device__ __forceinline__ bool plain() const { return value >= 0x1p-20f && value <= 0x1p20f; }

  __device__ __forceinline__ float divide(float x) const {
    const float quotient = __fmul_rn(x, reciprocal);
    return __fmaf_rn(reciprocal, __fmaf_rn(-value, quotient, x), quotient);
  }
};

// A score of -inf takes no part, whatever becomes of it.
__device__ __forceinline__ bool plain_score(float score) {
  const float size = fabsf(score);
  return (size >= 0x1p-60f && size <= 0x1p60f) || score == 0.0f || score == -__int_as_float(0x7f800000);
}

// (factor * total) >> 32, exact for totals below 2^42.
__device__ __forceinline__ unsigned long long scaled(uint32_t factor, unsigned long long total) {
  const unsigned long long wide = factor;
  return wide * (total >> 32) + ((wide * (total & 0xffffffffull)) >> 32);
}

// A sum of 32-bit values from the sums of their halves.
__device__ __forceinline__ unsigned long long joined(uint32_t low, uint32_t high) {
  return low + (static_cast<unsigned long long>(high) << 16);
}

// Shuffles of a round do not wait for each other.
template <typename T>
__device__ __forceinline__ T warp_inclusive_scan(T value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step <<= 2) {
    T other[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int distance = (i + 1) * step;
      other[i] = distance < 32 ? __shfl_up_sync(0xffffffffu, value, distance) : T(0);
      if (lane < distance) other[i] = 0;
    }
    value += other[0] + other[1] + other[2];
  }
  return value;
}

// Exclusive prefix over the block of one value per thread, with the block's total; two barriers.
template <int THREADS, typename Sync>
__device__ __forceinline__ unsigned long long block_exclusive_scan(unsigned long long value,
                                                                   unsigned long long* warp_sum,
                                                                   unsigned long long* total, int tid) {
  const int lane = tid & 31, warp = tid >> 5;
  const unsigned long long inclusive = warp_inclusive_scan(value, lane);
  if (lane == 31) warp_sum[warp] = inclusive;
  Sync::sync();
  unsigned long long before = 0, all = 0;
#pragma unroll
  for (int w = 0; w < THREADS / 32; ++w) {
    const unsigned long long s = warp_sum[w];
    if (w < warp) before += s;
    all += s;
  }
  Sync::sync();
  *total = all;
  return before + inclusive - value;
}

// Bits of the EPT ids of thread `tid` in a packed history.
template <int EPT>
__device__ __forceinline__ uint32_t seen_bits(const int32_t* seen, int vocab, int tid) {
  static_assert(32 % EPT == 0);
  const int id = tid * EPT;
  return id < vocab ? static_cast<uint32_t>(seen[id >> 5]) >> (id & 31) : 0u;
}

// Code number `index` of the list, by ascending id; 0 behind its end.
template <typename Shared>
__device__ __forceinline__ unsigned long long listed_code(const Shared& shared, int index, int count) {
  int warp = 0, start = 0;
  if constexpr (Shared::kWarps > 1) {
    // Byte w: number of codes that the warps before w listed. At most 64, so that no byte carries into the next.
    const unsigned long long starts =
        *reinterpret_cast<const unsigned long long*>(shared.listed) * 0x0101010101010100ull;
    const uint32_t low = static_cast<uint32_t>(starts), high = static_cast<uint32_t>(starts >> 32);
    const uint32_t reach = static_cast<uint32_t>(index) * 0x01010101u + 0x80808080u;
    warp = __popc((reach - low) & 0x80808080u) + __popc((reach - high) & 0x80808080u) - 1;
    start = static_cast<int>((starts >> (8 * warp)) & 0xffu);
  }
  return index < count ? shared.list[warp][index - start] : 0ull;
}

// Finishes the draw on the `count` codes of the list, a superset of the top_k set. Only the first warp's result counts.
// Each lane has SLOTS codes that follow one another.
template <int SLOTS, typename Sync, typename Shared>
__device__ __forceinline__ int draw_from_list(Shared& shared, int count, float max_value, int top_k, bool top_p_on,
                                              uint32_t top_p_fixed, int lane, int warp) {
  constexpr uint32_t kAll = 0xffffffffu;
  constexpr int kGroups = Shared::kWarps / SLOTS;
  uint32_t key[SLOTS], id[SLOTS], weight[SLOTS];
#pragma unroll
  for (int i = 0; i < SLOTS; ++i) {
    const unsigned long long code = listed_code(shared, lane * SLOTS + i, count);
    key[i] = static_cast<uint32_t>(code >> 32), id[i] = static_cast<uint32_t>(code);
    // Key 0 stands for a NaN, which weighs nothing.
    const float value = key_value(key[i]);
    weight[i] = integer_weight(value == max_value ? 0.0f : __fsub_rn(value, max_value));
  }
  // The weight before a code in (score descending, id ascending), in halves so that sums need no carry, and from bit 24
  // of the first on the number of codes strictly above it. Codes that top_k drops come after all that it keeps, so they
  // need not be gone yet. A warp adds its group's share of all codes to the sums of one slot; those behind the end of
  // the list weigh nothing and are below all.
  const int slot = warp % SLOTS, group = warp / SLOTS;
  const uint32_t own = slot == 0 ? key[0] : key[SLOTS - 1];
  uint32_t low[SLOTS] = {}, high[SLOTS] = {};
#pragma unroll
  for (int first = 0; first < 32; first += kGroups) {
    // More than 32 codes are here, unless there is but one slot.
    if (first * SLOTS >= 32 && first * SLOTS >= count) break;
    const int source = first + group;
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
      const uint32_t other = __shfl_sync(kAll, key[i], source), other_weight = __shfl_sync(kAll, weight[i], source);
      const bool above = other > own;
      const bool before = above || (other == own && source * SLOTS + i < lane * SLOTS + slot);
      const uint32_t added = before ? other_weight : 0u;
      low[0] += (added & 0xffffu) + (above ? 1u << 24 : 0u);
      high[0] += added >> 16;
    }
  }
  if constexpr (Shared::kWarps > 1) {
    shared.pair_sums[group][lane + 32 * slot] = static_cast<unsigned long long>(high[0]) << 32 | low[0];
    Sync::sync();
    if (warp != 0) return 0;
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
      low[i] = high[i] = 0;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const unsigned long long part = shared.pair_sums[g][lane + 32 * i];
        low[i] += static_cast<uint32_t>(part), high[i] += static_cast<uint32_t>(part >> 32);
      }
    }
  }
  uint32_t lane_low = 0, lane_high = 0;
#pragma unroll
  for (int i = 0; i < SLOTS; ++i) {
    // A code stays when fewer than k codes are strictly above it: ties at the edge all stay.
    if (static_cast<int>(low[i] >> 24) >= top_k) weight[i] = 0;
    lane_low += weight[i] & 0xffffu, lane_high += weight[i] >> 16;
  }
  if (top_p_on) {
    const unsigned long long total = joined(__reduce_add_sync(kAll, lane_low), __reduce_add_sync(kAll, lane_high));
    const unsigned long long bound = scaled(top_p_fixed, total);
    lane_low = lane_high = 0;
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
      if (joined(low[i] & 0xffffffu, high[i]) > bound) weight[i] = 0;
      lane_low += weight[i] & 0xffffu, lane_high += weight[i] >> 16;
    }
  }
  const uint32_t through_low = warp_inclusive_scan(lane_low, lane), through_high = warp_inclusive_scan(lane_high, lane);
  const unsigned long long total = joined(__shfl_sync(kAll, through_low, 31), __shfl_sync(kAll, through_high, 31));
  const unsigned long long target = scaled(shared.word, total);
  unsigned long long before = joined(through_low - lane_low, through_high - lane_high);
  uint32_t code = 0;
#pragma unroll
  for (int i = 0; i < SLOTS; ++i) {
    if (before <= target && target < before + weight[i]) code = id[i];
    before += weight[i];
  }
  // One lane has it; the others hold 0.
  return static_cast<int>(__reduce_or_sync(kAll, code));
}

// The k-th highest key by radix selection (the block holds more than k candidates).
template <int THREADS, int EPT, typename Sync, typename Shared>
__device__ __forceinline__ uint32_t kth_key(Shared& shared, const uint32_t (&key)[EPT], int top_k, int tid) {
  uint32_t prefix = 0;
  uint32_t wanted = static_cast<uint32_t>(top_k);
#pragma unroll 1
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = tid; i < 256; i += THREADS) shared.bins[i] = 0;
    Sync::sync();
#pragma unroll
    for (int e = 0; e < EPT; ++e) {
      const bool inside = shift == 24 || (key[e] >> (shift + 8)) == (prefix >> (shift + 8));
      if (key[e] != 0 && inside) atomicAdd(&shared.bins[(key[e] >> shift) & 255u], 1u);
    }
    Sync::sync();
    if (tid < 32) {
      // Lane 0 holds the highest digits, so that the scan runs from the top.
      uint32_t count[8], sum = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) count[i] = shared.bins[255 - (tid * 8 + i)], sum += count[i];
      uint32_t above = warp_inclusive_scan(sum, tid) - sum;
      if (above < wanted && above + sum >= wanted) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (above < wanted && above + count[i] >= wanted) {
            shared.digit = 255u - static_cast<uint32_t>(tid * 8 + i);
            shared.below = wanted - above;
            break;
          }
          above += count[i];
        }
      }
    }
    Sync::sync();
    prefix |= shared.digit << shift;
    wanted = shared.below;
  }
  return prefix;
}

// The key of the code that crosses `bound`, and the weight above it, by radix selection over weights.
template <int THREADS, int EPT, typename Sync, typename Shared>
__device__ __forceinline__ uint32_t crossing_key(Shared& shared, const uint32_t (&key)[EPT],
                                                 const uint32_t (&weight)[EPT], unsigned long long bound,
                                                 unsigned long long* weight_before, int tid) {
  uint32_t prefix = 0;
  unsigned long long before = 0;
#pragma unroll 1
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = tid; i < 256; i += THREADS) shared.weight_bins[i] = 0;
    Sync::sync();
#pragma unroll
    for (int e = 0; e < EPT; ++e) {
      const bool inside = shift == 24 || (key[e] >> (shift + 8)) == (prefix >> (shift + 8));
      if (weight[e] != 0 && inside)
        atomicAdd(&shared.weight_bins[(key[e] >> shift) & 255u], static_cast<unsigned long long>(weight[e]));
    }
    Sync::sync();
    if (tid < 32) {
      unsigned long long mass[8], sum = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) mass[i] = shared.weight_bins[255 - (tid * 8 + i)], sum += mass[i];
      unsigned long long above = before + warp_inclusive_scan(sum, tid) - sum;
      if (above <= bound && bound < above + sum) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (above <= bound && bound < above + mass[i]) {
            shared.digit = 255u - static_cast<uint32_t>(tid * 8 + i);
            shared.weight_before = above;
            break;
          }
          above += mass[i];
        }
      }
    }
    Sync::sync();
    prefix |= shared.digit << shift;
    before = shared.weight_before;
  }
  *weight_before = before;
  return prefix;
}

// Draws one code. `score`: EPT raw logits per thread in fp32 (ids >= vocab are ignored); `seen`: bit e says that the
// request has generated the thread's id e in this codebook; a thread of the first warp has set `shared.word`. The first
// warp's threads return the result; a barrier is needed before `shared` is used again.
template <int THREADS, int EPT, typename Sync>
__device__ __forceinline__ SampleResult sample_row(SampleShared<THREADS>& shared, float (&score)[EPT], int vocab,
                                                   const SampleParams& params, uint32_t seen, int tid) {
  constexpr int kWarps = THREADS / 32;
  constexpr uint32_t kAll = 0xffffffffu;
  const int lane = tid & 31, warp = tid >> 5;
  const float infinity = __int_as_float(0x7f800000);
  const bool greedy = !(params.temperature >= 1e-5f);
  const bool penalised = params.repetition_penalty > 0.0f && params.repetition_penalty != 1.0f;
  const int top_k = params.top_k;
  const bool top_k_on = top_k > 0 && top_k < vocab;
  const bool top_p_on = params.top_p > 0.0f && params.top_p < 1.0f;

#pragma unroll
  for (int first = 0; first < kSampleBins; first += THREADS)
    if (first + tid < kSampleBins) shared.bins[first + tid] = 0;

  // A factor or divisor of 1 changes nothing.
  const Divisor penalty(penalised ? params.repetition_penalty : 1.0f);
  const Divisor temperature(greedy ? 1.0f : params.temperature);
  bool plain = temperature.plain() && penalty.plain();
#pragma unroll
  for (int e = 0; e < EPT; ++e) {
    if (tid * EPT + e >= vocab) score[e] = -infinity;
    plain &= plain_score(score[e]);
  }
  uint32_t key[EPT];
  float value[EPT];
  bool nonfinite = false;
  if (plain) {
#pragma unroll
    for (int e = 0; e < EPT; ++e) {
      const float s = score[e];
      const float changed = s < 0.0f ? __fmul_rn(s, penalty.value) : penalty.divide(s);
      value[e] = temperature.divide((seen >> e) & 1u ? changed : s);
      key[e] = s > -infinity ? order_key(value[e]) : 0u;
    }
  } else {
#pragma unroll
    for (int e = 0; e < EPT; ++e) {
      float& s = score[e];
      if ((seen >> e) & 1u) s = s < 0.0f ? __fmul_rn(s, penalty.value) : __fdiv_rn(s, penalty.value);
      nonfinite |= !(s < infinity);
      // An infinite score stays one whatever the temperature: inf / inf would be NaN.
      value[e] = s == infinity ? s : __fdiv_rn(s, temperature.value);
      key[e] = s > -infinity ? order_key(value[e]) : 0u;
    }
  }
  // A lowest key of 0, which no candidate has, says that a score was not finite.
  uint32_t max_key = 0, min_key = nonfinite ? 0 : kAll;
#pragma unroll
  for (int e = 0; e < EPT; ++e) {
    max_key = max(max_key, key[e]);
    min_key = min(min_key, key[e] ? key[e] : kAll);
  }
  max_key = __reduce_max_sync(kAll, max_key);
  min_key = __reduce_min_sync(kAll, min_key);
  if (lane == 0) shared.warp_key[warp] = max_key, shared.warp_low[warp] = min_key;
  Sync::sync();
  if constexpr (kWarps % 4 == 0) {
#pragma unroll
    for (int w = 0; w < kWarps; w += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(&shared.warp_key[w]);
      max_key = max(max_key, max(max(four.x, four.y), max(four.z, four.w)));
      const uint4 low = *reinterpret_cast<const uint4*>(&shared.warp_low[w]);
      min_key = min(min_key, min(min(low.x, low.y), min(low.z, low.w)));
    }
  }
  nonfinite = min_key == 0;
  SampleResult result;
  result.status = nonfinite ? kStatusNonfinite : 0;
  if (nonfinite) {
    bool infinite = false;
#pragma unroll
    for (int e = 0; e < EPT; ++e) infinite |= score[e] == infinity;
    if (Sync::any(infinite)) {
      // With +inf present only the +inf codes stay: a finite score that overflowed in the division must go.
#pragma unroll
      for (int e = 0; e < EPT; ++e)
        if (score[e] != infinity) key[e] = 0;
    }
  }
  if (max_key == 0) {
    result.status |= kStatusEmpty;
    result.code = 0;
    return result;
  }

  if (greedy) {
    uint32_t first = kAll;
#pragma unroll
    for (int e = EPT - 1; e >= 0; --e)
      if (key[e] == max_key) first = static_cast<uint32_t>(tid * EPT + e);
    first = __reduce_min_sync(kAll, first);
    Sync::sync();
    if (lane == 0) shared.warp_key[warp] = first;
    Sync::sync();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) first = min(first, shared.warp_key[w]);
    result.code = static_cast<int>(first);
    return result;
  }

  const float max_value = key_value(max_key);
  // The product with 2^32 is exact; what is rounded, to even, is its fraction.
  const uint32_t top_p_fixed = __float2uint_rn(__fmul_rn(params.top_p, 0x1p32f));
  const auto below_max = [&](int e) { return key[e] == max_key ? 0.0f : __fsub_rn(max_value, value[e]); };

  bool select_k = false;
  if (top_k_on) {
    // Bins of equal width down from the maximum. Any monotone map would do: what shares the edge bin with the k-th code
    // is listed too, and the list is exact. Codes at kWeightless below the maximum or more weigh nothing and are left
    // out.
    constexpr float kWeightless = 23.0f;
    const float range = nonfinite ? kWeightless : min(kWeightless, __fsub_rn(max_value, key_value(min_key)));
    const float bins_per_unit = range > 0.0f ? __fdividef(kSampleBins, range) : 0.0f;
    int bin[EPT];
#pragma unroll
    for (int e = 0; e < EPT; ++e) {
      const float below = below_max(e);
      const int inside = min(kSampleBins - 1, static_cast<int>(below * bins_per_unit));
      // One more bin, never read, for what is left out.
      bin[e] = key[e] && below < kWeightless ? inside : kSampleBins;
      atomicAdd(&shared.bins[bin[e]], 1u);
    }
    Sync::sync();
    // Every warp finds the bin of the k-th code for itself: no barrier is needed to share it. If there are fewer codes,
    // the last bin.
    const uint4 count = *reinterpret_cast<const uint4*>(&shared.bins[lane * 4]);
    const uint32_t to_x = count.x, to_y = to_x + count.y, to_z = to_y + count.z, to_w = to_z + count.w;
    const uint32_t inclusive = warp_inclusive_scan(to_w, lane), before = inclusive - to_w;
    const uint32_t wanted = static_cast<uint32_t>(top_k), missing = wanted - before;
    const uint32_t reached = __ballot_sync(kAll, inclusive >= wanted);
    const uint32_t step = missing <= to_x ? 0 : missing <= to_y ? 1 : missing <= to_z ? 2 : 3;
    const uint32_t through = before + (step == 0 ? to_x : step == 1 ? to_y : step == 2 ? to_z : to_w);
    const uint32_t edge = __shfl_sync(kAll, through << 8 | (lane * 4 + step), reached ? __ffs(reached) - 1 : 31);
    const int edge_bin = static_cast<int>(edge & 255u), listed = static_cast<int>(edge >> 8);
    if (listed <= kListCapacity) {
      uint32_t mine = 0, at = 0;
#pragma unroll
      for (int e = 0; e < EPT; ++e) mine += bin[e] <= edge_bin;
#pragma unroll
      for (int bit = 1; bit <= EPT; bit <<= 1)
        at += bit * __popc(__ballot_sync(kAll, (mine & bit) != 0) & ((1u << lane) - 1u));
      if (lane == 31) shared.listed[warp] = static_cast<uint8_t>(at + mine);
#pragma unroll
      for (int e = 0; e < EPT; ++e) {
        if (bin[e] <= edge_bin)
          shared.list[warp][at++] =
              (static_cast<unsigned long long>(key[e]) << 32) | static_cast<uint32_t>(tid * EPT + e);
      }
      Sync::sync();
      if (kWarps == 1 || listed <= 32)
        result.code = draw_from_list<1, Sync>(shared, listed, max_value, top_k, top_p_on, top_p_fixed, lane, warp);
      else
        result.code = draw_from_list<(kWarps > 1 ? 2 : 1), Sync>(shared, listed, max_value, top_k, top_p_on,
                                                                 top_p_fixed, lane, warp);
      return result;
    }
    select_k = reached != 0;
  }

  uint32_t weight[EPT];
#pragma unroll
  for (int e = 0; e < EPT; ++e) weight[e] = key[e] ? integer_weight(-below_max(e)) : 0u;
  if (select_k) {
    Sync::sync();
    const uint32_t threshold = kth_key<THREADS, EPT, Sync>(shared, key, top_k, tid);
#pragma unroll
    for (int e = 0; e < EPT; ++e)
      if (key[e] < threshold) key[e] = 0, weight[e] = 0;
  }
  Sync::sync();
  unsigned long long mine = 0, total;
#pragma unroll
  for (int e = 0; e < EPT; ++e) mine += weight[e];
  unsigned long long exclusive = block_exclusive_scan<THREADS, Sync>(mine, shared.warp_sum, &total, tid);
  if (top_p_on) {
    const unsigned long long bound = scaled(top_p_fixed, total);
    unsigned long long before;
    const uint32_t edge = crossing_key<THREADS, EPT, Sync>(shared, key, weight, bound, &before, tid);
    uint32_t equal = 0;
#pragma unroll
    for (int e = 0; e < EPT; ++e) {
      equal += key[e] == edge;
      if (key[e] == edge) shared.edge_weight = weight[e];
    }
    unsigned long long all_equal;
    unsigned long long rank = block_exclusive_scan<THREADS, Sync>(equal, shared.warp_sum, &all_equal, tid);
    // Codes of equal score have equal weights: of the edge group the lowest ids stay, as many as start within the
    // bound.
    const unsigned long long edge_weight = shared.edge_weight;
    const unsigned long long kept = (bound - before) / edge_weight + 1;
    mine = 0;
#pragma unroll
    for (int e = 0; e < EPT; ++e) {
      if (key[e] < edge || (key[e] == edge && rank++ >= kept)) weight[e] = 0;
      mine += weight[e];
    }
    exclusive = block_exclusive_scan<THREADS, Sync>(mine, shared.warp_sum, &total, tid);
  }
  const unsigned long long target = scaled(shared.word, total);
  if (exclusive <= target && target < exclusive + mine) {
#pragma unroll
    for (int e = 0; e < EPT; ++e) {
      if (exclusive <= target && target < exclusive + weight[e]) shared.code = tid * EPT + e;
      exclusive += weight[e];
    }
  }
  Sync::sync();
  result.code = shared.code;
  return result;
}

}  // namespace moss
