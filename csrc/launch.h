// Launches of the kernels behind the C ABI. Host code only.
#pragma once

#include <cuda_runtime.h>

#include "error.h"

namespace moss {

// Launch a kernel that takes a Params struct, on the struct's stream, with `dynamic_bytes` of shared memory beside what
// it declares. With `dependent_launch` the kernel may start before the one ahead of it in the stream has ended, and
// must itself wait for that one's writes. `cluster`: blocks of a cluster.
template <typename Params>
MossStatus launch_kernel(const char* op, void (*kernel)(Params), const Params& params, dim3 grid, dim3 block,
                         int dynamic_bytes = 0, int cluster = 1) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = dynamic_bytes;
  config.stream = static_cast<cudaStream_t>(params.stream);
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (params.dependent_launch) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
  return check_cuda(cudaLaunchKernelEx(&config, kernel, params), op, "cudaLaunchKernelEx");
}

}  // namespace moss
