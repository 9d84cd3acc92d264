// Version of the library and description of a GPU.
#include <cuda_runtime_api.h>

#include "error.h"
#include "moss_kernels.h"

namespace moss {
namespace {

constexpr char kOp[] = "moss_device_query";

__global__ void probe() {}

// Asks the runtime for a kernel that is built like all others. Exact for every form of CMAKE_CUDA_ARCHITECTURES
// (real, virtual, architecture-specific), which comparing numbers would not be.
MossStatus has_device_code(int32_t* result) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, probe);
  *result = error == cudaSuccess;
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    cudaGetLastError();
    return MOSS_OK;
  }
  return check_cuda(error, kOp, "cudaFuncGetAttributes");
}

MossStatus describe(int32_t device, MossDeviceInfo* info) {
  cudaDeviceProp properties;
  if (const MossStatus status =
          check_cuda(cudaGetDeviceProperties(&properties, device), kOp, "cudaGetDeviceProperties")) {
    return status;
  }
  info->compute_capability_major = properties.major;
  info->compute_capability_minor = properties.minor;
  info->multiprocessors = properties.multiProcessorCount;
  info->l2_bytes = properties.l2CacheSize;
  info->memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);

  int current = 0;
  if (const MossStatus status = check_cuda(cudaGetDevice(&current), kOp, "cudaGetDevice")) return status;
  if (const MossStatus status = check_cuda(cudaSetDevice(device), kOp, "cudaSetDevice")) return status;
  const MossStatus status = has_device_code(&info->has_device_code);
  const MossStatus restored = check_cuda(cudaSetDevice(current), kOp, "cudaSetDevice");
  return status ? status : restored;
}

}  // namespace
}  // namespace moss

extern "C" {

const char* moss_version(void) { return MOSS_VERSION; }

uint32_t moss_abi_version(void) { return MOSS_ABI_VERSION; }

MossStatus moss_device_query(int32_t device, MossDeviceInfo* info) {
  if (const MossStatus status = moss::check_params(moss::kOp, info)) return status;
  int count = 0;
  const MossStatus counted = moss::check_cuda(cudaGetDeviceCount(&count), moss::kOp, "cudaGetDeviceCount");
  info->device_count = counted ? 0 : count;
  if (counted) return counted;
  if (device < 0 || device >= count) {
    return moss::set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: `device` must be 0 .. %d, got %d", moss::kOp, count - 1,
                           device);
  }
  return moss::describe(device, info);
}

}  // extern "C"
