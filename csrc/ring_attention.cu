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

// QUERY_TILES: of 16 tokens. DEPTH: tiles of a warp that are on their way at once. BLOCKS: on a multiprocessor.
template <int QUERY_TILES, int WARPS, int DEPTH, int BLOCKS>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS) ring_attention_kernel(const RingAttentionParams params) {
  constexpr int kTokens = QUERY_TILES * kTileQueries, kThreads = 32 * WARPS;
  extern __shared__ KeySlot slots[];
  __shared__ uint4 queries[kTokens][kPieces];
  __shared__ KeySlot own[QUERY_TILES];     // keys and values of the chunk
  __shared__ float2 sums[WARPS][kTokens];  // highest score and total of the weights

  const int head = blockIdx.x;
  const int64_t row = blockIdx.y;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // in uniform registers, and all that follows from it
  const int lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  cudaTriggerProgrammaticLaunchCompletion();
  // The kernel ahead writes `qkv` alone, if the caller says so: all else is asked for while it ends.
  const bool early = params.dependent_launch == MOSS_DEPENDENT_EARLY;
  if (!early) {
    if (params.dependent_launch) prefetch_ring(params, guess_place(params, row), head);
    cudaGridDependencySynchronize();
  }
  const int valid = *static_cast<const volatile int32_t*>(params.valid + row);
  const RingPlace ring_place = guess_place(params, row);  // by now no guess

  const int64_t base = (ring_place.slot * params.heads + head) * params.capacity * kHeadDim;
  bf16* const ring_k = static_cast<bf16*>(params.ring_k) + base;
  bf16* const ring_v = static_cast<bf16*>(params.ring_v) + base;
  const int tokens_held = static_cast<int>(ring_place.start < params.window - 1 ? ring_place.start : params.window - 1);
  const int edge = static_cast<int>(ring_place.start % params.capacity);
  Ring ring(params.ring_k, params.ring_v, base, -tokens_held, edge, params.capacity, lane);
  ring.hold();
  const int ring_tiles = valid > 0 ? (tokens_held + kTileKeys - 1) / kTileKeys : 0;
  const int tiles = ring_tiles + (valid + kTileKeys - 1) / kTileKeys;

  // One group of copies for each tile of this warp, also where there is none, so that their number says what is there.
  const auto copy = [&](int index) {
    if (index < ring_tiles) ring.copy(slots[index % (WARPS * DEPTH)], index);
    copy_async_commit();
  };
#pragma unroll
  for (int i = 0; i < DEPTH; ++i)
    copy(warp + i * WARPS);

  // The chunk: a thread brings the same piece of several tokens, all that it brings at once.
  constexpr int kRows = kThreads / kPieces, kItems = (kTokens + kRows - 1) / kRows;
  const int thread_row = threadIdx.x / kPieces, piece = threadIdx.x % kPieces, width = params.heads * kHeadDim;
  const int64_t first = row * params.tokens;
  const bf16* const source = static_cast<const bf16*>(params.qkv) + first * 3 * width + head * kHeadDim + 8 * piece;
  const float* const cos_sin = params.cos_sin + first * kHeadDim + 8 * piece;
  Angles angles[kItems] = {};
#pragma unroll
  for (int i = 0; i < kItems; ++i)
    if (const int token = thread_row + i * kRows; token < valid) angles[i].load(cos_sin + token * kHeadDim);
  if (early) {
    prefetch_ring(params, ring_place, head);
    cudaGridDependencySynchronize();
  }
  uint4 inputs[kItems][3] = {};  // loaded as weights are, so that all are on their way before the first is used
#pragma unroll
  for (int i = 0; i < kItems; ++i)
#pragma unroll
    for (int part = 0; part < 3; ++part)
      if (const int token = thread_row + i * kRows; token < valid)
        inputs[i][part] = load_weights(source + (token * 3 + part) * width);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int token = thread_row + i * kRows, key = token % kTileKeys;
    if (kTokens % kRows && token >= kTokens) break;
    KeySlot& slot = own[token / kTileKeys];
    queries[token][KeySlot::key_piece(token, piece)] = angles[i].rotated(inputs[i][0]);
    slot.key[key][KeySlot::key_piece(key, piece)] = angles[i].rotated(inputs[i][1]);
    slot.value[key][KeySlot::value_piece(key, piece)] = inputs[i][2];
  }
  __syncthreads();

  Softmax softmax[QUERY_TILES];
#pragma unroll 1
  for (int index = warp; index < tiles; index += WARPS) {
    const bool in_chunk = index >= ring_tiles;
    const int key = in_chunk ? (index - ring_tiles) * kTileKeys : ring.first + index * kTileKeys;
    KeyTile tile;
    copy_async_wait<DEPTH - 1>();
    __syncwarp();
    (in_chunk ? own[index - ring_tiles] : slots[index % (WARPS * DEPTH)]).load(tile, group, quarter);
    __syncwarp();
    copy(index + WARPS * DEPTH);
#pragma unroll
    for (int i = 0; i < QUERY_TILES; ++i) {
      float score[1][2][4] = {};
      uint4 q[2][2];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        q[j / 2][j % 2] = queries[i * kTileQueries + j / 2 * 8 + group][KeySlot::key_piece(group, j % 2 * 4 + quarter)];
      Softmax::multiply(score[0], tile, q);
      const TileSight sight[] = {{key, in_chunk ? valid : 0, i * kTileQueries, params.window}};
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
      *reinterpret_cast<uint2*>(static_cast<bf16*>(params.out) + place * kHeadDim + 4 * part) = {pack_bf16(y.x, y.y),
                                                                                                 pack_bf16(y.z, y.w)};
    }
    if (i + 1 < QUERY_TILES) __syncthreads();
  }

  if (!params.write) return;
  // Of an oversized chunk the last tokens stay; the others would be written to the same places.
  const int oldest = valid > params.capacity ? valid - params.capacity : 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int token = thread_row + i * kRows, key = token % kTileKeys;
    if (token < oldest || token >= valid) continue;
    const KeySlot& slot = own[token / kTileKeys];
    const int64_t place = static_cast<int64_t>((edge + token) % params.capacity) * kHeadDim + 8 * piece;
    *reinterpret_cast<uint4*>(ring_k + place) = slot.key[key][KeySlot::key_piece(key, piece)];
    *reinterpret_cast<uint4*>(ring_v + place) = slot.value[key][KeySlot::value_piece(key, piece)];
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
      {"qkv", params.qkv, 16},       {"cos_sin", params.cos_sin, 16}, {"ring_k", params.ring_k, 16},
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
