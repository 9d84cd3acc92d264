// The exact GELU.
#pragma once

namespace moss {

__device__ __forceinline__ float gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678f)); }

}  // namespace moss
