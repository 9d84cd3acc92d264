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

// A row-major bf16 matrix, for boxes of 64 or 32 columns with a swizzle as wide, or of others without one; what a box
// has beyond the matrix is zero.
inline MossStatus make_map(const char* op, CUtensorMap* map, const void* pointer, int rows, int columns, int box_rows,
                           int box_columns = 64) {
  static std::atomic<EncodeTensorMap> known{nullptr};
  EncodeTensorMap encode = known;
  if (encode == nullptr) {
    const MossStatus status = find_encode(op, &encode);
    if (status != MOSS_OK) return status;
    known = encode;
  }
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t stride[] = {sizes[0] * 2};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)}, ones[] = {1, 1};
  const CUtensorMapSwizzle swizzle = box_columns == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : box_columns == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                         : CU_TENSOR_MAP_SWIZZLE_NONE;
  const CUresult result = encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(pointer), sizes, stride,
                                 box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return MOSS_OK;
  return set_error(MOSS_ERROR_CUDA, "`%s`: cuTensorMapEncodeTiled failed with %d", op, static_cast<int>(result));
}

}  // namespace moss
