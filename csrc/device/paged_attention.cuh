// One block of paged_attention: the splits of one row and key head that are its part.
//
// A split is 64 tokens, or 64 doubled until 16 of them hold the row. Its tiles of 16 tokens go round the four warps,
// through shared memory to the tensor cores: tokens are rows there, the queries of the group columns. Warps, the new
// token and splits are merged in one order, whichever block has computed them.
//
// Who includes this provides mma, exp2_approx, pack_bf16 and unpack_bf16 as in mma.cuh, and
//   void copies_begin(uint64_t (&barriers)[2])   one lane, before any copy that completes on them
//   void copy_start(void* shared, const void* p, int bytes, uint64_t* barrier)   one lane, once all have read
//   void copy_wait(uint64_t* barrier, uint32_t parity)   every lane, for copy number 2n + parity of the barrier
//   T load_kept(const T* p)   past L1; stays in L2 from layer to layer, though more than fits in there passes
//   void launch_dependents()   the next kernel may start once all threads of this one have called it or ended
//   uint32_t transpose(uint32_t x)    of an 8x8 matrix of bf16; thread 4g + t has columns 2t and 2t + 1 of row g
//   int arrive(int32_t* counter)      adds 1 and returns the value before; releases and acquires, for the whole GPU
#pragma once
#include <cstdint>

#include "moss_kernels.h"

namespace moss::paged {

using Bf16Bits = uint16_t;

constexpr int kHeadDim = 128, kHalf = kHeadDim / 2;
constexpr int kTile = 16, kWarps = 4, kThreads = 32 * kWarps;
constexpr int kMinSplit = kTile * kWarps, kMinSplitLog2 = 6, kMaxSplits = 16;
static_assert(1 << kMinSplitLog2 == kMinSplit);
constexpr int kMaxGroup = kWarps;  // a warp for each query of the new token, also where partial results are merged
// Start of a running maximum: finite, so that a difference of two is never NaN.
constexpr float kLowest = -3.0e38f;
constexpr uint32_t kAllLanes = 0xffffffffu;

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    x += __shfl_xor_sync(kAllLanes, x, distance);
  return x;
}

// Hides that x is the same in every round of a loop: what follows from it takes no registers between rounds.
__device__ __forceinline__ unsigned recomputed(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

// What a lane holds of a head: the dimensions 2 lane and 2 lane + 1, and those 64 further that are rotated with them.
struct HeadPart {
  uint32_t low, high;

  static __device__ __forceinline__ HeadPart load(const void* head, int lane) {
    const uint32_t* pairs = static_cast<const uint32_t*>(head) + lane;
    return {__ldcg(pairs), __ldcg(pairs + kHalf / 2)};
  }
  static __device__ __forceinline__ HeadPart load_kept(const void* head, int lane) {
    const uint32_t* pairs = static_cast<const uint32_t*>(head) + lane;
    return {paged::load_kept(pairs), paged::load_kept(pairs + kHalf / 2)};
  }
  __device__ __forceinline__ void store(void* head, int lane) const {
    uint32_t* pairs = static_cast<uint32_t*>(head) + lane;
    pairs[0] = low;
    pairs[kHalf / 2] = high;
  }
  __device__ __forceinline__ float dot(const HeadPart& other) const {
    const float2 a = unpack_bf16(low), b = unpack_bf16(high), c = unpack_bf16(other.low), d = unpack_bf16(other.high);
    return warp_sum(fmaf(a.x, c.x, fmaf(a.y, c.y, fmaf(b.x, d.x, b.y * d.y))));
  }
};

// Root mean square norm, rounded where the eager norm rounds, and half-split rotation, rounded once.
__device__ __forceinline__ HeadPart norm_and_rotate(const HeadPart& x, const HeadPart& norm, const HeadPart& angles,
                                                    float eps) {
  const float scale = rsqrtf(x.dot(x) / kHeadDim + eps);
  const auto normed = [scale](uint32_t pair, uint32_t weights) {
    const float2 a = unpack_bf16(pair), w = unpack_bf16(weights);
    const float2 b = unpack_bf16(pack_bf16(a.x * scale, a.y * scale));
    return unpack_bf16(pack_bf16(b.x * w.x, b.y * w.y));
  };
  const float2 low = normed(x.low, norm.low), high = normed(x.high, norm.high);
  const float2 c = unpack_bf16(angles.low), s = unpack_bf16(angles.high);
  return {pack_bf16(__fsub_rn(__fmul_rn(low.x, c.x), __fmul_rn(high.x, s.x)),
                    __fsub_rn(__fmul_rn(low.y, c.y), __fmul_rn(high.y, s.y))),
          pack_bf16(__fadd_rn(__fmul_rn(high.x, c.x), __fmul_rn(low.x, s.x)),
                    __fadd_rn(__fmul_rn(high.y, c.y), __fmul_rn(low.y, s.y)))};
}

// The tiles of a warp, step by step: of every 2^parts_log2-th split from `part` on.
struct Walk {
  int part, parts_log2, warp;
  int stored = 0, splits = 0, doublings = 0;

  __device__ __forceinline__ void set_length(int tokens) {
    stored = tokens;
    while (static_cast<unsigned>(tokens) > static_cast<unsigned>(kMaxSplits * kMinSplit) << doublings)
      ++doublings;
    const unsigned split = static_cast<unsigned>(kMinSplit) << doublings;
    splits = max(1, static_cast<int>((tokens + split - 1) >> (kMinSplitLog2 + doublings)));
  }
  __device__ __forceinline__ int parts() const { return min(splits, 1 << parts_log2); }
  __device__ __forceinline__ int steps() const {
    return ((splits - part + (1 << parts_log2) - 1) >> parts_log2) << doublings;
  }
  __device__ __forceinline__ int split(int step) const { return part + (step >> doublings << parts_log2); }
  __device__ __forceinline__ bool ends_split(int step) const { return ((step + 1) & ((1 << doublings) - 1)) == 0; }
  __device__ __forceinline__ bool has_last_split() const {
    return ((splits - 1 - part) & ((1 << parts_log2) - 1)) == 0;
  }
  // First token of the tile. Grows with `step`, also beyond the last one.
  __device__ __forceinline__ int token(int step) const {
    const int tile = (step & ((1 << doublings) - 1)) * kWarps + warp;
    return (split(step) << doublings) * kMinSplit + tile * kTile;
  }
};

// The pages of one row and head.
struct Pages {
  const Bf16Bits *keys, *values;
  const int32_t* table;
  int count, heads, head, size, size_log2;

  static __device__ __forceinline__ Pages of(const PagedAttentionParams& params, int64_t row, int head) {
    return {static_cast<const Bf16Bits*>(params.key_pages),
            static_cast<const Bf16Bits*>(params.value_pages),
            params.page_table + row * params.table_pages,
            params.table_pages,
            params.kv_heads,
            head,
            params.page_size,
            31 - __clz(params.page_size)};
  }
  // Page of a token; anything beyond the table.
  __device__ __forceinline__ int page(int token) const {
    const int index = token >> size_log2;
    return index < count ? load_kept(table + index) : 0;
  }
  __device__ __forceinline__ int64_t place(int page, int token) const {
    return (((static_cast<int64_t>(page) * heads + head) << size_log2) + (token & (size - 1))) * kHeadDim;
  }
};

// Word by word, which takes no branch.
__device__ __forceinline__ uint4 select(bool condition, const uint4& yes, const uint4& no) {
  return {condition ? yes.x : no.x, condition ? yes.y : no.y, condition ? yes.z : no.z, condition ? yes.w : no.w};
}

// The tile that a warp waits for or reads. Copied by the copy engine: loads into registers, and asynchronous copies by
// threads, take up L1 while they are on their way, and a kernel that starts beside another one finds little of it.
struct alignas(128) WarpTile {
  uint4 keys[kTile][kHeadDim / 8], values[kTile][kHeadDim / 8];
};

// A tile as thread 4 * group + quarter of a warp reads it.
struct Tile {
  WarpTile& shared;
  uint64_t* barriers;  // of its keys, then of its values

  __device__ __forceinline__ void copy_keys(const Bf16Bits* tile, int lane) const {
    if (lane == 0) copy_start(shared.keys, tile, sizeof(shared.keys), barriers);
  }
  __device__ __forceinline__ void copy_values(const Bf16Bits* tile, int lane) const {
    if (lane == 0) copy_start(shared.values, tile, sizeof(shared.values), barriers + 1);
  }
  // [i][j]: token group + 8i, dimensions 32 (j ^ group % 2) + 8 quarter .. + 7: no two of eight threads meet in a bank.
  __device__ __forceinline__ void load_keys(uint4 (&key)[2][4], int group, int quarter) const {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      key[i / 4][i % 4] = shared.keys[group + i / 4 * 8][(i % 4 ^ group % 2) * 4 + quarter];
  }
  // [4i + 2k + h]: token 2 quarter + k + 8i, dimensions 16 group + 8h .. + 7; 0 from number `tokens` on. A weight of 0
  // is not enough: what lies behind the last token may be NaN, or the new token, half stored. Odd quarters take h = 1
  // first: two threads of eight meet in a bank then, not four.
  __device__ __forceinline__ void load_values(uint4 (&value)[8], int tokens, int group, int quarter) const {
    const int odd = quarter % 2;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const uint4* token = shared.values[2 * quarter + i / 2 % 2 + i / 4 * 8] + 2 * group;
      const uint4 first = token[odd], second = token[1 - odd];
      value[i] = select(odd, second, first);
      value[i + 1] = select(odd, first, second);
    }
    if (tokens >= kTile) return;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (2 * quarter + i / 2 % 2 + i / 4 * 8 >= tokens) value[i] = {};
  }
};

// Attention over some tokens: the values weighted by 2^(score - highest), and the sum of the weights.
struct Merged {
  float highest = kLowest, total = 0.0f;
  float4 value = {};

  __device__ __forceinline__ void add(float other_highest, float other_total, const float4& other) {
    const float now = fmaxf(highest, other_highest);
    const float kept = exp2_approx(highest - now), added = exp2_approx(other_highest - now);
    highest = now;
    total = fmaf(other_total, added, __fmul_rn(total, kept));
    value.x = fmaf(other.x, added, __fmul_rn(value.x, kept));
    value.y = fmaf(other.y, added, __fmul_rn(value.y, kept));
    value.z = fmaf(other.z, added, __fmul_rn(value.z, kept));
    value.w = fmaf(other.w, added, __fmul_rn(value.w, kept));
  }
};

struct Shared {
  uint4 queries[kMaxGroup][kHeadDim / 8 + 4];  // 0 where the group is smaller; padded against bank conflicts
  uint2 new_value[kWarps][32];                 // each thread's own: four dimensions
  float new_score[kMaxGroup];
  // Of each warp, for two splits in turn: the values of each query, then the highest score and the total weight.
  float4 part[2][kWarps][kMaxGroup][kHeadDim / 4 + 1];
  Merged result[kMaxGroup][32];  // each thread's own
  WarpTile tiles[kWarps];
  uint64_t barriers[kWarps][2];
  int pages[kWarps][32];  // of the steps of each warp, 32 at a time
  int arrived;
};

// Attention of a warp over its tiles of a split: queries 2 quarter and 2 quarter + 1, modulo 4, of this thread.
struct Softmax {
  float highest[2] = {kLowest, kLowest};
  float total[2] = {};        // of this thread's tokens alone
  float value[2][4][4] = {};  // [h][j][2r + i]: dimension 16 group + 8h + 2j + r, query 2 quarter + i; noise beyond 3

  // Scores of the thread's token (see own_token). A product takes all tokens and 16 of 32 dimensions. Tokens of odd
  // groups have their blocks of 32 in another order, so the queries are there twice: in columns 0 .. 3 for those of
  // even groups, in columns 4 .. 7 for the others.
  __device__ __forceinline__ static void multiply(float (&score)[2], const Tile& tile, const Shared& shared, int lane) {
    const int group = lane / 4, quarter = lane % 4;
    uint4 keys[2][4];
    tile.load_keys(keys, group, quarter);
    float even[4] = {}, odd[4] = {};  // sums over even and over odd pairs of dimensions
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint4 query = shared.queries[group % kMaxGroup][(j ^ group / kMaxGroup) * 4 + quarter];
      mma(even, keys[0][j].x, keys[1][j].x, keys[0][j].z, keys[1][j].z, query.x, query.z);
      mma(odd, keys[0][j].y, keys[1][j].y, keys[0][j].w, keys[1][j].w, query.y, query.w);
    }
    // The thread, or the one two quarters away, has the columns that are right for its group.
    const bool upper = quarter >= 2, right = upper == (group % 2 != 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float first = even[i] + odd[i], second = even[2 + i] + odd[2 + i];
      const float other = __shfl_xor_sync(kAllLanes, upper ? first : second, 2);
      score[i] = right ? (upper ? second : first) : other;
    }
  }
  __device__ __forceinline__ static int own_token(int group, int quarter) { return group + quarter / 2 * 8; }

  // Turns scores into weights; 0 if the token does not exist.
  __device__ __forceinline__ void weigh(float (&score)[2], bool exists, float scale) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float scaled = exists ? score[i] * scale : -INFINITY;
      float now = fmaxf(highest[i], scaled);
#pragma unroll
      for (int distance = 2; distance < 32; distance *= 2)
        now = fmaxf(now, __shfl_xor_sync(kAllLanes, now, distance));
      const float kept = exp2_approx(highest[i] - now);
      highest[i] = now;
      score[i] = exp2_approx(scaled - now);
      total[i] = fmaf(total[i], kept, score[i]);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        value[j / 4][j % 4][i] *= kept;
        value[j / 4][j % 4][2 + i] *= kept;
      }
    }
  }
  __device__ __forceinline__ void add(const float (&weight)[2], const uint4 (&value_of)[8]) {
    // Rows are tokens, columns the queries for the first 8 tokens, then for the others.
    const uint32_t first = transpose(pack_bf16(weight[0], weight[1]));
    const uint32_t second = __shfl_xor_sync(kAllLanes, first, 16);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t* values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        values[i] = reinterpret_cast<const uint32_t*>(&value_of[2 * i + h]);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        mma(value[h][j], __byte_perm(values[0][j], values[1][j], 0x5410),
            __byte_perm(values[0][j], values[1][j], 0x7632), __byte_perm(values[2][j], values[3][j], 0x5410),
            __byte_perm(values[2][j], values[3][j], 0x7632), first, second);
    }
  }
  __device__ __forceinline__ void store(Shared& shared, int buffer, int warp, int queries, int group, int quarter) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int distance = 2; distance < 32; distance *= 2)
        total[i] += __shfl_xor_sync(kAllLanes, total[i], distance);
      const int query = 2 * quarter + i;
      if (query >= queries) continue;
      float4* part = shared.part[buffer][warp][query] + 4 * group;
      if (group == 0) part[kHeadDim / 4] = {highest[i], total[i], 0.0f, 0.0f};
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int j = 0; j < 4; j += 2)
          part[2 * h + j / 2] = {value[h][j][i], value[h][j][2 + i], value[h][j + 1][i], value[h][j + 1][2 + i]};
    }
  }
};

// Splits of one row and head in global memory: values of all of them, then sums.
struct Partials {
  float* base;
  int queries;

  __device__ __forceinline__ float4* value(int split, int query, int lane) const {
    return reinterpret_cast<float4*>(base) + (split * queries + query) * (kHeadDim / 4) + lane;
  }
  __device__ __forceinline__ float2* sums(int split, int query) const {
    return reinterpret_cast<float2*>(base + kMaxSplits * queries * kHeadDim) + split * queries + query;
  }
  __device__ __forceinline__ Merged merge(int splits, int query, int lane) const {
    constexpr int kAtOnce = 8;
    Merged result;
    for (int first = 0; first < splits; first += kAtOnce) {
      float4 values[kAtOnce];
      float2 both[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const bool exists = first + i < splits;
        both[i] = exists ? __ldcg(sums(first + i, query)) : float2{kLowest, 0.0f};
        values[i] = exists ? __ldcg(value(first + i, query, lane)) : float4{};
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (first + i < splits) result.add(both[i].x, both[i].y, values[i]);
    }
    return result;
  }
};

// What the new token is normed and rotated with, and the page it belongs in: nothing that the kernel ahead writes.
struct TokenPlace {
  HeadPart q_norm, k_norm, angles;
  int page;

  static __device__ __forceinline__ TokenPlace load(const PagedAttentionParams& params, const Pages& pages,
                                                    int position, int lane) {
    const Bf16Bits* angles = static_cast<const Bf16Bits*>(params.cos_sin) + static_cast<int64_t>(position) * kHeadDim;
    return {HeadPart::load_kept(params.q_norm, lane), HeadPart::load_kept(params.k_norm, lane),
            HeadPart::load_kept(angles, lane), pages.page(position)};
  }
};

// The new token's heads: the query of a warp, the key and the value.
struct TokenHeads {
  HeadPart query, key;
  uint2 value;  // four dimensions

  static __device__ __forceinline__ TokenHeads load(const PagedAttentionParams& params, int64_t batch_row, int head,
                                                    int query, int lane) {
    const int kv_heads = params.kv_heads, queries = kv_heads * params.group;
    const Bf16Bits* token = static_cast<const Bf16Bits*>(params.qkv) + batch_row * (queries + 2 * kv_heads) * kHeadDim;
    const Bf16Bits* value = token + (queries + kv_heads + head) * kHeadDim;
    return {HeadPart::load(token + (head * params.group + query) * kHeadDim, lane),
            HeadPart::load(token + (queries + head) * kHeadDim, lane),
            __ldcg(reinterpret_cast<const uint2*>(value) + lane)};
  }
};

// Puts the new token's rotated queries, its scores and its value into shared memory and, where it is attended to, its
// key and value in its page. Every warp has a query, and computes the scores whether they are needed or not: behind a
// branch the key would be asked for only when the query has come.
__device__ __forceinline__ void enter_token(const PagedAttentionParams& params, Shared& shared, const Pages& pages,
                                            const TokenHeads& heads, const TokenPlace& place, int position,
                                            bool attended, int warp, int lane) {
  const HeadPart q = norm_and_rotate(heads.query, place.q_norm, place.angles, params.eps);
  const HeadPart k = norm_and_rotate(heads.key, place.k_norm, place.angles, params.eps);
  const bool exists = warp < params.group;
  HeadPart{exists ? q.low : 0, exists ? q.high : 0}.store(shared.queries[warp], lane);
  const float score = q.dot(k) * params.scale;
  if (lane == 0) shared.new_score[warp] = score;
  shared.new_value[warp][lane] = heads.value;
  if (warp > 0 || !attended) return;
  const int64_t offset = pages.place(place.page, position);
  k.store(static_cast<Bf16Bits*>(params.key_pages) + offset, lane);
  reinterpret_cast<uint2*>(static_cast<Bf16Bits*>(params.value_pages) + offset)[lane] = heads.value;
}

// What the warps have stored of a split, for one query; the last split has the new token as well.
__device__ __forceinline__ Merged merge_warps(const Shared& shared, int buffer, int query, int lane, bool last) {
  Merged merged;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    const float4* part = shared.part[buffer][i][query];
    merged.add(part[kHeadDim / 4].x, part[kHeadDim / 4].y, part[lane]);
  }
  if (last) {
    const uint2 value = shared.new_value[query][lane];
    const float2 low = unpack_bf16(value.x), high = unpack_bf16(value.y);
    merged.add(shared.new_score[query], 1.0f, {low.x, low.y, high.x, high.y});
  }
  return merged;
}

// All splits of the block: into `shared.result` if it has all of the row, otherwise into `partials`. The first tile is
// on its way.
__device__ __forceinline__ void attend_splits(Shared& shared, const Pages& pages, const Walk& walk,
                                              const Partials& partials, float scale, unsigned thread) {
  const int steps = walk.steps(), stored = walk.stored, queries = partials.queries;
  const bool alone = walk.parts() == 1;
  shared.result[thread / 32][thread % 32] = {};
  Softmax softmax;
  int start = walk.token(0), buffer = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const unsigned self = recomputed(thread);
    const int warp = self / 32, lane = self % 32, group = lane / 4, quarter = lane % 4;
    const int tokens = stored - start, next = step + 1;
    if (next % 32 == 0) {
      __syncwarp();
      shared.pages[warp][lane] = pages.page(walk.token(next + lane));
      __syncwarp();
    }
    start = walk.token(next);
    const int64_t place = pages.place(shared.pages[warp][next % 32], start);
    const bool more = next < steps && start < stored;

    if (tokens > 0) {  // the same for all of the warp; otherwise nothing would change
      const Tile tile = {shared.tiles[warp], shared.barriers[warp]};
      float weight[2];
      copy_wait(tile.barriers, step & 1);
      Softmax::multiply(weight, tile, shared, lane);
      // What follows hides the time of the next copy.
      __syncwarp();
      if (more) tile.copy_keys(pages.keys + place, lane);
      softmax.weigh(weight, Softmax::own_token(group, quarter) < tokens, scale);
      uint4 values[8];
      copy_wait(tile.barriers + 1, step & 1);
      tile.load_values(values, tokens, group, quarter);
      softmax.add(weight, values);
      __syncwarp();
      if (more) tile.copy_values(pages.values + place, lane);
    }
    if (!walk.ends_split(step)) continue;

    softmax.store(shared, buffer, warp, queries, group, quarter);
    softmax = {};
    __syncthreads();
    const int split = walk.split(step);
    if (warp < queries) {
      const Merged merged = merge_warps(shared, buffer, warp, lane, split == walk.splits - 1);
      if (alone) {
        shared.result[warp][lane].add(merged.highest, merged.total, merged.value);
      } else {
        *partials.value(split, warp, lane) = merged.value;
        if (lane == 0) *partials.sums(split, warp) = {merged.highest, merged.total};
      }
    }
    buffer ^= 1;
  }
}

// Whether this block is the last of `blocks` to come here; all of its threads do.
__device__ __forceinline__ bool arrives_last(Shared& shared, int32_t* counter, int blocks, unsigned thread) {
  // Every thread has stored its part before one of them says so.
  __syncthreads();
  if (thread == 0) {
    shared.arrived = arrive(counter);
    if (shared.arrived == blocks - 1) *counter = 0;
  }
  __syncthreads();
  return shared.arrived == blocks - 1;
}

// `wait` returns when the kernels ahead have ended; every thread calls it.
template <typename Wait>
__device__ __forceinline__ void attend(const PagedAttentionParams& params, Shared& shared, unsigned thread, int head,
                                       int64_t batch_row, int part, int parts_log2, Wait&& wait) {
  // The next kernel starts when all blocks have: it takes the place of none that has to read.
  launch_dependents();
  const int warp = thread / 32, lane = thread % 32;
  const int queries = params.group;
  const int64_t row_head = batch_row * params.kv_heads + head;
  if (lane == 0) copies_begin(shared.barriers[warp]);
  __syncwarp();
  // The kernel ahead writes `qkv` alone, if the caller says so: all else is looked up, and asked for, while it ends.
  const bool early = params.dependent_launch == MOSS_DEPENDENT_EARLY;
  if (!early) wait();
  const int64_t row = load_kept(params.row_map + batch_row);
  const bool active = load_kept(params.active + batch_row) != 0;
  const Pages pages = Pages::of(params, row, head);
  Walk walk = {part, parts_log2, warp};
  // Lane i has the page of step i; the first guess is that of a row with few tokens.
  int page_ids = pages.page(walk.token(lane));
  const int stored = load_kept(params.positions + row);
  // A branch on `active` alone would be waited for before the row is asked for.
  walk.set_length(active ? stored : 0);
  const bool works = active && part < walk.splits;
  if (works && walk.doublings > 0) page_ids = pages.page(walk.token(lane));
  shared.pages[warp][lane] = page_ids;
  TokenPlace place = {};
  if (works) {
    const Tile tile = {shared.tiles[warp], shared.barriers[warp]};
    const int start = walk.token(0);
    const int64_t first = pages.place(__shfl_sync(kAllLanes, page_ids, 0), start);
    if (start < stored) tile.copy_keys(pages.keys + first, lane);
    // In between: ahead of the keys, these loads would be waited for together with the page.
    place = TokenPlace::load(params, pages, stored, lane);
    if (start < stored) tile.copy_values(pages.values + first, lane);
  }
  if (early) wait();
  uint2* out = reinterpret_cast<uint2*>(static_cast<Bf16Bits*>(params.out) + (row_head * queries + warp) * kHeadDim);
  if (!active && part == 0 && warp < queries) out[lane] = {};
  if (!works) return;

  const TokenHeads heads = TokenHeads::load(params, batch_row, head, min(warp, queries - 1), lane);
  enter_token(params, shared, pages, heads, place, stored, walk.has_last_split(), warp, lane);
  __syncthreads();

  const Partials partials = {params.partials + row_head * kMaxSplits * queries * (kHeadDim + 2), queries};
  attend_splits(shared, pages, walk, partials, params.scale, thread);
  const bool alone = walk.parts() == 1;
  if (!alone && !arrives_last(shared, params.arrived + row_head, walk.parts(), thread)) return;
  if (warp >= queries) return;
  const Merged result = alone ? shared.result[warp][lane] : partials.merge(walk.splits, warp, lane);
  const float factor = 1.0f / result.total;
  out[lane] = {pack_bf16(result.value.x * factor, result.value.y * factor),
               pack_bf16(result.value.z * factor, result.value.w * factor)};
}

}  // namespace moss::paged
