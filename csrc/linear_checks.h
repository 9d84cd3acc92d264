// Argument checks of the backbone's linears. Host code only.
#pragma once

#include "checks.h"
#include "device/tile_product.cuh"

namespace moss {

// `last_mode`, `most_rows`: the largest that the op takes.
template <typename Params>
MossStatus check_linear(const char* op, const Params& params, LinearMode last_mode, int64_t most_rows) {
  MossStatus status = check_range(op, "mode", params.mode, MOSS_LINEAR_WHOLE, last_mode);
  if (status == MOSS_OK) status = check_range(op, "rows", params.rows, 0, most_rows);
  const bool sliced = params.mode == MOSS_LINEAR_PARTIAL || params.mode == MOSS_LINEAR_ADD;
  if (status == MOSS_OK) status = check_range(op, "slices", params.slices, 1, sliced ? 64 : 1);
  if (status == MOSS_OK) status = check_range(op, "outputs", params.outputs, 16, kMostRows);
  if (status == MOSS_OK) status = check_at_least(op, "inputs", params.inputs, kStep);
  if (status == MOSS_OK && (params.outputs % 16 != 0 || params.inputs % (params.slices * kStep) != 0))
    status = set_error(MOSS_ERROR_INVALID_ARGUMENT,
                       "`%s`: `outputs` must be a multiple of 16 and `inputs` of %d, got %d and %d", op,
                       params.slices * kStep, params.outputs, params.inputs);
  if (status == MOSS_OK) status = check_pointer(op, "x", params.x, 16);
  if (status == MOSS_OK) status = check_pointer(op, "weight", params.weight, 16);
  if (status == MOSS_OK) status = check_pointer(op, "out", params.out, 16);
  return status;
}

}  // namespace moss
