// moss_backbone_linear: for up to 128 rows, where the time is that of streaming the weights. A block takes all rows, 64
// for each of its consumers, one or two warpgroups, and N outputs; one more warp keeps the copy engine ahead.
// The sum over a slice of K runs in steps of 16 in ascending order, as in the Triton kernel.
#include <cuda.h>
#include <cuda_bf16.h>

#include "device/linear_store.cuh"
#include "device/tile_product.cuh"
#include "launch.h"
#include "linear_checks.h"
#include "tensor_map.h"

namespace moss {
namespace {

constexpr char kOp[] = "backbone_linear";
constexpr int kMaxRows = 2 * kGroupRows;

// What the kernel reads: the caller's parameters, the tensors as the copy engine sees them, and counts.
struct Arguments : BackboneLinearParams {
  CUtensorMap x_map, weight_map;
  int steps;     // of a slice
  int box_rows;  // of x, that come at once
};

template <int N, LinearMode MODE, int CONSUMERS>
__device__ __forceinline__ void consume(const Arguments& arguments, Shared<N, CONSUMERS> shared, int column,
                                        int slice) {
  const int group = warpgroup();
  const Place place(arguments, group * kGroupRows, column);
  Ring<shared.kStages> ring;
  float sum[N / 2];
  multiply(sum, shared, ring, arguments.steps, group, true);
  // For kernels ahead that read what `out` held, and so that none ends before those ahead of it.
  cudaGridDependencySynchronize();
  // With so many rows what is stored would be written to memory before the next linear stores to the same place.
  constexpr bool kKept = CONSUMERS > 1;
  if constexpr (MODE == MOSS_LINEAR_PARTIAL)
    store_slice<N, kKept>(sum, place, static_cast<float*>(arguments.out) + slice * place.rows * place.outputs);
  else
    store<N, MODE == MOSS_LINEAR_GATE_UP, kKept>(sum, place, static_cast<__nv_bfloat16*>(arguments.out));
}

template <int N, LinearMode MODE, int CONSUMERS>
__global__ void __launch_bounds__(128 * CONSUMERS + 32)
    backbone_linear_kernel(const __grid_constant__ Arguments arguments) {
  extern __shared__ char memory[];
  const Shared<N, CONSUMERS> shared{kept_address(memory)};
  constexpr int kProducer = 128 * CONSUMERS;
  // A block of the next linear needs all shared memory: it starts where one of this has ended, and its ring fills while
  // the others end and what is in between runs.
  begin_tile(arguments, shared);
  const int column = blockIdx.x * N, slice = blockIdx.y;
  if (threadIdx.x < kProducer)
    consume<N, MODE>(arguments, shared, column, slice);
  else if (threadIdx.x == kProducer)
    produce_tile(arguments, shared, 0, column, slice * arguments.steps);
}

template <int N, LinearMode MODE, int CONSUMERS>
MossStatus launch(const BackboneLinearParams& params) {
  using Memory = Shared<N, CONSUMERS>;
  Arguments arguments = {};
  static_cast<BackboneLinearParams&>(arguments) = params;
  arguments.steps = params.inputs / params.slices / kStep;
  // A row beyond the last costs the copy engine no less than others; only the swizzle, of eight, needs some.
  arguments.box_rows = params.rows < Memory::kRows ? (params.rows + 7) / 8 * 8 : Memory::kRows;
  MossStatus status = make_map(kOp, &arguments.x_map, params.x, params.rows, params.inputs, arguments.box_rows);
  if (status == MOSS_OK) status = make_map(kOp, &arguments.weight_map, params.weight, params.outputs, params.inputs, N);
  const auto kernel = backbone_linear_kernel<N, MODE, CONSUMERS>;
  if (status == MOSS_OK)
    status = check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Memory::kBytes), kOp,
                        "cudaFuncSetAttribute");
  if (status != MOSS_OK) return status;
  const dim3 grid((params.outputs + N - 1) / N, params.slices);
  return launch_kernel(kOp, kernel, arguments, grid, dim3(128 * CONSUMERS + 32), Memory::kBytes);
}

// Widths of tiles that give the backbone's linears 128 blocks each, one for each of 132 multiprocessors or a few less.
template <int CONSUMERS>
MossStatus launch_mode(const BackboneLinearParams& params) {
  switch (params.mode) {
    case MOSS_LINEAR_WHOLE:
      return launch<48, MOSS_LINEAR_WHOLE, CONSUMERS>(params);
    case MOSS_LINEAR_GATE_UP:
      return launch<152, MOSS_LINEAR_GATE_UP, CONSUMERS>(params);
    default:
      return launch<80, MOSS_LINEAR_PARTIAL, CONSUMERS>(params);
  }
}

}  // namespace
}  // namespace moss

extern "C" MossStatus moss_backbone_linear(const BackboneLinearParams* params) {
  using namespace moss;
  MossStatus status = check_params(kOp, params);
  if (status == MOSS_OK && params->rows == 0) return MOSS_OK;
  if (status == MOSS_OK) status = check_linear(kOp, *params, MOSS_LINEAR_PARTIAL, kMaxRows);
  if (status != MOSS_OK) return status;
  return params->rows <= kGroupRows ? launch_mode<1>(*params) : launch_mode<2>(*params);
}
