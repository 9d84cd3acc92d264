// Descriptions of matrices for the copy engine. Host code only.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>

#include "error.h"

namespace moss {

using EncodeTensorMap = decltype(&cuTensorMapEncodeTiled);

// A driver's function, so that the library needs no libcuda to load.
inline MossStatus find_encode(const char* op, EncodeTensorMap* encode) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const auto error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
  *encode = reinterpret_cast<EncodeTensorMap>(found);
  if (error == cudaSuccess && found == nullptr)
    return set_error(MOSS_ERROR_NO_DEVICE, "`%s`: the driver has no cuTensorMapEncodeTiled", op);
  return check_cuda(error, op, "cudaGetDriverEntryPointByVersion");
}

// Asked for once.
inline MossStatus known_encode(const char* op, EncodeTensorMap* encode) {
  static std::atomic<EncodeTensorMap> known{nullptr};
  *encode = known;
  if (*encode != nullptr) return MOSS_OK;
  const MossStatus status = find_encode(op, encode);
  if (status == MOSS_OK) known = *encode;
  return status;
}

// A bf16 tensor. `strides`: in bytes, of all dimensions but the first.
template <int RANK>
MossStatus encode_map(const char* op, CUtensorMap* map, const void* pointer, const cuuint64_t (&sizes)[RANK],
                      const cuuint64_t (&strides)[RANK - 1], const cuuint32_t (&box)[RANK],
                      CUtensorMapSwizzle swizzle) {
  EncodeTensorMap encode;
  const MossStatus status = known_encode(op, &encode);
  if (status != MOSS_OK) return status;
  cuuint32_t ones[RANK];
  for (cuuint32_t& one : ones) one = 1;
  const CUresult result = encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, RANK, const_cast<void*>(pointer), sizes,
                                 strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return MOSS_OK;
  return set_error(MOSS_ERROR_CUDA, "`%s`: cuTensorMapEncodeTiled failed with %d", op, static_cast<int>(result));
}

// A row-major bf16 matrix, for boxes of 64 or 32 columns with a swizzle as wide, or of others without one; what a box
// has beyond the matrix is zero.
inline MossStatus make_map(const char* op, CUtensorMap* map, const void* pointer, int rows, int columns, int box_rows,
                           int box_columns = 64) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t stride[] = {sizes[0] * 2};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)};
  const CUtensorMapSwizzle swizzle = box_columns == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : box_columns == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                         : CU_TENSOR_MAP_SWIZZLE_NONE;
  return encode_map<2>(op, map, pointer, sizes, stride, box, swizzle);
}

// Weights [outputs, inputs], for boxes of 64 inputs of `box_outputs`, a multiple of 32, so arranged that the sums of
// wgmma which a thread has of 32 outputs are of eight neighbours: row 8i + 2q + e of the box has output 8q + 2i + e.
inline MossStatus make_runs_map(const char* op, CUtensorMap* map, const void* pointer, int outputs, int inputs,
                                int box_outputs) {
  const cuuint64_t row = static_cast<cuuint64_t>(inputs) * 2;
  const cuuint64_t sizes[] = {row / 2, 2, 4, 4, static_cast<cuuint64_t>(outputs) / 32};
  const cuuint64_t strides[] = {row, 8 * row, 2 * row, 32 * row};
  const cuuint32_t box[] = {64, 2, 4, 4, static_cast<cuuint32_t>(box_outputs) / 32};
  return encode_map<5>(op, map, pointer, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
}

}  // namespace moss
