// What moss_prefill_linear has kernels for. Host code only.
#pragma once
#include <algorithm>
#include <cstdint>

#include "error.h"
#include "moss_kernels.h"

namespace moss {

constexpr int kTileCycles = 3000;  // that a tile takes beside its products

// Of the products of a stage with so many times 64 rows and `columns` outputs: cycles of the tensor cores, or of shared
// memory if those are more, which takes and gives 128 bytes in one, and operands of 64 inputs to each 64 rows.
constexpr int64_t stage_cycles(int groups, int columns) {
  return std::max(2 * groups * columns, (groups + 1) * columns + 128 * groups);
}

struct PrefillVariant {
  LinearMode mode;
  int rows, columns;  // of a tile
  // Of the multiprocessor with the most to do.
  int64_t (*cycles)(const PrefillLinearParams&, int multiprocessors);
  MossStatus (*launch)(const PrefillLinearParams&, int multiprocessors);
};

// Those of prefill_linear_pingpong.cu.
extern const PrefillVariant kPingpongVariants[3];

}  // namespace moss
