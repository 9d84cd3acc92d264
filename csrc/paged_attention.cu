// moss_paged_attention: blocks share the splits of each row and key head; what one does is device/paged_attention.cuh.
#include "checks.h"
#include "device/mma.cuh"
#include "launch.h"

namespace moss::paged {

template <int STRIDE>
__device__ __forceinline__ void load_four(uint4 (&x)[4], const void* pointer) {
  asm volatile(
      "ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%16];\n"
      "ld.global.cg.v4.u32 {%4, %5, %6, %7}, [%16 + %17];\n"
      "ld.global.cg.v4.u32 {%8, %9, %10, %11}, [%16 + %18];\n"
      "ld.global.cg.v4.u32 {%12, %13, %14, %15}, [%16 + %19];"
      : "=r"(x[0].x), "=r"(x[0].y), "=r"(x[0].z), "=r"(x[0].w), "=r"(x[1].x), "=r"(x[1].y), "=r"(x[1].z),
        "=r"(x[1].w), "=r"(x[2].x), "=r"(x[2].y), "=r"(x[2].z), "=r"(x[2].w), "=r"(x[3].x), "=r"(x[3].y),
        "=r"(x[3].z), "=r"(x[3].w)
      : "l"(pointer), "n"(STRIDE), "n"(2 * STRIDE), "n"(3 * STRIDE));
}

__device__ __forceinline__ uint32_t transpose(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ int arrive(int32_t* counter) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

}  // namespace moss::paged

#include "device/paged_attention.cuh"

namespace moss {
namespace {

constexpr char kOp[] = "paged_attention";
constexpr int kBlocksPerMultiprocessor = 4;
// What the multiprocessors hold at once; more parts only wait for each other.
constexpr int64_t kEnoughBlocks = 512;
constexpr int kPrefetchedTiles = 2;

// A block's first tiles into L2. The row, its length and its pages may be stale here: they are hints, and checked.
__device__ __forceinline__ void prefetch_tiles(const PagedAttentionParams& params) {
  const int lane = threadIdx.x % 32;
  const auto read = [](const int32_t* pointer) { return *static_cast<const volatile int32_t*>(pointer); };
  const int64_t row = read(params.row_map + blockIdx.y);
  if (row < 0 || row >= params.pool_rows) return;
  const int stored = min(max(read(params.positions + row), 0), params.table_pages * params.page_size);
  paged::Walk walk = {static_cast<int>(blockIdx.z), 31 - __clz(gridDim.z), static_cast<int>(threadIdx.x / 32)};
  walk.set_length(stored);
  const paged::Pages pages = paged::Pages::of(params, row, blockIdx.x);
  for (int step = 0; step < min(walk.steps(), kPrefetchedTiles); ++step) {
    const int token = walk.token(step) + lane / 2;  // a line of 128 bytes is half a token
    const int page = token < stored ? read(pages.table + (token >> pages.size_log2)) : -1;
    if (page >= 0 && page < params.pages) {
      const int64_t place = pages.place(page, token) + lane % 2 * paged::kHalf;
      prefetch_l2(pages.keys + place);
      prefetch_l2(pages.values + place);
    }
  }
}

template <bool DEPENDENT>
__global__ void __launch_bounds__(paged::kThreads, kBlocksPerMultiprocessor)
    paged_attention_kernel(const PagedAttentionParams params) {
  __shared__ paged::Shared shared;
  if constexpr (DEPENDENT) {
    // Lets the next kernel start at its end, and not before: blocks that wait would take the place of these.
    prefetch_tiles(params);
    cudaGridDependencySynchronize();
  }
  paged::attend(params, shared, threadIdx.x, blockIdx.x, blockIdx.y, blockIdx.z, 31 - __clz(gridDim.z));
}

MossStatus check_power_of_two(const char* name, int value) {
  if ((value & (value - 1)) == 0) return MOSS_OK;
  return set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: `%s` must be a power of two, got %d", kOp, name, value);
}

MossStatus check(const PagedAttentionParams& params) {
  MossStatus status = check_range(kOp, "batch", params.batch, 0, 65535);
  if (status == MOSS_OK) status = check_range(kOp, "kv_heads", params.kv_heads, 1, 65535);
  if (status == MOSS_OK) status = check_range(kOp, "group", params.group, 1, paged::kMaxGroup);
  if (status == MOSS_OK) status = check_range(kOp, "head_dim", params.head_dim, paged::kHeadDim, paged::kHeadDim);
  if (status == MOSS_OK) status = check_at_least(kOp, "page_size", params.page_size, paged::kTile);
  if (status == MOSS_OK) status = check_power_of_two("page_size", params.page_size);
  if (status == MOSS_OK) status = check_at_least(kOp, "pages", params.pages, 1);
  if (status == MOSS_OK) status = check_at_least(kOp, "table_pages", params.table_pages, 1);
  if (status == MOSS_OK) status = check_at_least(kOp, "pool_rows", params.pool_rows, 1);
  if (status == MOSS_OK) status = check_range(kOp, "parts", params.parts, 0, paged::kMaxSplits);
  if (status == MOSS_OK) status = check_power_of_two("parts", params.parts);
  const struct {
    const char* name;
    const void* pointer;
    size_t bytes;
  } pointers[] = {
      {"qkv", params.qkv, 16},
      {"q_norm", params.q_norm, 4},
      {"k_norm", params.k_norm, 4},
      {"cos_sin", params.cos_sin, 4},
      {"key_pages", params.key_pages, 16},
      {"value_pages", params.value_pages, 16},
      {"page_table", params.page_table, 4},
      {"positions", params.positions, 4},
      {"row_map", params.row_map, 4},
      {"active", params.active, 1},
      {"out", params.out, 8},
      {"partials", params.partials, 16},
      {"arrived", params.arrived, 4},
  };
  for (const auto& entry : pointers)
    if (status == MOSS_OK) status = check_pointer(kOp, entry.name, entry.pointer, entry.bytes);
  return status;
}

int parts_of(const PagedAttentionParams& params) {
  if (params.parts > 0) return params.parts;
  int parts = 1;
  while (parts < paged::kMaxSplits && int64_t{params.batch} * params.kv_heads * parts < kEnoughBlocks)
    parts *= 2;
  return parts;
}

}  // namespace
}  // namespace moss

extern "C" MossStatus moss_paged_attention(const PagedAttentionParams* params) {
  using namespace moss;
  MossStatus status = check_params(kOp, params);
  if (status == MOSS_OK && params->batch == 0) return MOSS_OK;
  if (status == MOSS_OK) status = check(*params);
  if (status != MOSS_OK) return status;
  auto* kernel = params->dependent_launch ? paged_attention_kernel<true> : paged_attention_kernel<false>;
  const dim3 grid(params->kv_heads, params->batch, parts_of(*params));
  return launch_kernel(kOp, kernel, *params, grid, dim3(paged::kThreads));
}
