// The blocks of paged_attention on a CPU, one after the other.
#include "moss_kernels.h"
#include "simt.h"

struct uint2 {
  uint32_t x, y;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int distance) {
  return __shfl_sync(mask, value, simt::lane() ^ distance);
}
template <typename T>
T __ldcg(const T* pointer) {
  return *pointer;
}
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(value); }
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i)
    result |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

namespace moss::paged {

inline float exp2_approx(float x) { return std::exp2(x); }

inline uint32_t bf16_bits(float x) {
  const uint32_t bits = __float_as_uint(x);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t pack_bf16(float low, float high) { return bf16_bits(high) << 16 | bf16_bits(low); }
inline float2 unpack_bf16(uint32_t pair) { return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)}; }
inline float half_of(uint32_t pair, int i) { return __uint_as_float(i == 0 ? pair << 16 : pair & 0xffff0000u); }

// Leaves x in `all` for every lane of the warp.
inline void gather(const char* name, uint32_t x, uint32_t (&all)[32]) {
  const uint64_t* operands = simt::meet_warp(0xffffffffu, name, x);
  for (int i = 0; i < 32; ++i)
    all[i] = static_cast<uint32_t>(operands[i]);
}

inline void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  uint32_t a[4][32], b[2][32];
  gather("a0", a0, a[0]), gather("a1", a1, a[1]), gather("a2", a2, a[2]), gather("a3", a3, a[3]);
  gather("b0", b0, b[0]), gather("b1", b1, b[1]);
  const int group = simt::lane() / 4, quarter = simt::lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int column = 2 * quarter + i % 2;
    for (int k = 0; k < 16; ++k) {
      const int lane = k % 8 / 2, piece = k / 8;
      c[i] += half_of(a[2 * piece + i / 2][4 * group + lane], k % 2) * half_of(b[piece][4 * column + lane], k % 2);
    }
  }
}

inline uint32_t transpose(uint32_t x) {
  uint32_t all[32];
  gather("transpose", x, all);
  const int row = simt::lane() / 4, quarter = simt::lane() % 4;
  const auto element = [&](int source) { return bf16_bits(half_of(all[4 * source + row / 2], row % 2)); };
  return element(2 * quarter) | element(2 * quarter + 1) << 16;
}

// A copy is there at once; the barrier counts copies, so that a wait for another one is an error.
inline void copies_begin(uint64_t (&barriers)[2]) { barriers[0] = barriers[1] = 0; }
inline void copy_start(void* shared, const void* pointer, int bytes, uint64_t* barrier) {
  std::memcpy(shared, pointer, bytes);
  ++*barrier;
}
inline void copy_wait(uint64_t* barrier, uint32_t parity) {
  __syncwarp();
  if (*barrier == 0 || (*barrier - 1) % 2 != parity) std::abort();
}
template <typename T>
T load_kept(const T* pointer) {
  return *pointer;
}
inline void launch_dependents() {}

inline int arrive(int32_t* counter) { return std::exchange(*counter, *counter + 1); }

}  // namespace moss::paged

#include "device/paged_attention.cuh"

// moss_paged_attention on host memory, with params->parts as they are. `order` chooses how threads and blocks take
// turns. Returns null or an error.
extern "C" const char* emulate_paged_attention(const PagedAttentionParams* params, uint32_t order) {
  using namespace moss::paged;
  static Shared shared;
  const int blocks = params->batch * params->kv_heads * params->parts;
  for (int i = 0; i < blocks; ++i) {
    const int block = order % 2 == 0 ? i : blocks - 1 - i, part = block % params->parts;
    const int head = block / params->parts % params->kv_heads, row = block / params->parts / params->kv_heads;
    std::memset(static_cast<void*>(&shared), 0xff, sizeof(shared));
    const char* error = simt::launch(kThreads, order, [&](int thread) {
      attend(*params, shared, thread, head, row, part, 31 - __clz(params->parts), [] {});
    });
    if (error) return error;
  }
  return nullptr;
}
