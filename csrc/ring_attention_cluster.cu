// moss_ring_attention for few rows, where the time is that of a chain of trips to memory.
//
// The blocks of a cluster share the chunk of one head and batch row: each has some of its queries, and brings all keys
// and values that these see into its shared memory at once, those of the chunk rotated. Queries, keys and values of the
// chunk are asked for together, since each trip to memory costs as much as all scores. Once all blocks of the cluster
// have read the ring each writes its own tokens into it.
#include <algorithm>
#include <type_traits>

#include "checks.h"
#include "device/cluster.cuh"
#include "device/ring_attention.cuh"
#include "launch.h"
#include "ring_attention.h"

namespace moss {
namespace {

constexpr char kOp[] = "ring_attention";
constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kMaxBlocks = 16;         // of a cluster
constexpr int kMaxTiles = 27;          // of keys: two blocks have room for them on a multiprocessor
constexpr int kMaxResident = 2 * 132;  // blocks that run at once
constexpr int kShortTokens = kMaxBlocks * kTileQueries;

// QUERY_TILES: of 16 tokens, that a block has. So many warps go side by side over the keys; the others share these.
template <int QUERY_TILES>
__global__ void __launch_bounds__(kThreads, 2) ring_attention_cluster_kernel(const RingAttentionParams params) {
  constexpr int kTokens = QUERY_TILES * kTileQueries, kShares = kWarps / QUERY_TILES;
  extern __shared__ KeySlot slots[];
  __shared__ uint4 queries[kTokens][kPieces];
  __shared__ float2 sums[kShares][kTokens];  // highest score and total of the weights

  const int head = blockIdx.y, first = blockIdx.x * kTokens;
  const int64_t row = blockIdx.z;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // in uniform registers, and all that follows from it
  const int lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  const int query_tile = warp % QUERY_TILES, share = warp / QUERY_TILES;
  cudaTriggerProgrammaticLaunchCompletion();
  // The kernel ahead writes `qkv` alone, if the caller says so: all else is asked for while it ends.
  const bool early = params.dependent_launch == MOSS_DEPENDENT_EARLY;
  if (!early) {
    if (params.dependent_launch && first == 0) prefetch_ring(params, ring_place(params, row), head);
    cudaGridDependencySynchronize();
  }
  const int valid = *static_cast<const volatile int32_t*>(params.valid + row);
  const RingPlace place = ring_place(params, row);

  const int64_t base = (place.slot * params.heads + head) * params.capacity * kHeadDim;
  const int tokens_held = static_cast<int>(place.start < params.window - 1 ? place.start : params.window - 1);
  const int lowest = max(-tokens_held, first - params.window + 1);
  const Ring ring(params.ring_k, params.ring_v, base, lowest, static_cast<int>(place.start % params.capacity),
                  params.capacity, lane);
  const int ring_tiles = lowest < 0 ? (-lowest + kTileKeys - 1) / kTileKeys : 0;
  for (int i = warp; i < ring_tiles; i += kWarps)
    ring.copy(slots[i], i);

  // The chunk: a thread brings the same piece of several tokens.
  constexpr int kRows = kThreads / kPieces;  // tokens that all threads bring at once
  constexpr int kAtOnce = 4;                 // keys that a thread asks for at once
  const int own_first = max(0, first - params.window + 1) / kTileKeys;
  const int own_end = (min(first + kTokens, valid) + kTileKeys - 1) / kTileKeys;
  const int own_tiles = first < valid ? own_end - own_first : 0, own_keys = own_tiles * kTileKeys;
  const int thread_row = threadIdx.x / kPieces, piece = threadIdx.x % kPieces, width = params.heads * kHeadDim;
  const int64_t chunk = row * params.tokens;
  const bf16* const source = static_cast<const bf16*>(params.qkv) + chunk * 3 * width + head * kHeadDim + 8 * piece;
  const float* const cos_sin = params.cos_sin + chunk * kHeadDim + 8 * piece;  // a chunk is short: 32 bits go on
  const auto token_of = [&](int own_key) { return own_first * kTileKeys + own_key; };

  static_assert(kTokens <= kRows);
  const int own_token = first + thread_row;  // of this thread: its query, and what it writes into the ring
  const bool owns = own_token < min(first + kTokens, valid);
  const bf16* const query_source = source + own_token * 3 * width;
  Angles query_angles, angles[kAtOnce];
  if (owns) query_angles.load(cos_sin + own_token * kHeadDim);
  const bf16* key_source[kAtOnce];
  const auto prepare = [&](int begin) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int own_key = begin + i * kRows, token = min(token_of(own_key), valid - 1);
      key_source[i] = source + (token * 3 + 1) * width;
      if (own_key < own_keys) angles[i].load(cos_sin + token * kHeadDim);
    }
  };
  prepare(thread_row);
  if (early) cudaGridDependencySynchronize();

  uint4 query = {};
  if (owns) query = load_weights(query_source);
  for (int begin = thread_row; begin < own_keys; begin += kAtOnce * kRows) {
    uint4 keys[kAtOnce];  // loaded as weights are, so that all are on their way before the first is used
    if (begin > thread_row) prepare(begin);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (begin + i * kRows < own_keys) keys[i] = load_weights(key_source[i]);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int own_key = begin + i * kRows, key = own_key % kTileKeys;
      if (own_key < own_keys)
        copy_async(&slots[ring_tiles + own_key / kTileKeys].value[key][KeySlot::value_piece(key, piece)],
                   key_source[i] + width, token_of(own_key) < valid);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int own_key = begin + i * kRows, key = own_key % kTileKeys;
      if (own_key < own_keys)
        slots[ring_tiles + own_key / kTileKeys].key[key][KeySlot::key_piece(key, piece)] = angles[i].rotated(keys[i]);
    }
  }
  if (thread_row < kTokens)
    queries[thread_row][KeySlot::key_piece(thread_row, piece)] = owns ? query_angles.rotated(query) : uint4{};
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
  cluster_arrive_relaxed();  // what the block needs of the ring is in its shared memory

  const int tiles = first < valid ? ring_tiles + own_tiles : 0;
  uint4 q[2][2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = query_tile * kTileQueries + i / 2 * 8 + group;
    q[i / 2][i % 2] = queries[token][KeySlot::key_piece(token, i % 2 * 4 + quarter)];
  }
  // The scores of several tiles are weighed together, which takes hardly longer than those of one.
  Softmax softmax;
  const int query_token = first + query_tile * kTileQueries;
  const auto attend = [&](auto count, int index) {
    constexpr int kCount = decltype(count)::value;
    float score[kCount][2][4] = {};
    TileSight sight[kCount];
    const auto slot_of = [&](int i) -> const KeySlot& {
      const int slot = index + i * kShares;
      return slots[slot < tiles ? slot : index];
    };
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int slot = index + i * kShares;
      const bool own = slot >= ring_tiles;
      const int key = own ? (own_first + slot - ring_tiles) * kTileKeys : ring.first + slot * kTileKeys;
      sight[i] = TileSight(key, own ? valid : 0, query_token, params.window);  // nothing beyond the last tile
      KeyTile tile;
      slot_of(i).load(tile, group, quarter);
      Softmax::multiply(score[i], tile, q);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      Softmax::mask(score[i], sight[i], query_token, params.window);
#pragma unroll
    for (int i = 0; i < 8 * kCount; ++i)  // the scale later, in a register of its own, would be one too many
      score[i / 8][i / 4 % 2][i % 4] *= params.scale;
    softmax.raise(score, 1.0f);
    softmax.weigh(score, 1.0f);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      KeyTile tile;
      slot_of(i).load(tile, group, quarter);
      softmax.gather(score[i], tile);
    }
  };
#pragma unroll 1
  for (int index = share; index < tiles; index += 4 * kShares) {
    if (index + kShares >= tiles)
      attend(std::integral_constant<int, 1>{}, index);
    else if (index + 2 * kShares < tiles)
      attend(std::integral_constant<int, 4>{}, index);
    else
      attend(std::integral_constant<int, 2>{}, index);
  }
  // What this thread will write into the ring.
  uint4 own_key = {}, own_value = {};
  if (owns) {
    const KeySlot& slot = slots[ring_tiles + own_token / kTileKeys - own_first];
    const int key = own_token % kTileKeys;
    own_key = slot.key[key][KeySlot::key_piece(key, piece)];
    own_value = slot.value[key][KeySlot::value_piece(key, piece)];
  }
  __syncthreads();

  // A warp's result of its 16 queries lies in the place of a tile: of the first ones, which nobody needs any more.
  static_assert(sizeof(KeySlot) == kTileQueries * kHeadDim * sizeof(float));
  const auto partial = [&](int of) { return reinterpret_cast<float4*>(slots + of); };
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float total = softmax.row_total(h);
    const int local = group + 8 * h;
    if (quarter == 0) sums[share][query_tile * kTileQueries + local] = {softmax.highest[h], total};
#pragma unroll
    for (int d = 0; d < 4; ++d)
      partial(warp)[result_place(local, 4 * quarter + d)] = softmax.four(h, d);
  }
  __syncthreads();
  for (int item = threadIdx.x; item < kTokens * kHeadDim / 4; item += kThreads) {
    const int local = item / (kHeadDim / 4), part = item % (kHeadDim / 4), token = first + local;
    if (token >= params.tokens) break;
    float4 y = {};
    if (token < valid)
      y = merge<kShares>([&](int s) -> const float2& { return sums[s][local]; },
                         [&](int s) -> const float4& {
                           const int tile = s * QUERY_TILES + local / kTileQueries;
                           return partial(tile)[result_place(local % kTileQueries, part)];
                         });
    const int64_t target = ((row * params.tokens + token) * params.heads + head) * kHeadDim + 4 * part;
    *reinterpret_cast<uint2*>(static_cast<bf16*>(params.out) + target) = {pack_bf16(y.x, y.y), pack_bf16(y.z, y.w)};
  }

  cluster_wait();
  // Of an oversized chunk the last tokens stay; the others would be written to the same places.
  if (!params.write || !owns || own_token < valid - params.capacity) return;
  const int64_t target = base + static_cast<int64_t>((ring.edge + own_token) % params.capacity) * kHeadDim + 8 * piece;
  *reinterpret_cast<uint4*>(static_cast<bf16*>(params.ring_k) + target) = own_key;
  *reinterpret_cast<uint4*>(static_cast<bf16*>(params.ring_v) + target) = own_value;
}

int query_tiles(const RingAttentionParams& params) { return params.tokens <= kShortTokens ? 1 : 2; }

int blocks(const RingAttentionParams& params) {
  const int tokens = query_tiles(params) * kTileQueries;
  return (params.tokens - 1) / tokens + 1;
}

// Of keys that a block sees.
int tiles(const RingAttentionParams& params) {
  return (params.window + kTileKeys - 2) / kTileKeys + query_tiles(params);
}

template <int QUERY_TILES>
MossStatus launch(const RingAttentionParams& params) {
  auto* kernel = ring_attention_cluster_kernel<QUERY_TILES>;
  const int shared = std::max(tiles(params), kWarps) * static_cast<int>(sizeof(KeySlot));
  MossStatus status = check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), kOp,
                                 "cudaFuncSetAttribute");
  if (status == MOSS_OK)
    status = check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), kOp,
                        "cudaFuncSetAttribute");
  if (status != MOSS_OK) return status;
  const dim3 grid(blocks(params), params.heads, params.batch);
  return launch_kernel(kOp, kernel, params, grid, dim3(kThreads), shared, blocks(params));
}

}  // namespace

bool takes_clusters(const RingAttentionParams& params) {
  const int64_t count = static_cast<int64_t>(params.batch) * params.heads * blocks(params);
  return blocks(params) <= kMaxBlocks && tiles(params) <= kMaxTiles && count <= kMaxResident;
}

MossStatus launch_clusters(const RingAttentionParams& params) {
  return query_tiles(params) == 1 ? launch<1>(params) : launch<2>(params);
}

}  // namespace moss
