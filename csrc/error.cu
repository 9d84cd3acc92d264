#include "error.h"

#include <cstdarg>
#include <cstdio>

namespace moss {
namespace {

thread_local char last_error_message[512] = "";

// The device cannot run this build's kernels, or there is none: what a caller can act on without reading CUDA's names.
MossStatus status_of(cudaError_t error) {
  switch (error) {
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
      return MOSS_ERROR_NO_DEVICE;
    case cudaErrorNoKernelImageForDevice:
      return MOSS_ERROR_UNSUPPORTED;
    default:
      return MOSS_ERROR_CUDA;
  }
}

}  // namespace

MossStatus set_error(MossStatus status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(last_error_message, sizeof(last_error_message), format, arguments);
  va_end(arguments);
  return status;
}

MossStatus check_cuda(cudaError_t error, const char* op, const char* what) {
  if (error == cudaSuccess) return MOSS_OK;
  cudaGetLastError();
  return set_error(status_of(error), "`%s`: %s failed with %s (%s)", op, what, cudaGetErrorName(error),
                   cudaGetErrorString(error));
}

MossStatus check_header(const char* op, const void* params, uint32_t struct_size, uint32_t abi_version, uint32_t size) {
  if (params == nullptr) {
    return set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: the parameter struct must not be null", op);
  }
  if (abi_version != MOSS_ABI_VERSION) {
    return set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: `abi_version` must be %u, got %u", op, MOSS_ABI_VERSION,
                     abi_version);
  }
  if (struct_size != size) {
    return set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: `struct_size` must be %u, got %u", op, size, struct_size);
  }
  return MOSS_OK;
}

}  // namespace moss

extern "C" {

const char* moss_last_error_message(void) { return moss::last_error_message; }

const char* moss_status_string(MossStatus status) {
  switch (status) {
    case MOSS_OK:
      return "MOSS_OK";
    case MOSS_ERROR_INVALID_ARGUMENT:
      return "MOSS_ERROR_INVALID_ARGUMENT";
    case MOSS_ERROR_UNSUPPORTED:
      return "MOSS_ERROR_UNSUPPORTED";
    case MOSS_ERROR_NO_DEVICE:
      return "MOSS_ERROR_NO_DEVICE";
    case MOSS_ERROR_CUDA:
      return "MOSS_ERROR_CUDA";
  }
  return "unknown status";
}

}  // extern "C"
