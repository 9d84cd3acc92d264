// moss_ring_attention: windowed attention of short chunks, and the write of their keys and values into the ring.
//
// One block per head and batch row. Its warps share the keys, 16 at a time; each has the next few of its tiles copied
// into shared memory, of which a thread reads 16 contiguous bytes of a key (see device/mma.cuh) or of a value. Their
// partial softmaxes are merged at the end; after that nobody reads the ring any more, and the chunk's own tokens are
// written.
#include <algorithm>

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

// The chunk of one head, rotated, in shared memory. Pieces are permuted as in a KeySlot.
template <int TOKENS>
struct Chunk {
  uint4 query[TOKENS][kPieces], key[TOKENS][kPieces], value[TOKENS][kPieces];

  __device__ __forceinline__ void load(const RingAttentionParams& params, int64_t row, int head, int valid) {
    const int width = params.heads * kHeadDim;
    for (int i = threadIdx.x; i < TOKENS * kPieces; i += blockDim.x) {
      const int token = i / kPieces, piece = i % kPieces;
      uint4 q = {}, k = {}, v = {};
      if (token < valid) {
        const int64_t place = row * params.tokens + token;
        const bf16* source = static_cast<const bf16*>(params.qkv) + place * 3 * width + head * kHeadDim + 8 * piece;
        const float* angles = params.cos_sin + place * kHeadDim + 8 * piece;
        q = __ldcg(reinterpret_cast<const uint4*>(source));
        k = __ldcg(reinterpret_cast<const uint4*>(source + width));
        v = __ldcg(reinterpret_cast<const uint4*>(source + 2 * width));
        using Piece = Vector<bf16, 8>;
        reinterpret_cast<Piece&>(q) = rotate(reinterpret_cast<Piece&>(q), angles);
        reinterpret_cast<Piece&>(k) = rotate(reinterpret_cast<Piece&>(k), angles);
      }
      query[token][KeySlot::key_piece(token, piece)] = q;
      key[token][KeySlot::key_piece(token, piece)] = k;
      value[token][KeySlot::value_piece(token, piece)] = v;
    }
  }
  __device__ __forceinline__ void tile(KeyTile& tile, int index, int group, int quarter) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int first = index * kTileKeys, row = value_key(i, quarter);
      tile.key[i / 2][i % 2] = key[first + i / 2 * 8 + group][KeySlot::key_piece(group, i % 2 * 4 + quarter)];
      tile.value[i] = value[first + row][KeySlot::value_piece(row, group)];
    }
  }
  __device__ __forceinline__ void queries(uint4 (&q)[2][2], int index, int group, int quarter) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      q[i / 2][i % 2] =
          query[index * kTileQueries + i / 2 * 8 + group][KeySlot::key_piece(group, i % 2 * 4 + quarter)];
  }
};

// QUERY_TILES: of 16 tokens. DEPTH: tiles of a warp that are on their way at once. BLOCKS: on a multiprocessor.
template <int QUERY_TILES, int WARPS, int DEPTH, int BLOCKS>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS) ring_attention_kernel(const RingAttentionParams params) {
  constexpr int kTokens = QUERY_TILES * kTileQueries, kThreads = 32 * WARPS;
  extern __shared__ KeySlot slots[];
  __shared__ Chunk<kTokens> chunk;
  __shared__ float2 sums[WARPS][kTokens];  // highest score and total of the weights

  const int head = blockIdx.x;
  const int64_t row = blockIdx.y;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  cudaTriggerProgrammaticLaunchCompletion();
  const RingPlace guess = guess_place(params, row);
  if (params.dependent_launch) prefetch_ring(params, guess, head);
  // The kernel ahead writes `qkv` alone, if the caller says so: the first tiles are asked for while it ends.
  const bool early = params.dependent_launch == MOSS_DEPENDENT_EARLY;
  if (!early) cudaGridDependencySynchronize();

  const int valid = __ldcg(params.valid + row);
  const int64_t slot = __ldcg(params.slots + row);
  int64_t start = __ldcg(params.offset + guess.slot);
  if (slot != guess.slot) start = __ldcg(params.offset + slot);
  const int64_t base = (slot * params.heads + head) * params.capacity * kHeadDim;
  bf16* const ring_k = static_cast<bf16*>(params.ring_k) + base;
  bf16* const ring_v = static_cast<bf16*>(params.ring_v) + base;
  const int held = static_cast<int>(start < params.window - 1 ? start : params.window - 1);
  const int edge = static_cast<int>(start % params.capacity);
  const Ring ring = {ring_k, ring_v, -held, edge, params.capacity};
  const int ring_tiles = valid > 0 ? (held + kTileKeys - 1) / kTileKeys : 0;
  const int tiles = ring_tiles + (valid + kTileKeys - 1) / kTileKeys;

  // One group of copies for each tile of this warp, also where there is none, so that their number says what is there.
  const auto copy = [&](int index) {
    if (index < ring_tiles) ring.copy(slots[index % (WARPS * DEPTH)], index, lane);
    copy_async_commit();
  };
#pragma unroll
  for (int i = 0; i < DEPTH; ++i)
    copy(warp + i * WARPS);
  if (early) cudaGridDependencySynchronize();
  chunk.load(params, row, head, valid);
  __syncthreads();

  Softmax softmax[QUERY_TILES];
#pragma unroll 1
  for (int index = warp; index < tiles; index += WARPS) {
    const bool own = index >= ring_tiles;
    const int key = own ? (index - ring_tiles) * kTileKeys : ring.first + index * kTileKeys;
    KeyTile tile;
    copy_async_wait<DEPTH - 1>();
    __syncwarp();
    if (own)
      chunk.tile(tile, index - ring_tiles, group, quarter);
    else
      slots[index % (WARPS * DEPTH)].load(tile, group, quarter);
    __syncwarp();
    copy(index + WARPS * DEPTH);
#pragma unroll
    for (int i = 0; i < QUERY_TILES; ++i) {
      float score[1][2][4] = {};
      uint4 q[2][2];
      chunk.queries(q, i, group, quarter);
      Softmax::multiply(score[0], tile, q);
      const TileSight sight[] = {{key, own ? valid : 0, i * kTileQueries, params.window}};
      softmax[i].weigh(score, sight, i * kTileQueries, params.window, params.scale);
      softmax[i].gather(score[0], tile);
    }
  }

  // A warp's result of 16 queries lies where its first tile was.
  static_assert(sizeof(KeySlot) == kTileQueries * kHeadDim * sizeof(float));
  const auto partial = [&](int of) { return reinterpret_cast<float4*>(slots + of); };
  __syncwarp();
#pragma unroll
  for (int i = 0; i < QUERY_TILES; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float& total = softmax[i].total[h];
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      const int local = group + 8 * h, token = i * kTileQueries + local;
      if (quarter == 0) sums[warp][token] = {softmax[i].highest[h], total};
      if (token < valid) {
        const auto& result = softmax[i].result;
#pragma unroll
        for (int d = 0; d < 4; ++d)
          partial(warp)[result_place(local, 4 * quarter + d)] = {
              result[d % 2 * 4][2 * h + d / 2], result[d % 2 * 4 + 1][2 * h + d / 2],
              result[d % 2 * 4 + 2][2 * h + d / 2], result[d % 2 * 4 + 3][2 * h + d / 2]};
      }
    }
    __syncthreads();
    for (int item = threadIdx.x; item < kTileQueries * kHeadDim / 4; item += kThreads) {
      const int local = item / (kHeadDim / 4), part = item % (kHeadDim / 4), token = i * kTileQueries + local;
      if (token >= params.tokens) break;
      float4 y = {};
      if (token < valid) {
        float highest = kLowest, total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w)
          highest = fmaxf(highest, sums[w][token].x);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
          const float weight = exp2_approx(sums[w][token].x - highest);
          const float4 x = partial(w)[result_place(local, part)];
          total += weight * sums[w][token].y;
          y = {fmaf(weight, x.x, y.x), fmaf(weight, x.y, y.y), fmaf(weight, x.z, y.z), fmaf(weight, x.w, y.w)};
        }
        const float factor = 1.0f / total;
        y = {y.x * factor, y.y * factor, y.z * factor, y.w * factor};
      }
      const int64_t place = (row * params.tokens + token) * params.heads + head;
      *reinterpret_cast<uint2*>(static_cast<bf16*>(params.out) + place * kHeadDim + 4 * part) = {
          pack_bf16(y.x, y.y), pack_bf16(y.z, y.w)};
    }
    if (i + 1 < QUERY_TILES) __syncthreads();
  }

  if (!params.write) return;
  // Of an oversized chunk the last tokens stay; the others would be written to the same places.
  const int oldest = valid > params.capacity ? valid - params.capacity : 0;
  for (int item = threadIdx.x + oldest * kPieces; item < valid * kPieces; item += kThreads) {
    const int token = item / kPieces, piece = item % kPieces;
    const int64_t place = static_cast<int64_t>((edge + token) % params.capacity) * kHeadDim + 8 * piece;
    *reinterpret_cast<uint4*>(ring_k + place) = chunk.key[token][KeySlot::key_piece(token, piece)];
    *reinterpret_cast<uint4*>(ring_v + place) = chunk.value[token][KeySlot::value_piece(token, piece)];
  }
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
      {"qkv", params.qkv, 16},     {"cos_sin", params.cos_sin, 16}, {"ring_k", params.ring_k, 16},
      {"ring_v", params.ring_v, 16}, {"slots", params.slots, 4},      {"valid", params.valid, 4},
      {"offset", params.offset, 8},  {"out", params.out, 16},
  };
  for (const auto& entry : pointers)
    if (status == MOSS_OK) status = check_pointer(kOp, entry.name, entry.pointer, entry.bytes);
  return status;
}

template <int QUERY_TILES, int WARPS, int DEPTH, int BLOCKS>
MossStatus launch(const RingAttentionParams& params) {
  auto* kernel = ring_attention_kernel<QUERY_TILES, WARPS, DEPTH, BLOCKS>;
  const int tiles = (params.window + kTileKeys - 2) / kTileKeys;
  const int shared = std::clamp(tiles, WARPS, WARPS * DEPTH) * static_cast<int>(sizeof(KeySlot));
  const MossStatus status = check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), kOp, "cudaFuncSetAttribute");
  if (status != MOSS_OK) return status;
  return launch_kernel(kOp, kernel, params, dim3(params.heads, params.batch), dim3(32 * WARPS), shared);
}

// Small blocks, several of them on a multiprocessor: while some wait for what depends on the slot, others read. Where
// not all blocks run at once they are smaller still, so that more of them do.
MossStatus dispatch(const RingAttentionParams& params) {
  const int64_t count = static_cast<int64_t>(params.batch) * params.heads;
  if (params.tokens <= kTileQueries)
    return count <= 4 * kMultiprocessors ? launch<1, 4, 3, 4>(params) : launch<1, 2, 2, 8>(params);
  return count <= 3 * kMultiprocessors ? launch<2, 4, 3, 3>(params) : launch<2, 2, 2, 6>(params);
}

}  // namespace
}  // namespace moss

extern "C" MossStatus moss_ring_attention(const RingAttentionParams* params) {
  using namespace moss;
  MossStatus status = check_params(kOp, params);
  if (status == MOSS_OK && (params->batch == 0 || params->tokens == 0)) return MOSS_OK;
  if (status == MOSS_OK) status = check(*params);
  if (status != MOSS_OK) return status;
  if (takes_clusters(*params)) return launch_clusters(*params);
  return params->tokens > kShortTokens ? launch_wide(*params) : dispatch(*params);
}
