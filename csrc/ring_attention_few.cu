// moss_ring_attention for chunks of a few tokens of many rows: windowed attention, and the write of their keys and
// values into the ring.
//
// One block of two warps per head and batch row. Keys are the rows of the products with queries and dimensions those of
// the products with values, tokens the eight columns of both: half of the products, exponentials and registers for
// results that sixteen rows of queries take. The warps share the tiles of 16 keys. A tile ends with the chunk's last
// token or some tiles ahead of it, so that the chunk's own keys lie in one tile with the youngest of the ring. All
// threads share the loads of q, k and v, which may still be sums over slices, and of these come in one trip as well.
#include "device/ring_attention.cuh"
#include "launch.h"
#include "ring_attention.h"

namespace moss {
namespace {

constexpr char kOp[] = "ring_attention";
constexpr int kMultiprocessors = 132;
constexpr int kColumns = 8, kWarps = 2;
constexpr int kLine = kHeadDim * sizeof(bf16);  // bytes of a token
constexpr int kMostTokens = 4;
constexpr int kMostSlices = 4;  // where q, k and v of one token come as sums over slices

// Of row `row` and a piece: its 16 bytes, permuted, so that those of eight rows lie in different banks.
__device__ __forceinline__ uint32_t line_place(int row, int piece) { return row * kLine + (piece ^ row % 8) * 16; }

template <int ROWS>
struct alignas(kLine) Lines {
  char bytes[ROWS * kLine];

  __device__ __forceinline__ void put(int row, int piece, const uint4& x) {
    *reinterpret_cast<uint4*>(bytes + line_place(row, piece)) = x;
  }
  __device__ __forceinline__ const uint4& get(int row, int piece) const {
    return *reinterpret_cast<const uint4*>(bytes + line_place(row, piece));
  }
};
struct Tile {
  Lines<kTileKeys> key, value;
};
constexpr uint32_t kValues = sizeof(Lines<kTileKeys>);  // of a tile, behind its keys

// The ring of one head in tiles of 16 places. A thread copies the same piece of places `lane / 8`, 4 later and so on of
// each tile.
struct RingTiles {
  const char *keys, *values;  // this piece of position 0
  int first, oldest;          // positions of this thread's first key in tile 0 and of the oldest key, before they wrap
  int held_tokens, capacity;

  // Starts the copies of a tile by one warp, of zeros where the ring has no key. `to`: of this thread's first key.
  __device__ __forceinline__ void copy(uint32_t to, int tile, uint64_t policy) const {
#pragma unroll
    for (int i = 0; i < kTileKeys; i += 4) {
      const int position = first + tile * kTileKeys + i;
      const bool wanted = static_cast<unsigned>(position - oldest) < static_cast<unsigned>(held_tokens);
      // A position below 0, as unsigned, is beyond all others.
      const uint64_t place = min(static_cast<unsigned>(position), static_cast<unsigned>(position + capacity));
      const uint32_t line = (to ^ i % 8 * 16) + i * kLine;
      copy_async(line, keys + place * kLine, wanted, policy);
      copy_async(line + kValues, values + place * kLine, wanted, policy);
    }
  }
};

// As load_weights, of 8 bytes.
__device__ __forceinline__ uint2 load_pair(const void* pointer) {
  uint2 value;
  asm volatile("ld.relaxed.gpu.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "l"(pointer));
  return value;
}

// Four dimensions of q, k or v of a token as the kernel ahead has left them: rounded, or as sums over `slices` slices
// of its inputs, `stride` apart, which are added in their order and rounded then. All loads of a thread are on their
// way before the first is used.
struct Rounded {
  using Element = bf16;
  uint2 words;

  __device__ __forceinline__ void load(const bf16* source, int /*slices*/, int64_t /*stride*/) {
    words = load_pair(source);
  }
  __device__ __forceinline__ uint2 get() const { return words; }
};
struct Sums {
  using Element = float;
  uint4 slice[kMostSlices];

  __device__ __forceinline__ void load(const float* source, int slices, int64_t stride) {
#pragma unroll
    for (int i = 0; i < kMostSlices; ++i) {
      slice[i] = {};
      if (i < slices) slice[i] = load_weights(source + i * stride);
    }
  }
  __device__ __forceinline__ uint2 get() const {
    float4 sum = reinterpret_cast<const float4&>(slice[0]);
#pragma unroll
    for (int i = 1; i < kMostSlices; ++i) {
      const float4& x = reinterpret_cast<const float4&>(slice[i]);
      sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
    }
    return {pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w)};
  }
};

// The chunk of one head in shared memory, rotated; queries of zeros where there is no token. TOKENS: at most.
template <typename Stored, int TOKENS>
struct Chunk {
  static constexpr int kThreads = 32 * kWarps, kFours = kHeadDim / 4;
  static constexpr int kItems = (TOKENS * 3 * kFours + kThreads - 1) / kThreads;  // of four dimensions, of a thread
  Lines<kColumns> query;
  Lines<kMostTokens> key, value;

  // `wait`: for the kernel that writes `qkv`.
  template <typename Wait>
  __device__ __forceinline__ void load(const RingAttentionParams& params, int64_t row, int head, int valid, Wait wait) {
    using Element = typename Stored::Element;
    using Four = Vector<bf16, 4>;
    const int width = params.heads * kHeadDim;
    const int64_t first = row * params.tokens, stride = int64_t{params.batch} * params.tokens * 3 * width;
    const Element* source[kItems];
    alignas(uint4) float angles[kItems][4] = {};
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const Item item(i);
      source[i] = held(static_cast<const Element*>(params.qkv) + ((first + item.token) * 3 + item.part) * width +
                       head * kHeadDim + 4 * item.four);
      if (item.token < valid && item.part < 2)
        reinterpret_cast<uint4&>(angles[i]) =
            load_weights(params.cos_sin + (first + item.token) * kHeadDim + 4 * item.four);
    }
    if (const int token = threadIdx.x / kPieces; token >= valid) query.put(token, threadIdx.x % kPieces, uint4{});
    wait();
    Stored stored[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (Item(i).token < valid) stored[i].load(source[i], params.qkv_slices, stride);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const Item item(i);
      if (item.token >= valid) continue;
      uint2 x = stored[i].get();
      if (item.part < 2) reinterpret_cast<Four&>(x) = rotate(reinterpret_cast<Four&>(x), angles[i]);
      char* const lines = item.part == 0 ? query.bytes : item.part == 1 ? key.bytes : value.bytes;
      *reinterpret_cast<uint2*>(lines + line_place(item.token, item.four / 2) + item.four % 2 * 8) = x;
    }
  }

 private:
  struct Item {
    int token, part, four;

    __device__ __forceinline__ explicit Item(int i) {
      const int index = threadIdx.x + i * kThreads;
      token = index / (3 * kFours), part = index / kFours % 3, four = index % kFours;
    }
  };
  static_assert(TOKENS <= kMostTokens && kThreads == kColumns * kPieces);
};

// Attention of eight tokens over the keys seen so far; tokens 2t and 2t + 1 of this thread.
struct ColumnSoftmax {
  float highest[2] = {kLowest, kLowest};  // what weights are relative to; the highest score is hardly above
  float total[2] = {};                    // of this thread's keys alone
  float result[4][4] = {};                // [i][2h + j]: dimension 16i + 8h + g of token 2t + j

  // Scores of a tile: [2h + j]: key g + 8h and token 2t + j. `query`: [64 dimensions in eights] as `mma` takes columns.
  static __device__ __forceinline__ void multiply(float (&score)[4], uint32_t keys, const uint32_t (&query)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t key[4];
      load_matrices(key, keys ^ i * 32);
      mma(score, key[0], key[1], key[2], key[3], query[i / 2][i % 2 * 2], query[i / 2][i % 2 * 2 + 1]);
    }
  }
  // Makes weights relative to the highest score so far if one is far above what they are relative to, which few tiles
  // have. All lanes of a warp together.
  __device__ __forceinline__ void raise(const float (&score)[4], float scale) {
    float top[2];
#pragma unroll
    for (int j = 0; j < 2; ++j)
      top[j] = fmaxf(score[j], score[2 + j]);
    const bool exceeded = fmaf(top[0], scale, -highest[0]) > kSlack | fmaf(top[1], scale, -highest[1]) > kSlack;
    if (!__any_sync(0xffffffffu, exceeded)) return;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float highest_now = fmaxf(highest[j], top[j] * scale);
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2)
        highest_now = fmaxf(highest_now, __shfl_xor_sync(0xffffffffu, highest_now, distance));
      const float kept = exp2_approx(highest[j] - highest_now);
      highest[j] = highest_now;
      total[j] *= kept;
#pragma unroll
      for (int i = 0; i < 8; ++i)
        result[i / 2][i % 2 * 2 + j] *= kept;
    }
  }
  // Makes weights of the scores of a tile and adds its values.
  __device__ __forceinline__ void gather(float (&score)[4], const uint32_t (&value)[4][4], float scale) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      score[i] = exp2_approx(fmaf(score[i], scale, -highest[i % 2]));
      total[i % 2] += score[i];
    }
    const uint32_t low = transposed(pack_bf16(score[0], score[1])), high = transposed(pack_bf16(score[2], score[3]));
#pragma unroll
    for (int i = 0; i < 4; ++i)
      mma(result[i], value[i][0], value[i][1], value[i][2], value[i][3], low, high);
  }
};

// What each warp found, in shared memory, its results where its first tile was.
struct Results {
  static constexpr int kStride = kHeadDim + 4;  // of a token, so that the lanes of a warp store into different banks
  float2 (&sums)[kWarps][kColumns];             // what weights are relative to, and their total
  Tile* tiles;
  int tiles_of_warp;

  __device__ __forceinline__ void put(const ColumnSoftmax& softmax, int warp) const {
    static_assert(kColumns * kStride * sizeof(float) <= sizeof(Tile));
    const int group = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 16; ++i)
      of(warp)[(2 * quarter + i % 2) * kStride + i / 2 * 8 + group] = softmax.result[i / 4][i % 4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float total = softmax.total[j];
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2)
        total += __shfl_xor_sync(0xffffffffu, total, distance);
      if (group == 0) sums[warp][2 * quarter + j] = {softmax.highest[j], total};
    }
  }
  // A piece of a token over all keys.
  __device__ __forceinline__ uint4 merged(int token, int piece) const {
    const auto four = [&](int i) {
      return merge<kWarps>(
          [&](int warp) -> const float2& { return sums[warp][token]; },
          [&](int warp) -> float4& { return *reinterpret_cast<float4*>(of(warp) + token * kStride + 4 * i); });
    };
    const float4 low = four(2 * piece), high = four(2 * piece + 1);
    return {pack_bf16(low.x, low.y), pack_bf16(low.z, low.w), pack_bf16(high.x, high.y), pack_bf16(high.z, high.w)};
  }

 private:
  __device__ __forceinline__ float* of(int warp) const {
    return reinterpret_cast<float*>(tiles + warp * tiles_of_warp);
  }
};

// STAGES: tiles of a warp that are on their way at once. BLOCKS: on a multiprocessor. `Chunk`: how q, k and v come.
template <int STAGES, int BLOCKS, typename Chunk>
__global__ void __launch_bounds__(32 * kWarps, BLOCKS) ring_attention_few(const RingAttentionParams params) {
  extern __shared__ Tile tiles[];  // [kWarps][STAGES]
  __shared__ Chunk chunk;
  __shared__ float2 sums[kWarps][kColumns];

  // In a uniform register, and all that follows from it.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4, head = blockIdx.x;
  const int64_t row = blockIdx.y;
  const bool early = wait_is_due(params, row, head);
  const int valid = *static_cast<const volatile int32_t*>(params.valid + row);
  const RingPlace place = ring_place(params, row);
  const int64_t base = (place.slot * params.heads + head) * params.capacity * kHeadDim;
  const int held_tokens = static_cast<int>(place.start < params.window - 1 ? place.start : params.window - 1);
  const int edge = static_cast<int>(place.start % params.capacity);
  const uint64_t policy = fit_l2(params) ? policy_evict_normal() : policy_evict_first();

  const RingTiles ring = {held(static_cast<const char*>(params.ring_k) + base * sizeof(bf16) + lane % kPieces * 16),
                          held(static_cast<const char*>(params.ring_v) + base * sizeof(bf16) + lane % kPieces * 16),
                          edge + valid - kTileKeys + lane / kPieces,
                          edge - held_tokens,
                          held_tokens,
                          params.capacity};
  // The warps take turns, the oldest tiles first; the first may have no key.
  constexpr int kStepKeys = kTileKeys * kWarps;
  const int steps = valid > 0 ? (held_tokens + valid + kStepKeys - 1) / kStepKeys : 0;
  const auto number_of = [&](int step) { return (step - steps + 1) * kWarps - warp; };  // 0: the last tile
  const auto slot_of = [&](int step) { return warp * STAGES + step % STAGES; };
  const auto address_of = [&](int step) { return slot_of(step) * static_cast<uint32_t>(sizeof(Tile)); };
  const uint32_t memory = shared_address(tiles);
  const uint32_t ring_to = held(memory + line_place(lane / kPieces, lane % kPieces));
  const auto copy = [&](int step) {
    if (step < steps) ring.copy(of_lane(ring_to + address_of(step)), number_of(step), policy);
    copy_async_commit();
  };
#pragma unroll
  for (int i = 0; i < STAGES; ++i)
    copy(i);

  chunk.load(params, row, head, valid, [&] {
    if (!early) return;
    prefetch_ring(params, place, head);
    cudaGridDependencySynchronize();
  });
  __syncthreads();
  uint32_t query[2][4];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    load_matrices(query[i], shared_address(&chunk.query) + line_place(lane % 8, 4 * i + lane / 8));
  // A piece of a key and of a value of the chunk, of which one warp writes all.
  const int own_token = lane / kPieces, own_piece = lane % kPieces;
  static_assert(kMostTokens * kPieces == 32);

  const int eighth = lane % 8, second = lane / 8 % 2 * 8, fourth = lane / 16 * 8;  // as load_matrices takes addresses
  const uint32_t keys = held(memory + line_place(eighth + second, fourth / 8));
  const uint32_t values = held(memory + kValues + line_place(eighth + fourth, second / 8));
  ColumnSoftmax softmax;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<STAGES - 1>();
    __syncwarp();
    const int first = valid - kTileKeys + number_of(step) * kTileKeys;  // token of the tile's first key
    if (warp == 0 && step == steps - 1) {
      Tile& tile = tiles[slot_of(step)];
      if (own_token < valid) {
        tile.key.put(own_token - first, own_piece, chunk.key.get(own_token, own_piece));
        tile.value.put(own_token - first, own_piece, chunk.value.get(own_token, own_piece));
      }
      __syncwarp();
    }
    float score[4] = {};
    softmax.multiply(score, keys + address_of(step), query);
    uint32_t value[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      load_transposed(value[i], (values + address_of(step)) ^ i * 32);
    __syncwarp();
    copy(step + STAGES);
    const bool all_see_all = first >= -held_tokens && first + kTileKeys <= 1 && valid - 1 - first < params.window;
    if (!all_see_all)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first + group + i / 2 * 8, ahead = 2 * quarter + i % 2 - key;
        if (key < -held_tokens || ahead < 0 || ahead >= params.window) score[i] = -INFINITY;
      }
    softmax.raise(score, params.scale);
    softmax.gather(score, value, params.scale);
  }

  const Results results = {sums, tiles, STAGES};
  __syncwarp();
  results.put(softmax, warp);
  __syncthreads();
  static_assert(32 * kWarps >= kColumns * kPieces);
  bf16* const out = static_cast<bf16*>(params.out) + (row * params.tokens * params.heads + head) * kHeadDim;
  if (const int t = threadIdx.x / kPieces, piece = threadIdx.x % kPieces; t < params.tokens)
    *reinterpret_cast<uint4*>(out + (t * params.heads) * kHeadDim + 8 * piece) =
        t < valid ? results.merged(t, piece) : uint4{};
  // Nobody reads the ring any more. Of an oversized chunk the last tokens stay.
  if (!params.write || warp != 0 || own_token >= valid || own_token < valid - params.capacity) return;
  int position = edge + own_token;
  while (position >= params.capacity)
    position -= params.capacity;
  const int64_t written = base + int64_t{position} * kHeadDim + 8 * own_piece;
  *reinterpret_cast<uint4*>(static_cast<bf16*>(params.ring_k) + written) = chunk.key.get(own_token, own_piece);
  *reinterpret_cast<uint4*>(static_cast<bf16*>(params.ring_v) + written) = chunk.value.get(own_token, own_piece);
}

template <int STAGES, int BLOCKS>
MossStatus launch(const RingAttentionParams& params) {
  constexpr int kShared = kWarps * STAGES * static_cast<int>(sizeof(Tile));
  const auto kernel = params.qkv_slices > 0 ? ring_attention_few<STAGES, BLOCKS, Chunk<Sums, 1>>
                                            : ring_attention_few<STAGES, BLOCKS, Chunk<Rounded, kMostTokens>>;
  return launch_kernel(kOp, kernel, params, dim3(params.heads, params.batch), dim3(32 * kWarps), kShared);
}

int64_t head_count(const RingAttentionParams& params) { return int64_t{params.batch} * params.heads; }

}  // namespace

bool takes_few(const RingAttentionParams& params) {
  const int64_t count = head_count(params);
  return count > 3 * kMultiprocessors && params.tokens <= (count <= 10 * kMultiprocessors ? 2 : kMostTokens);
}

bool takes_slices(const RingAttentionParams& params) {
  const bool sized = params.tokens == 1 && head_count(params) <= 10 * kMultiprocessors && takes_few(params);
  return sized && params.qkv_slices > 0 && params.qkv_slices <= kMostSlices;
}

// Three tiles ahead where all blocks run at once, eight on a multiprocessor. Else ten, of less.
MossStatus launch_few(const RingAttentionParams& params) {
  const int64_t count = head_count(params);
  return count > 4 * kMultiprocessors && count <= 8 * kMultiprocessors ? launch<3, 8>(params) : launch<2, 10>(params);
}

}  // namespace moss
