// moss_paged_attention: blocks share the splits of each row and key head; what one does is device/paged_attention.cuh.
#include "checks.h"
#include "device/bulk_copy.cuh"
#include "device/mma.cuh"
#include "launch.h"

namespace moss::paged {

__device__ __forceinline__ void copies_begin(uint64_t (&barriers)[2]) {
  barrier_init(shared_address(&barriers[0]), 1);
  barrier_init(shared_address(&barriers[1]), 1);
  fence_async_shared();
}

__device__ __forceinline__ void copy_start(void* shared, const void* pointer, int bytes, uint64_t* barrier) {
  barrier_expect(shared_address(barrier), bytes);
  bulk_load(shared_address(shared), pointer, bytes, shared_address(barrier), policy_evict_first());
}

__device__ __forceinline__ void copy_wait(uint64_t* barrier, uint32_t parity) {
  barrier_wait(shared_address(barrier), parity);
}

// Past L1, where a line may be older than what a kernel of this stream has written.
template <typename T>
__device__ __forceinline__ T load_kept(const T* pointer) {
  static_assert(sizeof(T) == 1 || sizeof(T) == 4);
  uint32_t bits;
  if constexpr (sizeof(T) == 1)
    asm volatile("ld.global.cg.L2::cache_hint.u8 %0, [%1], %2;"
                 : "=r"(bits)
                 : "l"(pointer), "l"(policy_evict_last())
                 : "memory");
  else
    asm volatile("ld.global.cg.L2::cache_hint.b32 %0, [%1], %2;"
                 : "=r"(bits)
                 : "l"(pointer), "l"(policy_evict_last())
                 : "memory");
  return static_cast<T>(bits);
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

__device__ __forceinline__ void launch_dependents() { cudaTriggerProgrammaticLaunchCompletion(); }

}  // namespace moss::paged

#include "device/paged_attention.cuh"

namespace moss {
namespace {

constexpr char kOp[] = "paged_attention";
constexpr int kBlocksPerMultiprocessor = 4;
// Two for each multiprocessor keep the memory at work; more parts wait for each other, and for their partial results.
constexpr int64_t kEnoughBlocks = 264;
constexpr int kShared = sizeof(paged::Shared);

__global__ void __launch_bounds__(paged::kThreads, kBlocksPerMultiprocessor)
    paged_attention_kernel(const PagedAttentionParams params) {
  extern __shared__ __align__(128) uint8_t memory[];
  paged::attend(params, *reinterpret_cast<paged::Shared*>(memory), threadIdx.x, blockIdx.x, blockIdx.y, blockIdx.z,
                31 - __clz(gridDim.z), [] { cudaGridDependencySynchronize(); });
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
  if (status == MOSS_OK)
    status = check_range(kOp, "dependent_launch", params.dependent_launch, 0, MOSS_DEPENDENT_EARLY);
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
  status =
      check_cuda(cudaFuncSetAttribute(paged_attention_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared),
                 kOp, "cudaFuncSetAttribute");
  if (status != MOSS_OK) return status;
  const dim3 grid(params->kv_heads, params->batch, parts_of(*params));
  return launch_kernel(kOp, paged_attention_kernel, *params, grid, dim3(paged::kThreads), kShared);
}
