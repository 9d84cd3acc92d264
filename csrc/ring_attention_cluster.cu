// moss_ring_attention for few rows, where the time is that of a chain of trips to memory.
//
// The blocks of a cluster share the chunk of one head and batch row: each has some of its queries, and brings all keys
// and values that these see into its shared memory at once, those of the chunk rotated. Once all blocks of the cluster
// have read the ring each writes its own tokens into it.
#include <algorithm>

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

// A token's piece of the chunk: q, k and v follow each other.
struct ChunkPiece {
  const bf16* source;
  const float* angles;

  __device__ __forceinline__ ChunkPiece(const RingAttentionParams& params, int64_t row, int head, int token,
                                        int piece) {
    const int64_t place = row * params.tokens + token, width = params.heads * kHeadDim;
    source = static_cast<const bf16*>(params.qkv) + place * 3 * width + head * kHeadDim + 8 * piece;
    angles = params.cos_sin + place * kHeadDim + 8 * piece;
  }
  __device__ __forceinline__ uint4 rotated(int offset) const {
    using Piece = Vector<bf16, 8>;
    uint4 x = __ldcg(reinterpret_cast<const uint4*>(source + offset));
    reinterpret_cast<Piece&>(x) = rotate(reinterpret_cast<Piece&>(x), angles);
    return x;
  }
};

// QUERY_TILES: of 16 tokens, that a block has. So many warps go side by side over the keys; the others share these.
template <int QUERY_TILES>
__global__ void __launch_bounds__(kThreads, 2) ring_attention_cluster_kernel(const RingAttentionParams params) {
  constexpr int kTokens = QUERY_TILES * kTileQueries, kShares = kWarps / QUERY_TILES;
  extern __shared__ KeySlot slots[];
  __shared__ uint4 queries[kTokens][kPieces];
  __shared__ float2 sums[kShares][kTokens];  // highest score and total of the weights

  const int head = blockIdx.y, first = blockIdx.x * kTokens;
  const int64_t row = blockIdx.z;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  const int query_tile = warp % QUERY_TILES, share = warp / QUERY_TILES;
  cudaTriggerProgrammaticLaunchCompletion();
  const RingPlace guess = guess_place(params, row);
  if (params.dependent_launch && first == 0) prefetch_ring(params, guess, head);
  // The kernel ahead writes `qkv` alone, if the caller says so: the ring is copied while it ends.
  const bool early = params.dependent_launch == MOSS_DEPENDENT_EARLY;
  if (!early) cudaGridDependencySynchronize();

  Ring ring;
  int ring_tiles;
  const auto copy_ring = [&](const RingPlace& place) {
    const int64_t base = (place.slot * params.heads + head) * params.capacity * kHeadDim;
    const int held = static_cast<int>(place.start < params.window - 1 ? place.start : params.window - 1);
    const int lowest = max(-held, first - params.window + 1);
    ring = {static_cast<const bf16*>(params.ring_k) + base, static_cast<const bf16*>(params.ring_v) + base, lowest,
            static_cast<int>(place.start % params.capacity), params.capacity};
    ring_tiles = lowest < 0 ? (-lowest + kTileKeys - 1) / kTileKeys : 0;
    for (int i = warp; i < ring_tiles; i += kWarps)
      ring.copy(slots[i], i, lane);
    copy_async_commit();
  };
  copy_ring(guess);
  if (early) cudaGridDependencySynchronize();
  const int valid = __ldcg(params.valid + row);
  RingPlace place = {__ldcg(params.slots + row), __ldcg(params.offset + guess.slot)};
  const int width = params.heads * kHeadDim;
  for (int i = threadIdx.x; i < kTokens * kPieces; i += kThreads) {
    const int token = i / kPieces, piece = i % kPieces;
    queries[token][KeySlot::key_piece(token, piece)] =
        first + token < valid ? ChunkPiece(params, row, head, first + token, piece).rotated(0) : uint4{};
  }
  if (place.slot != guess.slot) place.start = __ldcg(params.offset + place.slot);
  if (!(place == guess)) {
    copy_async_wait<0>();
    __syncthreads();
    copy_ring(place);
  }
  const int own_first = max(0, first - params.window + 1) / kTileKeys;
  const int own_end = (min(first + kTokens, valid) + kTileKeys - 1) / kTileKeys;
  const int own_tiles = first < valid ? own_end - own_first : 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < own_tiles * kTileKeys * kPieces; i += kThreads) {
    const int key = i / kPieces % kTileKeys, piece = i % kPieces, index = i / (kPieces * kTileKeys);
    const int token = (own_first + index) * kTileKeys + key;
    KeySlot& slot = slots[ring_tiles + index];
    const ChunkPiece chunk(params, row, head, min(token, valid - 1), piece);
    copy_async(&slot.value[key][KeySlot::value_piece(key, piece)], chunk.source + 2 * width, token < valid);
    slot.key[key][KeySlot::key_piece(key, piece)] = chunk.rotated(width);
  }
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
  Softmax softmax;
#pragma unroll 1
  for (int index = share; index < tiles; index += kShares) {
    const bool own = index >= ring_tiles;
    const int key = own ? (own_first + index - ring_tiles) * kTileKeys : ring.first + index * kTileKeys;
    KeyTile tile;
    slots[index].load(tile, group, quarter);
    float score[2][4] = {};
    Softmax::multiply(score, tile, q);
    softmax.add(score, tile, first + query_tile * kTileQueries + group, key + 2 * quarter, own ? valid : 0,
                params.window, params.scale);
  }
  // What this thread will write into the ring.
  static_assert(kTokens * kPieces <= kThreads);
  const int own_token = first + threadIdx.x / kPieces, own_piece = threadIdx.x % kPieces;
  const bool writes = own_token < min(first + kTokens, valid);
  uint4 own_key = {}, own_value = {};
  if (writes) {
    const KeySlot& slot = slots[ring_tiles + own_token / kTileKeys - own_first];
    const int key = own_token % kTileKeys;
    own_key = slot.key[key][KeySlot::key_piece(key, own_piece)];
    own_value = slot.value[key][KeySlot::value_piece(key, own_piece)];
  }
  __syncthreads();

  // A warp's result of its 16 queries lies in the place of a tile: of the first ones, which nobody needs any more.
  static_assert(sizeof(KeySlot) == kTileQueries * kHeadDim * sizeof(float));
  const auto partial = [&](int of) { return reinterpret_cast<float4*>(slots + of); };
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float& total = softmax.total[h];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    const int local = group + 8 * h;
    if (quarter == 0) sums[share][query_tile * kTileQueries + local] = {softmax.highest[h], total};
#pragma unroll
    for (int d = 0; d < 4; ++d)
      partial(warp)[result_place(local, 4 * quarter + d)] = {
          softmax.result[d % 2 * 4][2 * h + d / 2], softmax.result[d % 2 * 4 + 1][2 * h + d / 2],
          softmax.result[d % 2 * 4 + 2][2 * h + d / 2], softmax.result[d % 2 * 4 + 3][2 * h + d / 2]};
  }
  __syncthreads();
  for (int item = threadIdx.x; item < kTokens * kHeadDim / 4; item += kThreads) {
    const int local = item / (kHeadDim / 4), part = item % (kHeadDim / 4), token = first + local;
    if (token >= params.tokens) break;
    float4 y = {};
    if (token < valid) {
      float highest = kLowest, total = 0.0f;
#pragma unroll
      for (int s = 0; s < kShares; ++s)
        highest = fmaxf(highest, sums[s][local].x);
#pragma unroll
      for (int s = 0; s < kShares; ++s) {
        const float weight = exp2_approx(sums[s][local].x - highest);
        const float4 x = partial(s * QUERY_TILES + local / kTileQueries)[result_place(local % kTileQueries, part)];
        total += weight * sums[s][local].y;
        y = {fmaf(weight, x.x, y.x), fmaf(weight, x.y, y.y), fmaf(weight, x.z, y.z), fmaf(weight, x.w, y.w)};
      }
      const float factor = 1.0f / total;
      y = {y.x * factor, y.y * factor, y.z * factor, y.w * factor};
    }
    const int64_t target = ((row * params.tokens + token) * params.heads + head) * kHeadDim + 4 * part;
    *reinterpret_cast<uint2*>(static_cast<bf16*>(params.out) + target) = {pack_bf16(y.x, y.y), pack_bf16(y.z, y.w)};
  }

  cluster_wait();
  // Of an oversized chunk the last tokens stay; the others would be written to the same places.
  if (!params.write || !writes || own_token < valid - params.capacity) return;
  const int64_t target = static_cast<int64_t>((ring.edge + own_token) % params.capacity) * kHeadDim + 8 * own_piece;
  *reinterpret_cast<uint4*>(const_cast<bf16*>(ring.keys) + target) = own_key;
  *reinterpret_cast<uint4*>(const_cast<bf16*>(ring.values) + target) = own_value;
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
