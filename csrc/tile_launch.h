// How the kernels of codec_linear for many rows are launched: blocks that take several tiles, three tensor maps. Host
// code only.
#pragma once
#include <cuda.h>

#include "checks.h"
#include "device/tile_finish.cuh"
#include "launch.h"
#include "moss_kernels.h"
#include "tensor_map.h"

namespace moss {

struct TileArguments : CodecLinearParams {
  CUtensorMap x_map, weight_map, out_map;
  int column_tiles, tiles;
  int rotated;  // outputs, from the first on
};

// Of a tile and of the boxes in which rows come and outputs leave; threads and shared memory of a block.
struct TileShape {
  int rows, columns, box_rows, box_outputs, out_columns, threads, bytes;
};

inline int64_t count_tiles(const CodecLinearParams& params, int rows, int columns) {
  return int64_t{(params.outputs + columns - 1) / columns} * ((params.rows + rows - 1) / rows);
}

// kernels: by what follows the product, a Finish; null where there is none.
inline MossStatus launch_tiled(const char* op, const CodecLinearParams& params, int multiprocessors,
                               const TileShape& shape, void (*const (&kernels)[4])(TileArguments)) {
  TileArguments arguments = {};
  static_cast<CodecLinearParams&>(arguments) = params;
  arguments.column_tiles = (params.outputs + shape.columns - 1) / shape.columns;
  const int64_t tiles = count_tiles(params, shape.rows, shape.columns);
  MossStatus status = check_range(op, "tiles", tiles, 1, kMostRows);
  if (status == MOSS_OK) status = make_map(op, &arguments.x_map, params.x, params.rows, params.inputs, shape.box_rows);
  if (status == MOSS_OK)
    status = make_map(op, &arguments.weight_map, params.weight, params.outputs, params.inputs, shape.columns);
  if (status == MOSS_OK)
    status =
        make_map(op, &arguments.out_map, params.out, params.rows, params.outputs, shape.box_outputs, shape.out_columns);
  const auto kernel = kernels[params.scale ? kResidual : params.gelu ? kGelu : params.cos_sin ? kRotate : kStore];
  if (status == MOSS_OK && kernel == nullptr)
    status = set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: `cos_sin` must be null for %d rows in tiles of %d outputs",
                       op, params.rows, shape.columns);
  if (status == MOSS_OK)
    status = check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.bytes), op,
                        "cudaFuncSetAttribute");
  if (status != MOSS_OK) return status;
  arguments.tiles = static_cast<int>(tiles);
  arguments.rotated = params.outputs / 3 * 2;
  const dim3 grid(arguments.tiles < multiprocessors ? arguments.tiles : multiprocessors);
  return launch_kernel(op, kernel, arguments, grid, dim3(shape.threads), shape.bytes);
}

}  // namespace moss
