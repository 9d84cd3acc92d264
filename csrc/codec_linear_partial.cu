// moss_codec_linear where the next norm adds up, or the attention: each block leaves the sums over its slice of the
// inputs in memory, so that none waits for another. The weights are on their way before the kernel waits for the one
// ahead of it.
#include <cuda.h>

#include "codec_linear.h"
#include "device/linear_store.cuh"
#include "device/tile_product.cuh"
#include "launch.h"
#include "tensor_map.h"

namespace moss {
namespace {

constexpr char kOp[] = "codec_linear";

struct Arguments : CodecLinearParams {
  CUtensorMap x_map, weight_map;
  int steps;     // of a slice
  int box_rows;  // of x, that come at once
};

// Of small tiles two blocks fit on a multiprocessor; a large one leaves room for those of the norm.
constexpr int most_bytes(int groups) { return (groups == 1 ? 106 : 198) << 10; }

// Of `stages` stages.
constexpr int bytes_of(int columns, int groups, int stages) {
  return kBarrierBytes + kAlignment + stages * (groups * kGroupRows + columns) * kStep * 2;
}

// BYTES: of shared memory, at most.
template <int COLUMNS, int GROUPS, int BYTES>
__global__ void __launch_bounds__(128 * GROUPS + 32, GROUPS == 1 ? 2 : 1)
    codec_linear_partial_kernel(const __grid_constant__ Arguments arguments) {
  extern __shared__ char memory[];
  const Shared<COLUMNS, GROUPS, 0, BYTES> shared{kept_address(memory)};
  constexpr int kProducer = 128 * GROUPS;
  begin_tile(arguments, shared);
  // A tile at the edge begins earlier, since the copy engine takes longer for what lies beyond a matrix than for the
  // same within; what it has in common with the one before, both write alike.
  const int slice = blockIdx.x;
  const int first_column = max(min(static_cast<int>(blockIdx.y) * COLUMNS, arguments.outputs - COLUMNS), 0);
  const int first_row = max(min(static_cast<int>(blockIdx.z) * shared.kRows, arguments.rows - shared.kRows), 0);
  if (threadIdx.x >= kProducer) {
    if (threadIdx.x == kProducer) produce_tile(arguments, shared, first_row, first_column, slice * arguments.steps);
    return;
  }
  const int group = warpgroup();
  Ring<shared.kStages> ring;
  float sum[COLUMNS / 2];
  multiply(sum, shared, ring, arguments.steps, group, true);
  // For those that read what `out` held, and so that none ends before those ahead of it.
  cudaGridDependencySynchronize();
  const Place place(arguments, first_row + group * kGroupRows, first_column);
  // Kept in L2, where the next layer's take their place: what streams through would drive them out to memory.
  store_slice<COLUMNS, true>(sum, place, static_cast<float*>(arguments.out) + slice * place.rows * place.outputs);
}

template <int COLUMNS, int GROUPS, int BYTES>
MossStatus launch(const CodecLinearParams& params) {
  using Own = Shared<COLUMNS, GROUPS, 0, BYTES>;
  Arguments arguments = {};
  static_cast<CodecLinearParams&>(arguments) = params;
  arguments.steps = params.inputs / params.slices / kStep;
  // A row beyond the last costs the copy engine no less than others; only the swizzle, of eight, needs some.
  arguments.box_rows = params.rows < Own::kRows ? (params.rows + 7) / 8 * 8 : Own::kRows;
  MossStatus status = make_map(kOp, &arguments.x_map, params.x, params.rows, params.inputs, arguments.box_rows);
  if (status == MOSS_OK)
    status = make_map(kOp, &arguments.weight_map, params.weight, params.outputs, params.inputs, COLUMNS);
  const auto kernel = codec_linear_partial_kernel<COLUMNS, GROUPS, BYTES>;
  if (status == MOSS_OK)
    status = check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Own::kBytes), kOp,
                        "cudaFuncSetAttribute");
  if (status != MOSS_OK) return status;
  const dim3 grid(params.slices, (params.outputs + COLUMNS - 1) / COLUMNS, (params.rows + Own::kRows - 1) / Own::kRows);
  return launch_kernel(kOp, kernel, arguments, grid, dim3(128 * GROUPS + 32), Own::kBytes);
}

// What there is a kernel for: slices of up to `most_steps`, else any.
struct Variant {
  int rows, columns, most_steps;
  MossStatus (*launch)(const CodecLinearParams&);
};

template <int COLUMNS, int GROUPS>
constexpr Variant kVariant = {GROUPS * kGroupRows, COLUMNS, INT32_MAX, launch<COLUMNS, GROUPS, most_bytes(GROUPS)>};

// With no more stages than steps: the attention behind it begins where there is room for it.
template <int COLUMNS, int GROUPS, int STEPS>
constexpr Variant kShort = {GROUPS * kGroupRows, COLUMNS, STEPS,
                            launch<COLUMNS, GROUPS, bytes_of(COLUMNS, GROUPS, STEPS)>};

constexpr Variant kVariants[] = {kShort<64, 1, 5>, kVariant<32, 1>, kVariant<40, 1>, kVariant<48, 1>,
                                 kVariant<64, 1>,  kVariant<48, 2>, kVariant<64, 2>, kVariant<48, 3>};

}  // namespace

MossStatus launch_partial(const CodecLinearParams& params) {
  const int steps = params.inputs / params.slices / kStep;
  for (const Variant& variant : kVariants)
    if (variant.rows == params.tile_rows && variant.columns == params.tile_columns && steps <= variant.most_steps)
      return variant.launch(params);
  return set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: there is no kernel for partial sums in tiles of %d x %d", kOp,
                   params.tile_rows, params.tile_columns);
}

}  // namespace moss
