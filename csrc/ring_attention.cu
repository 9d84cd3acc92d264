// moss_ring_attention: windowed attention of short chunks, and the write of their keys and values into the ring.
//
// One block per head and batch row, or one warp. The warps of a head share the keys, 16 at a time; each has the next few
// of its tiles copied into shared memory, of which a thread reads 16 contiguous bytes of a key (see device/mma.cuh) or
// of a value. Their partial softmaxes are merged at the end; after that nobody reads the ring any more, and the chunk's
// own tokens are written.
#include <algorithm>
#include <type_traits>

#include "checks.h"
#include "device/ring_attention.cuh"
#include "launch.h"
#include "ring_attention.h"

namespace moss {
namespace {

constexpr char kOp[] = "ring_attention";
constexpr int kShortTokens = 32;       // of a chunk for any number of rows
constexpr int kMaxCapacity = 1 << 24;  // places in the ring of a head are counted in 32 bits
constexpr int kMultiprocessors = 132;

// The chunk of one head, rotated, in shared memory. A thread has the same piece of several tokens.
template <int QUERY_TILES, int THREADS>
struct Chunk {
  static constexpr int kItems = QUERY_TILES * kTileQueries * kPieces / THREADS;
  static_assert(kItems > 0);
  QueryTile query[QUERY_TILES];
  KeySlot tile[QUERY_TILES];

  // Of item `i` of this thread. A warp has two neighbours at once, and the two that are 8 later.
  static __device__ __forceinline__ int token_of(int i) {
    const int pairs = threadIdx.x % THREADS / 32 + i * (THREADS / 32), lane = threadIdx.x % 32;
    return pairs / 4 * kTileQueries + pairs % 4 * 2 + lane / 8 % 2 + lane / 16 * 8;
  }
  // `wait`: for the kernel that writes `qkv`. All loads of a thread are on their way before the first is used.
  template <typename Wait>
  __device__ __forceinline__ void load(const RingAttentionParams& params, int64_t row, int head, int valid, Wait wait) {
    const int piece = threadIdx.x % kPieces, width = params.heads * kHeadDim;
    const int64_t place = row * params.tokens;
    const bf16* const qkv = static_cast<const bf16*>(params.qkv) + place * 3 * width + head * kHeadDim + 8 * piece;
    const float* const cos_sin = params.cos_sin + place * kHeadDim + 8 * piece;
    Angles angles[kItems] = {};
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (const int token = token_of(i); token < valid) angles[i].load(cos_sin + token * kHeadDim);
    wait();
    uint4 inputs[kItems][3] = {};
#pragma unroll
    for (int i = 0; i < kItems; ++i)
#pragma unroll
      for (int part = 0; part < 3; ++part)
        if (const int token = token_of(i); token < valid)
          inputs[i][part] = load_weights(qkv + (token * 3 + part) * width);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int token = token_of(i), key = token % kTileKeys;
      KeySlot& slot = tile[token / kTileKeys];
      query[token / kTileQueries].put(angles[i].rotated(inputs[i][0]), token % kTileQueries, piece);
      slot.key[key][KeySlot::key_piece(key, piece)] = angles[i].rotated(inputs[i][1]);
      slot.value[key][KeySlot::value_piece(key, piece)] = inputs[i][2];
    }
  }
  // Of an oversized chunk the last tokens stay; the others would be written to the same places.
  __device__ __forceinline__ void write(bf16* ring_k, bf16* ring_v, int edge, int capacity, int valid) const {
    const int piece = threadIdx.x % kPieces;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int token = token_of(i), key = token % kTileKeys;
      if (token < valid - capacity || token >= valid) continue;
      const KeySlot& slot = tile[token / kTileKeys];
      int position = edge + token;
      while (position >= capacity)
        position -= capacity;
      const int64_t place = static_cast<int64_t>(position) * kHeadDim + 8 * piece;
      *reinterpret_cast<uint4*>(ring_k + place) = slot.key[key][KeySlot::key_piece(key, piece)];
      *reinterpret_cast<uint4*>(ring_v + place) = slot.value[key][KeySlot::value_piece(key, piece)];
    }
  }
};

// What each warp found for all queries, in shared memory: its results of 16 queries lie where its first tiles were,
// each as the thread has it that holds those queries and dimensions in every warp.
template <int QUERY_TILES, int WARPS>
struct Partials {
  static constexpr int kParts = QUERY_TILES * 4, kOwn = kParts / WARPS;  // eights of dimensions; that a warp finishes
  static_assert(kParts % WARPS == 0);
  float2 (&sums)[WARPS][QUERY_TILES * kTileQueries];  // what weights are relative to, and their total
  KeySlot* slots;
  int group, quarter;

  // Of a part: the token of this thread, and the first dimension.
  __device__ __forceinline__ int token(int part) const { return part / 4 * kTileQueries + part / 2 % 2 * 8 + group; }
  __device__ __forceinline__ int dimension(int part) const { return 16 * quarter + part % 2 * 8; }

  __device__ __forceinline__ void put(const Softmax (&softmax)[QUERY_TILES], int warp) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const Softmax& of = softmax[part / 4];
      const int h = part / 2 % 2, half = part % 2;
      if (half == 0) {
        const float total = of.row_total(h);
        if (quarter == 0) sums[warp][token(part)] = {of.highest[h], total};
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
        four(warp, part, i) = of.four(h, 2 * half + i);
    }
  }
  // Eight dimensions over all keys.
  __device__ __forceinline__ uint4 merged(int part) const {
    const auto merged_four = [&](int i) {
      return merge<WARPS>([&](int warp) -> const float2& { return sums[warp][token(part)]; },
                          [&](int warp) -> const float4& { return four(warp, part, i); });
    };
    const float4 low = merged_four(0), high = merged_four(1);
    return {pack_bf16(low.x, low.y), pack_bf16(low.z, low.w), pack_bf16(high.x, high.y), pack_bf16(high.z, high.w)};
  }

 private:
  __device__ __forceinline__ float4& four(int warp, int part, int i) const {
    static_assert(sizeof(KeySlot) == 4 * 2 * 32 * sizeof(float4));
    float4* const results = reinterpret_cast<float4*>(slots + part / 4 * WARPS + warp);
    return results[(part % 4 * 2 + i) * 32 + 4 * group + quarter];
  }
};

// QUERY_TILES: of 16 tokens. WARPS: of a head. STEP: tiles of keys that a warp weighs together. STAGES: steps of a warp
// that are on their way at once. BLOCKS: on a multiprocessor. HEADS: of a block; several have a warp each.
template <int QUERY_TILES, int WARPS, int STEP, int STAGES, int BLOCKS, int HEADS>
__global__ void __launch_bounds__(32 * WARPS * HEADS, BLOCKS) ring_attention_kernel(const RingAttentionParams params) {
  static_assert(HEADS == 1 || WARPS == 1);
  extern __shared__ KeySlot memory[];
  __shared__ Chunk<QUERY_TILES, 32 * WARPS> chunks[HEADS];
  __shared__ float2 all_sums[HEADS][WARPS][QUERY_TILES * kTileQueries];

  constexpr int kAhead = WARPS * STEP * STAGES;  // tiles of a head that are on their way at once
  // In uniform registers, and all that follows from it.
  const int number = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int warp = HEADS == 1 ? number : 0, place_in_block = HEADS == 1 ? 0 : number;
  const int head = blockIdx.x * HEADS + place_in_block;
  if (head >= params.heads) return;
  KeySlot* const slots = memory + place_in_block * kAhead;
  Chunk<QUERY_TILES, 32 * WARPS>& chunk = chunks[place_in_block];
  float2(&sums)[WARPS][QUERY_TILES * kTileQueries] = all_sums[place_in_block];
  const auto sync = [] {
    if constexpr (WARPS == 1)
      __syncwarp();
    else
      __syncthreads();
  };

  const int64_t row = blockIdx.y;
  const int lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  const bool early = wait_is_due(params, row, head);
  const int valid = *static_cast<const volatile int32_t*>(params.valid + row);
  const RingPlace place = ring_place(params, row);

  const int64_t base = (place.slot * params.heads + head) * params.capacity * kHeadDim;
  const int tokens_held = static_cast<int>(place.start < params.window - 1 ? place.start : params.window - 1);
  const int edge = static_cast<int>(place.start % params.capacity);
  // Rings that L2 has no room for go first: they are read once, and what the kernels of a layer hand on stays in L2
  // then until the next layer overwrites it. Otherwise it goes to memory, beside the rings.
  const uint64_t policy = fit_l2(params) ? policy_evict_normal() : policy_evict_first();
  Ring ring(params.ring_k, params.ring_v, base, -tokens_held, edge, params.capacity, lane);
  ring.hold();
  const int ring_tiles = valid > 0 ? (tokens_held + kTileKeys - 1) / kTileKeys : 0;
  const int tiles = ring_tiles + (valid + kTileKeys - 1) / kTileKeys;

  // One group of copies for each step of this warp, also where there is none, so that their number says what is there.
  const auto slot_of = [&](int tile) { return slots + tile % kAhead; };
  const auto copy = [&](int first) {
#pragma unroll
    for (int n = 0; n < STEP; ++n)
      if (const int tile = first + n * WARPS; tile < ring_tiles) ring.copy(*slot_of(tile), tile, policy);
    copy_async_commit();
  };
#pragma unroll
  for (int i = 0; i < STAGES; ++i)
    copy(warp + i * WARPS * STEP);
  chunk.load(params, row, head, valid, [&] {
    if (!early) return;
    prefetch_ring(params, place, head);
    cudaGridDependencySynchronize();
  });
  sync();

  // `taken`: called when the tiles are no longer needed in shared memory.
  Softmax softmax[QUERY_TILES];
  const auto attend = [&](auto count, int first, auto taken) {
    constexpr int kCount = decltype(count)::value;
    float score[QUERY_TILES][kCount][2][4] = {};
    KeyTile tile[kCount];
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const int index = first + n * WARPS;
      (index < ring_tiles ? *slot_of(index) : chunk.tile[index - ring_tiles]).load(tile[n], group, quarter);
    }
#pragma unroll
    for (int i = 0; i < QUERY_TILES; ++i) {
      uint4 q[4];
      chunk.query[i].load(q, lane);
#pragma unroll
      for (int n = 0; n < kCount; ++n)
        Softmax::multiply(score[i][n], tile[n], q);
    }
    taken();
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const int index = first + n * WARPS;
      const bool own = index >= ring_tiles;
      const int key = own ? (index - ring_tiles) * kTileKeys : ring.first + index * kTileKeys;
#pragma unroll
      for (int i = 0; i < QUERY_TILES; ++i) {
        const TileSight sight(key, own ? valid : 0, i * kTileQueries, params.window);
        Softmax::mask(score[i][n], sight, i * kTileQueries, params.window);
      }
    }
    // Most steps have no score far above what weights are relative to: they need neither the other lanes' scores nor
    // other results.
    bool exceeded = false;
#pragma unroll
    for (int i = 0; i < QUERY_TILES; ++i)
      exceeded |= softmax[i].exceeded(score[i], params.scale);
    if (__any_sync(0xffffffffu, exceeded))
#pragma unroll
      for (int i = 0; i < QUERY_TILES; ++i)
        softmax[i].raise(score[i], params.scale);
#pragma unroll
    for (int i = 0; i < QUERY_TILES; ++i)
      softmax[i].weigh(score[i], params.scale);
#pragma unroll
    for (int n = 0; n < kCount; ++n)
#pragma unroll
      for (int i = 0; i < QUERY_TILES; ++i)
        softmax[i].gather(score[i][n], tile[n]);
  };
  int first = warp;
#pragma unroll 1
  for (; first + (STEP - 1) * WARPS < tiles; first += STEP * WARPS) {
    copy_async_wait<STAGES - 1>();
    __syncwarp();
    attend(std::integral_constant<int, STEP>{}, first, [&] {
      __syncwarp();
      copy(first + kAhead);
    });
  }
  copy_async_wait<0>();
  __syncwarp();
  if constexpr (STEP > 1)  // what is left is less than a step
#pragma unroll 1
    for (; first < tiles; first += WARPS)
      attend(std::integral_constant<int, 1>{}, first, [] {});

  static_assert(QUERY_TILES <= STEP * STAGES);
  const Partials<QUERY_TILES, WARPS> partials = {sums, slots, group, quarter};
  __syncwarp();
  partials.put(softmax, warp);
  sync();
  bf16* const out = static_cast<bf16*>(params.out) + (row * params.tokens * params.heads + head) * kHeadDim;
#pragma unroll
  for (int i = 0; i < partials.kOwn; ++i) {
    const int part = warp * partials.kOwn + i, token = partials.token(part);
    const uint4 y = partials.merged(part);  // of tokens beyond `valid` nothing is known
    if (token < params.tokens)
      *reinterpret_cast<uint4*>(out + token * params.heads * kHeadDim + partials.dimension(part)) =
          token < valid ? y : uint4{};
  }
  if (params.write)
    chunk.write(static_cast<bf16*>(params.ring_k) + base, static_cast<bf16*>(params.ring_v) + base, edge,
                params.capacity, valid);
}

MossStatus check(const RingAttentionParams& params) {
  MossStatus status = check_range(kOp, "batch", params.batch, 0, 65535);
  if (status == MOSS_OK) status = check_at_least(kOp, "tokens", params.tokens, 0);
  if (status == MOSS_OK) status = check_range(kOp, "heads", params.heads, 1, 65535);
  if (status == MOSS_OK) status = check_range(kOp, "head_dim", params.head_dim, kHeadDim, kHeadDim);
  if (status == MOSS_OK) status = check_range(kOp, "capacity", params.capacity, 1, kMaxCapacity);
  if (status == MOSS_OK) status = check_range(kOp, "window", params.window, 1, params.capacity);
  if (status == MOSS_OK) status = check_at_least(kOp, "ring_slots", params.ring_slots, 1);
  if (status == MOSS_OK)
    status = check_range(kOp, "dependent_launch", params.dependent_launch, 0, MOSS_DEPENDENT_EARLY);
  const struct {
    const char* name;
    const void* pointer;
    size_t bytes;
  } pointers[] = {
      {"qkv", params.qkv, 16},    {"ring_k", params.ring_k, 16}, {"ring_v", params.ring_v, 16},
      {"slots", params.slots, 4}, {"valid", params.valid, 4},    {"offset", params.offset, 8},
      {"out", params.out, 16},
  };
  for (const auto& entry : pointers)
    if (status == MOSS_OK) status = check_pointer(kOp, entry.name, entry.pointer, entry.bytes);
  if (status == MOSS_OK) status = check_pointer(kOp, "cos_sin", params.cos_sin, 16, true);
  if (status == MOSS_OK && params.qkv_slices != 0 && !(params.cos_sin && takes_slices(params)))
    status = set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: `qkv_slices` must be 0 for %d tokens of %d rows, got %d", kOp,
                       params.tokens, params.batch, params.qkv_slices);
  if (status == MOSS_OK && params.cos_sin && params.tokens > kShortTokens && !takes_clusters(params))
    status = set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: `cos_sin` must be null for %d tokens of %d rows", kOp,
                       params.tokens, params.batch);
  return status;
}

template <int QUERY_TILES, int WARPS, int STEP, int STAGES, int BLOCKS, int HEADS = 1>
MossStatus launch(const RingAttentionParams& params) {
  auto* kernel = ring_attention_kernel<QUERY_TILES, WARPS, STEP, STAGES, BLOCKS, HEADS>;
  constexpr int kAhead = WARPS * STEP * STAGES;
  const int tiles =
      (HEADS - 1) * kAhead + std::clamp((params.window + kTileKeys - 2) / kTileKeys, WARPS * QUERY_TILES, kAhead);
  const int shared = tiles * static_cast<int>(sizeof(KeySlot));
  const MossStatus status = check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), kOp, "cudaFuncSetAttribute");
  if (status != MOSS_OK) return status;
  const dim3 grid((params.heads + HEADS - 1) / HEADS, params.batch);
  return launch_kernel(kOp, kernel, params, grid, dim3(32 * WARPS * HEADS), shared);
}

// Small blocks, several of them on a multiprocessor: while some wait for what depends on the slot, others read. Where
// not all blocks run at once they are smaller still, so that more of them do; where few are, all have more on its way.
// No more of them than all at once need, since that leaves a thread more registers. Some more heads than there is room
// for run at once with a warp each: ten on a multiprocessor, where two warps each leave room for eight.
MossStatus dispatch(const RingAttentionParams& params) {
  const int64_t count = static_cast<int64_t>(params.batch) * params.heads;
  if (params.tokens > kTileQueries)
    return count <= 3 * kMultiprocessors ? launch<2, 4, 2, 1, 3>(params) : launch<2, 2, 2, 1, 6>(params);
  if (count <= 3 * kMultiprocessors) return launch<1, 4, 2, 2, 3>(params);
  if (count <= 4 * kMultiprocessors) return launch<1, 4, 2, 1, 4>(params);
  if (count <= 6 * kMultiprocessors) return launch<1, 2, 2, 1, 6>(params);
  const bool at_once = count > 8 * kMultiprocessors && count <= 10 * kMultiprocessors;
  return at_once ? launch<1, 1, 2, 2, 5, 2>(params) : launch<1, 2, 2, 1, 8>(params);
}

}  // namespace
}  // namespace moss

extern "C" MossStatus moss_ring_attention(const RingAttentionParams* params) {
  using namespace moss;
  MossStatus status = check_params(kOp, params);
  if (status == MOSS_OK && (params->batch == 0 || params->tokens == 0)) return MOSS_OK;
  if (status == MOSS_OK) status = check(*params);
  if (status != MOSS_OK) return status;
  if (params->cos_sin == nullptr) return launch_wide(*params);
  if (takes_clusters(*params)) return launch_clusters(*params);
  return takes_few(*params) ? launch_few(*params) : dispatch(*params);
}
