// moss_ring_attention for chunks whose queries and keys are rotated already, where the time is that of tensor cores and
// exponentials.
//
// A persistent block takes items: some heads of a row and some tiles of 64 queries, one for each of its consumers,
// warpgroups that hold scores, weights and result in registers, and have their queries copied to shared memory. A
// loader, one warp, has the keys and values that an item sees copied into stages, 64 tokens at a time, counted from the
// chunk's first. Finishers, three warps with a stage each, clear what does not exist. Where a block has all queries of
// a head in turn they also write the chunk into the ring: an item's tiles of the ring come first, and have arrived
// before those of the chunk.
#include <cuda.h>

#include <algorithm>

#include "checks.h"
#include "device/tile_product.cuh"
#include "device/warpgroup_attention.cuh"
#include "launch.h"
#include "ring_attention.h"
#include "tensor_map.h"

namespace moss {
namespace {

using bf16 = __nv_bfloat16;

constexpr char kOp[] = "ring_attention";
constexpr int kPieces = kRowBytes / 16;
constexpr int kConsumers = 4, kFinishers = 3;
constexpr int kStages = 12, kTileBytes = kTile * kRowBytes, kStageBytes = 2 * kTileBytes;
// Registers of a thread; together those that the block has at its start, 96 each.
constexpr int kConsumerRegisters = 104, kProducerRegisters = 64;
static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= (kConsumers + 1) * 96);

constexpr int kSizes = 4;        // of one copy
constexpr int kNever = 1 << 30;  // later than any token

// Rows of a copy: kTile, 16, 4, 1.
__host__ __device__ constexpr int box_rows(int size) { return kTile >> 2 * size; }

struct Arguments : RingAttentionParams {
  CUtensorMap chunk[kSizes], keys[kSizes], values[kSizes];  // by size
  float unscale;                                            // 1 / scale
  int item_heads, item_tiles;                               // of an item, at most
  int head_groups, query_groups;
  int items, chain;  // of the grid; neighbours that one block takes in turn: all query groups if it writes the ring
};

// What a stage holds.
struct alignas(16) Part {
  int token, begin, end;  // the first token; those that exist in the ring and in the chunk
  int source;             // its number in the batch; negative: it lies in the ring
  int ring, edge;         // rows of the head's ring and of token 0 in it
  int stored;             // first token that is written into the ring
  int done;               // no part, and none follows

  __device__ __forceinline__ bool exists(int key) const { return token + key >= begin && token + key < end; }
  // Whether consumers can read it as it comes: all of it exists.
  __device__ __forceinline__ bool finished() const { return exists(0) && exists(kTile - 1); }
  // Where a key lies: its row in the ring or in the chunk.
  __device__ __forceinline__ int row(int key, int capacity) const {
    const int place = edge + token + key;
    return source >= 0 ? source + key : ring + (place < 0 ? place + capacity : place);
  }
  // Whether these keys exist and follow each other in memory.
  __device__ __forceinline__ bool whole(int first, int count, int capacity) const {
    const int last = first + count - 1;
    return exists(first) && exists(last) && row(last, capacity) - row(first, capacity) == count - 1;
  }
};

struct Memory {
  uint32_t base;

  __device__ __forceinline__ uint32_t keys(int stage) const { return base + stage * kStageBytes; }
  __device__ __forceinline__ uint32_t queries(int consumer) const {
    return base + kStages * kStageBytes + consumer * kTileBytes;
  }
  // Consumers may read; the loader may copy, since consumers and finishers are done; finishers may look at the part,
  // whose copies have arrived unless it is finished as it comes.
  __device__ __forceinline__ uint32_t full(int stage) const { return queries(kConsumers) + 24 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(stage) + 8; }
  __device__ __forceinline__ uint32_t loaded(int stage) const { return full(stage) + 16; }
  // A consumer's queries have arrived.
  __device__ __forceinline__ uint32_t asked(int consumer) const { return full(kStages) + 8 * consumer; }
  static constexpr int kBytes = kStages * (kStageBytes + 24) + kConsumers * (kTileBytes + 8) + kAlignment;

  __device__ __forceinline__ void init_barriers(int consumers) const {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(full(stage), 1);
      barrier_init(empty(stage), 4 * consumers + kFinishers);
      barrier_init(loaded(stage), 1);
    }
    for (int consumer = 0; consumer < consumers; ++consumer) barrier_init(asked(consumer), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
};

// Which queries an item has.
struct Place {
  int row, head, group, first;  // `group`: of its head's, `first`: its first query

  __device__ __forceinline__ Place(const Arguments& arguments, int index) {
    const unsigned query_groups = arguments.query_groups, head_groups = arguments.head_groups;
    const unsigned heads = index / query_groups;
    group = index - heads * query_groups;
    row = heads / head_groups;
    head = (heads - row * head_groups) * arguments.item_heads;
    first = group * arguments.item_tiles * kTile;
  }
  // The number of this block's item after this one, which is `index`.
  __device__ __forceinline__ int next(const Arguments& arguments, int index) const {
    const bool ends = arguments.chain == 1 || group + 1 == arguments.query_groups;
    return index + 1 + (ends ? (gridDim.x - 1) * arguments.chain : 0);
  }
};

struct Item : Place {
  int heads, valid, held;
  int begin, end;  // tiles of keys, one at least, from which consumers learn what the item is
  int stored;      // first token that is written into the ring

  __device__ __forceinline__ Item(const Arguments& arguments, const Place& place, int valid, int held)
      : Place(place), valid(valid), held(held) {
    heads = min(arguments.item_heads, arguments.heads - head);
    const int beyond = first + arguments.item_tiles * kTile;
    begin = (first < valid ? max(first - arguments.window + 1, -held) : first) >> 6;
    end = max((min(beyond, valid) - 1) >> 6, begin) + 1;
    stored = kNever;
    if (arguments.write && first < valid && valid <= beyond) {
      stored = max(valid - arguments.capacity, 0);
      begin = min(begin, stored >> 6);
    }
  }
};

struct Loader {
  const Arguments& arguments;
  Memory shared;
  Part (&parts)[kStages];
  int lane;

  __device__ __forceinline__ void copy(const Part& part, int head, int stage) const {
    const bool own = part.source >= 0, finished = part.finished();
    const int tokens = min(part.end, part.token + kTile) - max(part.begin, part.token);
    const uint32_t barrier = finished ? shared.full(stage) : shared.loaded(stage);
    if (lane == 0) {
      parts[stage] = part;
      barrier_expect(barrier, max(tokens, 0) * 2 * kRowBytes);
      if (finished) barrier_arrive(shared.loaded(stage));
    }
    __syncwarp();
    const int width = arguments.heads * kHeadDim;
    const auto load = [&](int which, int key, int size) {
      const CUtensorMap* map = own ? arguments.chunk : which ? arguments.values : arguments.keys;
      tensor_load(shared.keys(stage) + which * kTileBytes + key * kRowBytes, map[size],
                  own ? (1 + which) * width + head * kHeadDim : 0, part.row(key, arguments.capacity), barrier);
    };
    if (part.whole(0, kTile, arguments.capacity)) {
      if (lane < 2) load(lane, 0, 0);
      return;
    }
    const int which = lane / 16, rest = lane % 16;
#pragma unroll 1
    for (int first = 0; first < kTile; first += 16) {
      // The largest box that has this lane's row and is whole, by its first row's lane.
#pragma unroll
      for (int size = 1; size < kSizes; ++size) {
        const int rows = box_rows(size), begin = first + rest / rows * rows;
        if (!part.whole(begin, rows, arguments.capacity)) continue;
        if (begin == first + rest) load(which, begin, size);
        break;
      }
    }
  }

  __device__ __forceinline__ void run() const {
    Ring<kStages> ring;
    // The ring may be settled; the chunk, which the kernel ahead writes, never is.
    const bool early = arguments.dependent_launch == MOSS_DEPENDENT_EARLY;
    if (!early) cudaGridDependencySynchronize();
#pragma unroll 1
    for (int index = blockIdx.x * arguments.chain; index < arguments.items;) {
      const Place place(arguments, index);
      index = place.next(arguments, index);
      const int valid = __ldcg(arguments.valid + place.row);
      const int64_t slot = __ldcg(arguments.slots + place.row), start = __ldcg(arguments.offset + slot);
      const Item item(arguments, place, valid, static_cast<int>(min(start, int64_t{arguments.capacity})));
      const int edge = static_cast<int>(start % arguments.capacity);
      const int ring_rows = static_cast<int>((slot * arguments.heads + item.head) * arguments.capacity);
      int token = item.begin * kTile, head = 0;
#pragma unroll 1
      for (int left = (item.end - item.begin) * item.heads; left > 0; --left, ring.advance()) {
        const Part part = {token,
                           -item.held,
                           item.valid,
                           token >= 0 ? item.row * arguments.tokens + token : -1,
                           ring_rows + head * arguments.capacity,
                           edge,
                           item.stored,
                           0};
        barrier_wait(shared.empty(ring.stage), ring.parity ^ 1);
        if (early && token >= 0) cudaGridDependencySynchronize();
        copy(part, item.head + head, ring.stage);
        if (++head == item.heads) head = 0, token += kTile;
      }
    }
    barrier_wait(shared.empty(ring.stage), ring.parity ^ 1);
    if (lane != 0) return;
    parts[ring.stage].done = 1;
    barrier_arrive(shared.loaded(ring.stage));
  }
};

// A warp that finishes every kFinishers-th stage.
struct Finisher {
  const Arguments& arguments;
  Memory shared;
  Part (&parts)[kStages];
  int number, lane;

  static constexpr int kRows = 32 / kPieces;  // of the warp at once, each by kPieces lanes
  static_assert(kStages % kFinishers == 0);

  // This lane's piece of a key; that of the value lies kTileBytes behind.
  __device__ __forceinline__ uint4* place(int stage, int key) const {
    const uint32_t address = shared.keys(stage) + key * kRowBytes + (lane % kPieces ^ key % 8) * 16;
    return static_cast<uint4*>(__cvta_shared_to_generic(address));
  }

  __device__ __forceinline__ void clear_missing(const Part& part, int stage) const {
    const int begin = part.begin - part.token, end = part.end - part.token;
#pragma unroll 1
    for (int key = lane / kPieces; key < kTile; key += kRows)
      if (key < begin || key >= end) place(stage, key)[0] = place(stage, key)[kTileBytes / 16] = uint4{};
  }

  __device__ __forceinline__ void write_ring(const Part& part, int stage) const {
    const int first = (part.edge + part.token) % arguments.capacity, capacity = arguments.capacity;
    const int begin = part.stored - part.token, end = min(part.end - part.token, kTile);
    const int64_t ring = static_cast<int64_t>(part.ring) * kHeadDim + 8 * (lane % kPieces);
    bf16* const ring_k = static_cast<bf16*>(arguments.ring_k) + ring;
    bf16* const ring_v = static_cast<bf16*>(arguments.ring_v) + ring;
    constexpr int kAtOnce = 4;  // rounds of kRows keys that are read before the first is written
#pragma unroll 1
    for (int key = lane / kPieces; key < end; key += kAtOnce * kRows) {
      uint4 keys[kAtOnce], values[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        keys[i] = place(stage, key + i * kRows)[0];
        values[i] = place(stage, key + i * kRows)[kTileBytes / 16];
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (key + i * kRows < begin || key + i * kRows >= end) continue;
        int row = first + key + i * kRows;
        while (row >= capacity) row -= capacity;
        // Not by assignment, which the compiler takes apart into words.
        __stwb(reinterpret_cast<uint4*>(ring_k + static_cast<int64_t>(row) * kHeadDim), keys[i]);
        __stwb(reinterpret_cast<uint4*>(ring_v + static_cast<int64_t>(row) * kHeadDim), values[i]);
      }
    }
  }

  // Every finisher waits for every stage: what is written takes the place of keys that must have arrived.
  __device__ __forceinline__ void run() const {
    Ring<kStages> ring;
#pragma unroll 1
    for (;; ring.advance()) {
      barrier_wait(shared.loaded(ring.stage), ring.parity);
      const Part& part = parts[ring.stage];
      const bool own = ring.stage % kFinishers == number;
      if (part.done) return;
      if (part.finished()) {
        barrier_wait(shared.full(ring.stage), ring.parity);
      } else if (own) {
        clear_missing(part, ring.stage);
        fence_async_shared();
        __syncwarp();
        if (lane == 0) barrier_arrive(shared.full(ring.stage));
      }
      if (own && part.source >= 0 && part.stored != kNever) write_ring(part, ring.stage);
      __syncwarp();
      if (lane == 0) barrier_arrive(shared.empty(ring.stage));
    }
  }
};

// Threads of a consumer wait for each other.
__device__ __forceinline__ void consumer_sync() {
  asm volatile("bar.sync %0, 128;" ::"r"(threadIdx.x / 128) : "memory");
}

// Where the attention of a tile of queries goes.
struct Output {
  int row, head, first, valid;  // `first`: query, kNever where there is none

  __device__ __forceinline__ void store(const Arguments& arguments, const Attention& attention) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = attention.total[half];
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      const int token = first + row_in_tile() + 8 * half;
      const float factor = token < valid ? 1.0f / total : 0.0f;
      const int64_t place = static_cast<int64_t>(row) * arguments.tokens + token;
      bf16* out = static_cast<bf16*>(arguments.out) + (place * arguments.heads + head) * kHeadDim;
#pragma unroll
      for (int block = 0; block < kHeadDim / 8; block += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* pair = &attention.result[4 * (block + i) + 2 * half];
          words[i] = token < valid ? pack_bf16(pair[0] * factor, pair[1] * factor) : 0;
        }
        transpose_quad(words);
        if (token < arguments.tokens)
          *reinterpret_cast<uint4*>(out + 8 * (block + threadIdx.x % 4)) = {words[0], words[1], words[2], words[3]};
      }
    }
  }
};

struct Consumer {
  const Arguments& arguments;
  Memory shared;
  const Part (&parts)[kStages];
  // Descriptor of the memory's first byte; so that it is not worked out anew for each product.
  const uint32_t base = __shfl_sync(0xffffffffu, swizzled_descriptor(shared.base), 0);
  Ring<kStages> ring = {};
  int item_heads = 0;

  // Of the keys in a stage. Eight rows of values follow eight others as far on as eight rows of keys.
  __device__ __forceinline__ uint32_t tile_descriptor(int stage) const {
    return (base | 1024 >> 4 << 16) + stage * (kStageBytes / 16);
  }
  __device__ __forceinline__ void release(int stage) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(shared.empty(stage));
  }
  // Releases stages unread, each once it is full: a barrier does not tell a round from the one before the last, so that
  // who had gone on past a stage that is not would find it full when it comes by again.
  __device__ __forceinline__ void skip(int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i, ring.advance()) {
      barrier_wait(shared.full(ring.stage), ring.parity);
      release(ring.stage);
    }
  }

  // Adds the last KEYS of a tile, `tile` being its first, whose scores are there. Returns while the last products are
  // under way, of which only those of the tile's second half still read weights.
  template <int KEYS>
  __device__ __forceinline__ void add(Attention& attention, int tile, int first, int oldest) const {
    constexpr int kPart = KEYS < kTile ? KEYS : kTile / 2;
    const int key = tile + kTile - KEYS;
    const uint32_t values = tile_descriptor(ring.stage) + kTileBytes / 16 + (kTile - KEYS) * (kRowBytes / 16);
    if (key + KEYS > first || key <= first + kTile - 1 - arguments.window || key < oldest)
      attention.mask<KEYS>(first, key, oldest, arguments.window);
    attention.follow<KEYS>(arguments.scale, arguments.unscale);
#pragma unroll
    for (int part = 0; part < KEYS; part += kPart) attention.add_values<kPart>(part, values, arguments.scale);
    wgmma_wait<KEYS != kPart>();
  }
  // Scores of the head's next tile, begun before the products of this one are done.
  __device__ __forceinline__ void advance(Attention& attention, uint32_t queries) {
    const int stage = ring.stage;
    ring.advance();
    skip(item_heads - 1);
    barrier_wait(shared.full(ring.stage), ring.parity);
    attention.multiply_keys<kTile>(queries, tile_descriptor(ring.stage));
    attention.wait();
    release(stage);
  }

  // Has the copy engine bring a consumer's queries of an item once no thread reads those before them. Where they are
  // not valid, or there are none, it brings what lies there.
  __device__ __forceinline__ void ask_queries(const Place& place, int group, int item_head, int item_tile) const {
    consumer_sync();
    if (threadIdx.x % 128) return;
    barrier_expect(shared.asked(group), kTileBytes);
    tensor_load(shared.queries(group), arguments.chunk[0], (place.head + item_head) * kHeadDim,
                place.row * arguments.tokens + place.first + item_tile * kTile, shared.asked(group));
  }

  // Attention of one tile of queries over an item's tiles of keys; `item_head`: which head of the item's it is.
  __device__ __forceinline__ void attend(Attention& attention, const Item& item, int first, int item_head,
                                         uint32_t query_tile) {
    const int oldest = max(first - arguments.window + 1, -item.held), begin = oldest >> 6;
    const uint32_t queries = base + (query_tile - shared.base) / 16;
    item_heads = item.heads;
    skip((begin - item.begin) * item.heads + item_head);
    int key = begin * kTile;
    attention.begin();
    barrier_wait(shared.full(ring.stage), ring.parity);
    if (key + kTile - oldest <= 16) {
      attention.multiply_keys<16>(queries, tile_descriptor(ring.stage));
      attention.wait();
      add<16>(attention, key, first, oldest);
    } else {
      attention.multiply_keys<kTile>(queries, tile_descriptor(ring.stage));
      attention.wait();
      add<kTile>(attention, key, first, oldest);
    }
#pragma unroll 1
    for (key += kTile; key <= first; key += kTile) {
      advance(attention, queries);
      add<kTile>(attention, key, first, oldest);
    }
    attention.wait();
    release(ring.stage);
    ring.advance();
  }

  __device__ __forceinline__ void run() {
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128 - 1, 0);
    const int item_head = group / arguments.item_tiles, item_tile = group % arguments.item_tiles;
    Attention attention;
    uint32_t parity = 0;
    cudaGridDependencySynchronize();
    int index = blockIdx.x * arguments.chain;
    Place place(arguments, index);
    ask_queries(place, group, item_head, item_tile);
#pragma unroll 1
    for (; index < arguments.items; parity ^= 1) {
      barrier_wait(shared.full(ring.stage), ring.parity);
      // Read by all lanes before one of them releases the stage.
      const int valid = __shfl_sync(0xffffffffu, parts[ring.stage].end, 0);
      const int held = -__shfl_sync(0xffffffffu, parts[ring.stage].begin, 0);
      const Item item(arguments, place, valid, held);
      const int first = item.first + item_tile * kTile;
      const bool wanted = item_head < item.heads, some = max(first - item.valid, item_head - item.heads) < 0;
      barrier_wait(shared.asked(group), parity);
      if (some) attend(attention, item, first, item_head, shared.queries(group));
      index = place.next(arguments, index), place = Place(arguments, index);
      if (index < arguments.items) ask_queries(place, group, item_head, item_tile);
      if (some)
        skip((item.end - first / kTile) * item.heads - 1 - item_head);
      else
        skip((item.end - item.begin) * item.heads);
      Output{item.row, item.head + item_head, wanted ? first : kNever, some ? item.valid : 0}.store(arguments,
                                                                                                    attention);
    }
  }
};

__global__ void __launch_bounds__(128 * (1 + kConsumers), 1)
    ring_attention_wide_kernel(const __grid_constant__ Arguments arguments) {
  extern __shared__ char memory[];
  __shared__ Part parts[kStages];
  const Memory shared{aligned_address(memory)};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, consumers = arguments.item_heads * arguments.item_tiles;
  cudaTriggerProgrammaticLaunchCompletion();
  if (threadIdx.x == 0) shared.init_barriers(consumers);
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_shrink<kProducerRegisters>();
    if (warp == 0)
      Loader{arguments, shared, parts, lane}.run();
    else
      Finisher{arguments, shared, parts, warp - 1, lane}.run();
  } else {
    registers_grow<kConsumerRegisters>();
    if (warp / 4 <= consumers) Consumer{arguments, shared, parts}.run();
  }
}

int64_t blocks(int64_t count, int64_t size) { return (count + size - 1) / size; }

// How many tiles of queries and how many heads an item has: what takes least by the measured time of an item, most of
// which is that of its tiles of keys. And whether blocks write the ring: not where chains of items would take longer.
void choose_items(Arguments& arguments, int multiprocessors) {
  const int64_t tiles = blocks(arguments.tokens, kTile), key_tiles = blocks(arguments.window - 1, kTile);
  double least = 0.0;
  for (int queries = 1; queries <= std::min<int64_t>(tiles, kConsumers); ++queries)
    for (int heads = 1; heads * queries <= kConsumers; ++heads) {
      const int64_t groups = blocks(tiles, queries), chains = blocks(arguments.heads, heads) * arguments.batch;
      const double item = 2.0 + heads * (key_tiles + queries) * (0.85 + 0.12 * queries);
      const double time = item * blocks(chains * groups, multiprocessors);
      if (least != 0.0 && time >= least) continue;
      least = time;
      arguments.item_tiles = queries, arguments.item_heads = heads;
    }
  arguments.query_groups = static_cast<int>(blocks(tiles, arguments.item_tiles));
  arguments.head_groups = static_cast<int>(blocks(arguments.heads, arguments.item_heads));
  const int64_t chains = int64_t{arguments.head_groups} * arguments.batch;
  arguments.write = arguments.write && blocks(chains, multiprocessors) * arguments.query_groups <=
                                           blocks(chains * arguments.query_groups, multiprocessors);
  arguments.chain = arguments.write ? arguments.query_groups : 1;
}

MossStatus make_maps(Arguments& arguments, int ring_rows) {
  MossStatus status = MOSS_OK;
  for (int i = 0; i < kSizes; ++i) {
    const int rows = box_rows(i);
    const auto make = [&](CUtensorMap* map, const void* pointer, int all_rows, int columns) {
      if (status == MOSS_OK) status = make_map(kOp, map, pointer, all_rows, columns, rows);
    };
    make(&arguments.chunk[i], arguments.qkv, arguments.batch * arguments.tokens, 3 * arguments.heads * kHeadDim);
    make(&arguments.keys[i], arguments.ring_k, ring_rows, kHeadDim);
    make(&arguments.values[i], arguments.ring_v, ring_rows, kHeadDim);
  }
  return status;
}

MossStatus write_ring(const RingAttentionParams& params) {
  RingKvWriteParams write = {};
  write.struct_size = sizeof(write);
  write.abi_version = params.abi_version;
  write.batch = params.batch, write.tokens = params.tokens;
  write.heads = params.heads, write.head_dim = params.head_dim, write.capacity = params.capacity;
  write.dtype = MOSS_BFLOAT16;
  write.dependent_launch = params.dependent_launch != 0;
  write.qkv = params.qkv;
  write.ring_k = params.ring_k, write.ring_v = params.ring_v;
  write.slots = params.slots, write.valid = params.valid, write.offset = params.offset;
  write.stream = params.stream;
  return moss_ring_kv_write(&write);
}

}  // namespace

MossStatus launch_wide(const RingAttentionParams& params) {
  const int64_t ring_rows = int64_t{params.ring_slots} * params.heads * params.capacity;
  MossStatus status = check_range(kOp, "ring_slots * heads * capacity", ring_rows, 1, kMostRows);
  if (status == MOSS_OK)
    status = check_range(kOp, "batch * tokens", int64_t{params.batch} * params.tokens, 1, kMostRows);
  int device = 0, multiprocessors = 0;
  if (status == MOSS_OK) status = check_cuda(cudaGetDevice(&device), kOp, "cudaGetDevice");
  if (status == MOSS_OK)
    status = check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), kOp,
                        "cudaDeviceGetAttribute");
  if (status != MOSS_OK) return status;
  Arguments arguments = {};
  static_cast<RingAttentionParams&>(arguments) = params;
  arguments.unscale = 1.0f / params.scale;
  choose_items(arguments, multiprocessors);
  const int64_t items = int64_t{arguments.query_groups} * arguments.head_groups * params.batch;
  status = check_range(kOp, "items", items, 1, kMostRows);
  if (status == MOSS_OK) status = make_maps(arguments, static_cast<int>(ring_rows));
  if (status == MOSS_OK)
    status = check_cuda(
        cudaFuncSetAttribute(ring_attention_wide_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Memory::kBytes),
        kOp, "cudaFuncSetAttribute");
  if (status != MOSS_OK) return status;
  arguments.items = static_cast<int>(items);
  const dim3 grid(std::min(arguments.items / arguments.chain, multiprocessors));
  status =
      launch_kernel(kOp, ring_attention_wide_kernel, arguments, grid, dim3(128 * (1 + kConsumers)), Memory::kBytes);
  return status == MOSS_OK && params.write && !arguments.write ? write_ring(params) : status;
}

}  // namespace moss
