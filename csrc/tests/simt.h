// Runs device code of one thread block on one CPU thread, without CUDA.
//
// Each thread is a fiber. Barriers and warp intrinsics are meetings: a thread leaves its operand and waits until all
// have come. Of the threads that can go on, the one that `order` ranks first always runs, up to its next meeting, so
// that it runs as far ahead of the others as barriers allow: code that lacks one gives another result under another
// order. Switches inside a stretch between meetings are not tried. The error of an approximate division varies with the
// order as well.
#pragma once

#include <math.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <type_traits>
#include <utility>

#define __device__
#define __forceinline__ inline

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

using std::max;
using std::min;

namespace simt {

constexpr int kMaxThreads = 256;
constexpr int kMaxWarps = kMaxThreads / 32;
constexpr size_t kStackBytes = 64 << 10;

struct Thread {
  std::unique_ptr<char[]> stack;
  jmp_buf context;
  bool started = false;
};

// Where the `size` threads from `first` on wait for each other. Operands are kept twice: a thread may come to the next
// meeting before the others have read the operands of this one, but not to the one after that.
struct Meeting {
  int first, size;
  const char* name = nullptr;  // of the intrinsic that the first thread called
  int arrived = 0;
  unsigned generation = 0;
  uint64_t operand[2][kMaxThreads] = {};
};

struct Block {
  int threads = 0;
  uint32_t order = 0;
  int current = 0;
  int running = 0;                   // threads that have not returned
  int rank[kMaxThreads];             // by thread
  int thread_at[kMaxThreads];        // by rank
  uint64_t ready[kMaxThreads / 64];  // bit per rank
  Thread thread[kMaxThreads];
  Meeting barrier, warp[kMaxWarps];
  std::function<void(int)> body;
  jmp_buf caller;
  const char* error = nullptr;
};

inline Block block;

[[noreturn]] inline void fail(const char* message) {
  block.error = message;
  _longjmp(block.caller, 1);
}

inline void set_ready(int thread, bool ready) {
  const int rank = block.rank[thread];
  const uint64_t bit = uint64_t{1} << (rank & 63);
  block.ready[rank >> 6] = ready ? block.ready[rank >> 6] | bit : block.ready[rank >> 6] & ~bit;
}

inline int first_ready() {
  for (int i = 0; i * 64 < block.threads; ++i)
    if (block.ready[i]) return block.thread_at[i * 64 + __builtin_ctzll(block.ready[i])];
  fail("deadlock: a thread waits for others that have returned or wait elsewhere");
}

inline void run_thread();

[[noreturn]] inline void resume(int index) {
  Thread& thread = block.thread[index];
  block.current = index;
  if (thread.started) _longjmp(thread.context, 1);
  thread.started = true;
  if (!thread.stack) thread.stack.reset(new char[kStackBytes]);
  ucontext_t start;
  getcontext(&start);
  start.uc_stack.ss_sp = thread.stack.get();
  start.uc_stack.ss_size = kStackBytes;
  start.uc_link = nullptr;
  makecontext(&start, run_thread, 0);
  setcontext(&start);
  __builtin_unreachable();
}

inline void switch_threads() {
  const int next = first_ready();
  // _setjmp, unlike swapcontext, makes no system call.
  if (next != block.current && _setjmp(block.thread[block.current].context) == 0) resume(next);
}

// A fiber serves one launch after the other.
inline void run_thread() {
  for (;;) {
    block.body(block.current);
    set_ready(block.current, false);
    if (_setjmp(block.thread[block.current].context) == 0) {
      if (--block.running == 0) _longjmp(block.caller, 1);
      resume(first_ready());
    }
  }
}

// Returns the operands of all threads of the meeting.
inline const uint64_t* meet(Meeting& meeting, const char* name, uint64_t operand) {
  if (meeting.arrived == 0) meeting.name = name;
  if (std::strcmp(meeting.name, name) != 0) fail("threads that must meet call different intrinsics");
  uint64_t* operands = meeting.operand[meeting.generation & 1];
  operands[block.current - meeting.first] = operand;
  if (++meeting.arrived < meeting.size) {
    set_ready(block.current, false);
  } else {
    meeting.arrived = 0;
    ++meeting.generation;
    for (int i = 0; i < meeting.size; ++i)
      set_ready(meeting.first + i, true);
  }
  switch_threads();
  return operands;
}

inline const uint64_t* meet_warp(uint32_t mask, const char* name, uint64_t operand) {
  if (mask != 0xffffffffu) fail("only whole warps can meet");
  return meet(block.warp[block.current / 32], name, operand);
}

inline int lane() { return block.current & 31; }

// Order 0 ranks threads upward, 1 downward, others at random.
inline void set_order(uint32_t order) {
  block.order = order;
  std::iota(block.thread_at, block.thread_at + block.threads, 0);
  if (order == 1) std::reverse(block.thread_at, block.thread_at + block.threads);
  for (int i = block.threads - 1; i > 0 && order > 1; --i) {
    order = order * 1664525u + 1013904223u;
    std::swap(block.thread_at[i], block.thread_at[(order >> 8) % (i + 1)]);
  }
  for (int i = 0; i < block.threads; ++i)
    block.rank[block.thread_at[i]] = i;
}

// Runs body(thread) for `threads` threads, a multiple of 32. Returns null, or what the threads did wrong.
inline const char* launch(int threads, uint32_t order, std::function<void(int)> body) {
  block.threads = block.running = threads;
  block.body = std::move(body);
  block.error = nullptr;
  set_order(order);
  block.barrier = {0, threads};
  for (int i = 0; i < threads / 32; ++i)
    block.warp[i] = {32 * i, 32};
  for (int i = 0; i < threads; ++i)
    set_ready(i, true);
  if (_setjmp(block.caller) == 0) resume(first_ready());
  if (block.error) {
    for (Thread& thread : block.thread)
      thread.started = false;
  }
  return block.error;
}

template <typename To, typename From>
To bits_as(From value) {
  static_assert(sizeof(From) <= sizeof(To));
  To result{};
  std::memcpy(&result, &value, sizeof(value));
  return result;
}

template <typename T>
T operand_as(uint64_t operand) {
  T value;
  std::memcpy(&value, &operand, sizeof(value));
  return value;
}

// static_cast with the conversions of a GPU: C++ leaves those of a NaN or of a float out of range undefined.
template <typename To, typename From>
constexpr To convert(From value) {
  if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To>) {
    if (value != value) return 0;
    if (value <= static_cast<From>(std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
    if (value >= static_cast<From>(std::numeric_limits<To>::max())) return std::numeric_limits<To>::max();
  }
  return static_cast<To>(value);
}

}  // namespace simt

inline void __syncthreads() { simt::meet(simt::block.barrier, __func__, 0); }
inline int __syncthreads_or(int predicate) {
  const uint64_t* operands = simt::meet(simt::block.barrier, __func__, predicate != 0);
  return std::any_of(operands, operands + simt::block.threads, [](uint64_t operand) { return operand != 0; });
}
inline void __syncwarp(uint32_t mask = 0xffffffffu) { simt::meet_warp(mask, __func__, 0); }

template <typename T>
T __shfl_sync(uint32_t mask, T value, int source) {
  return simt::operand_as<T>(simt::meet_warp(mask, __func__, simt::bits_as<uint64_t>(value))[source & 31]);
}
template <typename T>
T __shfl_up_sync(uint32_t mask, T value, int delta) {
  const int source = simt::lane() - delta;
  return __shfl_sync(mask, value, source < 0 ? simt::lane() : source);
}
template <typename T>
T __shfl_down_sync(uint32_t mask, T value, int delta) {
  const int source = simt::lane() + delta;
  return __shfl_sync(mask, value, source > 31 ? simt::lane() : source);
}
inline uint32_t __ballot_sync(uint32_t mask, int predicate) {
  const uint64_t* operands = simt::meet_warp(mask, __func__, predicate != 0);
  uint32_t ballot = 0;
  for (int i = 0; i < 32; ++i)
    ballot |= static_cast<uint32_t>(operands[i]) << i;
  return ballot;
}
inline int __any_sync(uint32_t mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }

template <typename Operation>
uint32_t reduce_warp(uint32_t mask, const char* name, uint32_t value, Operation operation) {
  const uint64_t* operands = simt::meet_warp(mask, name, value);
  return std::accumulate(operands + 1, operands + 32, static_cast<uint32_t>(operands[0]), operation);
}
inline uint32_t __reduce_add_sync(uint32_t mask, uint32_t value) {
  return reduce_warp(mask, __func__, value, [](uint32_t a, uint32_t b) { return a + b; });
}
inline uint32_t __reduce_min_sync(uint32_t mask, uint32_t value) {
  return reduce_warp(mask, __func__, value, [](uint32_t a, uint32_t b) { return min(a, b); });
}
inline uint32_t __reduce_max_sync(uint32_t mask, uint32_t value) {
  return reduce_warp(mask, __func__, value, [](uint32_t a, uint32_t b) { return max(a, b); });
}
inline uint32_t __reduce_or_sync(uint32_t mask, uint32_t value) {
  return reduce_warp(mask, __func__, value, [](uint32_t a, uint32_t b) { return a | b; });
}

template <typename T>
T atomicAdd(T* address, T value) {
  return std::exchange(*address, *address + value);
}

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
// Within 2 ulp of the quotient; 0 for a divisor above 2^126.
inline float __fdividef(float a, float b) {
  if (std::fabs(b) > 0x1p126f && std::isfinite(b)) return 0.0f;
  float quotient = a / b;
  const float toward = simt::block.order % 3 == 1 ? INFINITY : -INFINITY;
  for (int i = 0; i < 2 && simt::block.order % 3 != 0; ++i)
    quotient = std::nextafter(quotient, toward);
  return quotient;
}
// The default rounding mode is to nearest, ties to even.
inline uint32_t __float2uint_rn(float value) { return simt::convert<uint32_t>(std::nearbyint(value)); }
inline unsigned long long __float2ull_rn(float value) {
  return simt::convert<unsigned long long>(std::nearbyint(value));
}
inline uint32_t __float_as_uint(float value) { return simt::bits_as<uint32_t>(value); }
inline float __uint_as_float(uint32_t value) { return simt::bits_as<float>(value); }
inline float __int_as_float(int32_t value) { return simt::bits_as<float>(value); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>((uint64_t{a} * b) >> 32); }
inline int __popc(uint32_t value) { return __builtin_popcount(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
