// Philox4x32-10 (Salmon et al., SC'11), reduced to the one word that a draw uses.
#pragma once
#include <cstdint>

namespace moss {

// First output word for key = (low, high half of `seed`), counter = (frame, channel, 0, 0).
__device__ __forceinline__ uint32_t philox_word(uint64_t seed, uint32_t frame, uint32_t channel) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  uint32_t c0 = frame, c1 = channel, c2 = 0, c3 = 0;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t hi0 = __umulhi(0xD2511F53u, c0), lo0 = 0xD2511F53u * c0;
    const uint32_t hi1 = __umulhi(0xCD9E8D57u, c2), lo1 = 0xCD9E8D57u * c2;
    c0 = hi1 ^ c1 ^ k0;
    c1 = lo1;
    c2 = hi0 ^ c3 ^ k1;
    c3 = lo0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c0;
}

}  // namespace moss
