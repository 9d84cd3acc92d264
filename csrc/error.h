// Statuses and messages for the launchers behind the C ABI. Host code only.
#pragma once

#include <cuda_runtime_api.h>

#include "moss_kernels.h"

namespace moss {

// Store a printf-style message for moss_last_error_message() and return `status`, so that a launcher can write
//   return set_error(MOSS_ERROR_INVALID_ARGUMENT, "`sample_codebook`: `vocab` must be 2 .. 4096, got %d", vocab);
__attribute__((format(printf, 2, 3))) MossStatus set_error(MossStatus status, const char* format, ...);

// Status of a CUDA runtime result. `what` names the call in the message. Clears the runtime's sticky "last error".
MossStatus check_cuda(cudaError_t error, const char* op, const char* what);

// Check what all Params structs begin with: a pointer that is not null, this header's size and version.
MossStatus check_header(const char* op, const void* params, uint32_t struct_size, uint32_t abi_version, uint32_t size);

template <typename Params>
MossStatus check_params(const char* op, const Params* params) {
  const bool null = params == nullptr;
  return check_header(op, params, null ? 0 : params->struct_size, null ? 0 : params->abi_version, sizeof(Params));
}

}  // namespace moss
