// One draw from one row of logits by the threads of one block: exact integer weights, so that the code is a function of
// the logits and the parameters alone. Shared by sample_codebook and local_frame_decode.
//
// Thread t holds the scores s of ids t*EPT .. t*EPT+EPT-1; z = s / temperature. Two ways lead to the same code:
//   list   a histogram of the upper half of the scores bounds the top_k set; when that holds at most 64 codes (the
//   usual
//          case), one warp finishes the draw with sums over all pairs of them in place of sorting;
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
  uint32_t word;             // the random word of this draw
};

struct SampleResult {
  int code;
  int status;
};

constexpr int kSampleBins = 256;
constexpr int kListCapacity = 64;

// Sync::sync() is a barrier of the THREADS threads; Sync::any(p) is one that also tells whether p held in any thread.
template <int THREADS>
struct SampleShared {
  static constexpr int kWarps = THREADS / 32;
  union {
    alignas(16) uint32_t bins[kSampleBins];
    unsigned long long weight_bins[256];
  };
  float list_score[kListCapacity];
  uint32_t list_id[kListCapacity];
  unsigned long long warp_sum[kWarps];
  alignas(16) uint32_t warp_key[kWarps];
  alignas(16) uint32_t warp_low[kWarps];
  uint32_t list_count;
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

// z of a score; an infinite one stays so whatever the temperature (inf / inf would be NaN).
__device__ __forceinline__ float divided(float score, float temperature) {
  return isinf(score) ? score : __fdiv_rn(score, temperature);
}

// round_half_even(2^30 * exp(z - highest)) by a fixed polynomial, each operation rounded on its own; 0 below 2^-32.
__device__ __forceinline__ uint32_t integer_weight(float z, float highest) {
  const float u = z == highest ? 0.0f : __fsub_rn(z, highest);
  const float t = __fmul_rn(u, __uint_as_float(0x3fb8aa3bu));
  if (!(t >= -32.0f)) return 0u;
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
  return __float2uint_rn(__fmul_rn(p, scale));
}

// (factor * total) >> 32, exact for totals below 2^42.
__device__ __forceinline__ unsigned long long scaled(uint32_t factor, unsigned long long total) {
  const unsigned long long low = static_cast<unsigned long long>(factor) * static_cast<uint32_t>(total);
  return static_cast<unsigned long long>(factor) * static_cast<uint32_t>(total >> 32) + (low >> 32);
}

// Sum over a warp of 32-bit values whose sum may need 38 bits.
__device__ __forceinline__ unsigned long long warp_sum_wide(uint32_t value) {
  const uint32_t low = __reduce_add_sync(0xffffffffu, value & 0xffffu);
  const uint32_t high = __reduce_add_sync(0xffffffffu, value >> 16);
  return low + (static_cast<unsigned long long>(high) << 16);
}

template <typename T>
__device__ __forceinline__ T warp_inclusive_scan(T value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const T other = __shfl_up_sync(0xffffffffu, value, step);
    if (lane >= step) value += other;
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

// Finishes the draw on the `count` codes of the list, a superset of the top_k set; one warp.
template <int SLOTS, typename Shared>
__device__ __forceinline__ int draw_from_list(const Shared& shared, int count, const SampleParams& params,
                                              float highest, bool top_p_on, uint32_t top_p_fixed, int lane) {
  uint32_t key[SLOTS], id[SLOTS], weight[SLOTS], above[SLOTS] = {};
  unsigned long long before[SLOTS] = {};
#pragma unroll
  for (int i = 0; i < SLOTS; ++i) {
    const int at = lane + 32 * i;
    key[i] = 0, id[i] = 0, weight[i] = 0;
    if (at < count) {
      const float z = divided(shared.list_score[at], params.temperature);
      key[i] = order_key(z);
      id[i] = shared.list_id[at];
      weight[i] = integer_weight(z, highest);
    }
  }
  // The number of codes above each one, and the weight before it in (z descending, id ascending). Codes that top_k
  // drops come after all that it keeps, so they need not be gone yet.
#pragma unroll 8
  for (int j = 0; j < count; ++j) {
    const bool second = SLOTS > 1 && j >= 32;
    const uint32_t other_key = __shfl_sync(0xffffffffu, second ? key[SLOTS - 1] : key[0], j & 31);
    const uint32_t other_id = __shfl_sync(0xffffffffu, second ? id[SLOTS - 1] : id[0], j & 31);
    const uint32_t other_weight = __shfl_sync(0xffffffffu, second ? weight[SLOTS - 1] : weight[0], j & 31);
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
      above[i] += other_key > key[i];
      if (other_key > key[i] || (other_key == key[i] && other_id < id[i])) before[i] += other_weight;
    }
  }
  unsigned long long total = 0;
#pragma unroll
  for (int i = 0; i < SLOTS; ++i) {
    // A code stays when fewer than k codes are strictly above it: ties at the edge all stay.
    if (static_cast<int>(above[i]) >= params.top_k) weight[i] = 0;
    total += warp_sum_wide(weight[i]);
  }
  if (top_p_on) {
    const unsigned long long bound = scaled(top_p_fixed, total);
    total = 0;
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
      if (before[i] > bound) weight[i] = 0;
      total += warp_sum_wide(weight[i]);
    }
  }
  const unsigned long long target = scaled(params.word, total);
  unsigned long long through[SLOTS] = {};
#pragma unroll 8
  for (int j = 0; j < count; ++j) {
    const bool second = SLOTS > 1 && j >= 32;
    const uint32_t other_id = __shfl_sync(0xffffffffu, second ? id[SLOTS - 1] : id[0], j & 31);
    const uint32_t other_weight = __shfl_sync(0xffffffffu, second ? weight[SLOTS - 1] : weight[0], j & 31);
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) through[i] += other_id <= id[i] ? other_weight : 0u;
  }
  uint32_t code = 0;
#pragma unroll
  for (int i = 0; i < SLOTS; ++i) {
    if (weight[i] != 0 && through[i] > target && through[i] - weight[i] <= target) code = id[i];
  }
  // One lane has it; the others hold 0.
  return static_cast<int>(__reduce_or_sync(0xffffffffu, code));
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
// request has generated the thread's id e in this codebook. All threads return the same result; a barrier is needed
// before `shared` is used again.
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

  for (int i = tid; i < kSampleBins; i += THREADS) shared.bins[i] = 0;
  if (tid == 0) shared.list_count = 0;

  uint32_t infinite = 0, candidate = 0;
  float high = -infinity, low = infinity;
  bool nonfinite = false;
#pragma unroll
  for (int e = 0; e < EPT; ++e) {
    if (tid * EPT + e >= vocab) continue;
    float s = score[e];
    if (penalised && ((seen >> e) & 1u))
      s = s < 0.0f ? __fmul_rn(s, params.repetition_penalty) : __fdiv_rn(s, params.repetition_penalty);
    score[e] = s;
    nonfinite |= !(s < infinity);
    if (s > -infinity) {
      candidate |= 1u << e;
      infinite |= static_cast<uint32_t>(s == infinity) << e;
      high = fmaxf(high, s);
      low = fminf(low, s);
    }
  }
  uint32_t max_key = __reduce_max_sync(kAll, candidate ? order_key(high) : 0u);
  uint32_t min_key = __reduce_min_sync(kAll, candidate ? order_key(low) : kAll);
  if (lane == 0) shared.warp_key[warp] = max_key, shared.warp_low[warp] = min_key;
  nonfinite = Sync::any(nonfinite);
  if constexpr (kWarps % 4 == 0) {
#pragma unroll
    for (int w = 0; w < kWarps; w += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(&shared.warp_key[w]);
      max_key = max(max_key, max(max(four.x, four.y), max(four.z, four.w)));
      const uint4 least = *reinterpret_cast<const uint4*>(&shared.warp_low[w]);
      min_key = min(min_key, min(min(least.x, least.y), min(least.z, least.w)));
    }
  }
  SampleResult result;
  result.status = nonfinite ? kStatusNonfinite : 0;
  // With +inf present only the +inf codes stay: a finite score that overflows in the division must not.
  if (nonfinite && Sync::any(infinite != 0)) candidate = infinite;
  if (max_key == 0) {
    result.status |= kStatusEmpty;
    result.code = 0;
    return result;
  }

  const float top = key_value(max_key), bottom = key_value(min_key);
  if (greedy) {
    uint32_t first = kAll;
#pragma unroll
    for (int e = EPT - 1; e >= 0; --e)
      if (((candidate >> e) & 1u) && score[e] == top) first = static_cast<uint32_t>(tid * EPT + e);
    first = __reduce_min_sync(kAll, first);
    Sync::sync();
    if (lane == 0) shared.warp_key[warp] = first;
    Sync::sync();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) first = min(first, shared.warp_key[w]);
    result.code = static_cast<int>(first);
    return result;
  }

  const float highest = divided(top, params.temperature), lowest = divided(bottom, params.temperature);
  // A product by a power of two is exact, so that only the conversion rounds; below 2^32 for top_p < 1.
  const uint32_t top_p_fixed = __float2uint_rn(__fmul_rn(params.top_p, 4294967296.0f));

  // The upper half of the range of scores is cut into bins of equal width. Where they are wide against the rounding of
  // z, a code whose z equals that of the k-th one lies in its bin or in the next, so that both are listed; the list is
  // exact.
  const float range = __fsub_rn(highest, lowest);
  const float scale = __fdividef(2 * kSampleBins, __fsub_rn(top, bottom));
  if (top_k_on && scale > 0.0f && range < infinity && range > 0x1p-100f &&
      range > 0x1p-12f * fmaxf(fabsf(highest), fabsf(lowest))) {
    float distance[EPT];
#pragma unroll
    for (int e = 0; e < EPT; ++e) {
      distance[e] = (candidate >> e) & 1u ? __fmul_rn(__fsub_rn(top, score[e]), scale) : infinity;
      if (distance[e] < kSampleBins) atomicAdd(&shared.bins[static_cast<int>(distance[e])], 1u);
    }
    Sync::sync();
    // Every warp finds the bin of the k-th code for itself: no barrier is needed to share it.
    constexpr int kBinsPerLane = kSampleBins / 32;
    uint32_t through[kBinsPerLane], sum = 0;
#pragma unroll
    for (int i = 0; i < kBinsPerLane; i += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(&shared.bins[lane * kBinsPerLane + i]);
      through[i] = sum + four.x, through[i + 1] = through[i] + four.y, through[i + 2] = through[i + 1] + four.z;
      sum = through[i + 3] = through[i + 2] + four.w;
    }
    const uint32_t next_count = __shfl_down_sync(kAll, through[0], 1);
    const uint32_t inclusive = warp_inclusive_scan(sum, lane), before = inclusive - sum;
    const uint32_t wanted = static_cast<uint32_t>(top_k);
    const uint32_t reached = __ballot_sync(kAll, inclusive >= wanted);
    int step = 0;
    uint32_t listed = through[1];
#pragma unroll
    for (int i = 1; i < kBinsPerLane; ++i) {
      if (before + through[i - 1] < wanted)
        step = i, listed = i + 1 < kBinsPerLane ? through[i + 1 < kBinsPerLane ? i + 1 : i] : sum + next_count;
    }
    const int owner = reached ? __ffs(reached) - 1 : 31;
    const int edge = __shfl_sync(kAll, lane * kBinsPerLane + step + 1, owner);
    listed = __shfl_sync(kAll, before + listed, owner);
    if (reached && edge < kSampleBins && listed <= kListCapacity) {
      const float limit = static_cast<float>(edge + 1);
      uint32_t chosen[EPT], mine = 0;
#pragma unroll
      for (int e = 0; e < EPT; ++e) {
        chosen[e] = __ballot_sync(kAll, distance[e] < limit);
        mine += __popc(chosen[e]);
      }
      if (mine) {
        uint32_t at = 0;
        if (lane == 0) at = atomicAdd(&shared.list_count, mine);
        at = __shfl_sync(kAll, at, 0);
#pragma unroll
        for (int e = 0; e < EPT; ++e) {
          if (distance[e] < limit) {
            const uint32_t place = at + __popc(chosen[e] & ((1u << lane) - 1u));
            shared.list_score[place] = score[e];
            shared.list_id[place] = static_cast<uint32_t>(tid * EPT + e);
          }
          at += __popc(chosen[e]);
        }
      }
      Sync::sync();
      if (warp == 0) {
        const int length = static_cast<int>(listed);
        const int code = length <= 32 ? draw_from_list<1>(shared, length, params, highest, top_p_on, top_p_fixed, lane)
                                      : draw_from_list<2>(shared, length, params, highest, top_p_on, top_p_fixed, lane);
        if (lane == 0) shared.code = code;
      }
      Sync::sync();
      result.code = shared.code;
      return result;
    }
  }

  uint32_t key[EPT], weight[EPT];
#pragma unroll
  for (int e = 0; e < EPT; ++e) {
    key[e] = 0, weight[e] = 0;
    if ((candidate >> e) & 1u) {
      const float z = divided(score[e], params.temperature);
      key[e] = order_key(z);
      weight[e] = integer_weight(z, highest);
    }
  }
  if (top_k_on) {
    // kth_key needs more candidates than k.
    unsigned long long candidates;
    Sync::sync();
    block_exclusive_scan<THREADS, Sync>(__popc(candidate), shared.warp_sum, &candidates, tid);
    if (candidates > static_cast<unsigned long long>(top_k)) {
      const uint32_t threshold = kth_key<THREADS, EPT, Sync>(shared, key, top_k, tid);
#pragma unroll
      for (int e = 0; e < EPT; ++e)
        if (key[e] < threshold) key[e] = 0, weight[e] = 0;
    }
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
  const unsigned long long target = scaled(params.word, total);
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
