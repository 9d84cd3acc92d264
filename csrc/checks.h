// Argument checks of the launchers behind the C ABI. Host code only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "error.h"

namespace moss {

// Not null unless optional, and aligned.
inline MossStatus check_pointer(const char* op, const char* name, const void* pointer, size_t bytes,
                                bool optional = false) {
  if (pointer == nullptr && !optional)
    return set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: `%s` must not be null", op, name);
  if (reinterpret_cast<uintptr_t>(pointer) % bytes != 0)
    return set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: `%s` must be aligned to %zu bytes, got %p", op, name, bytes,
                     pointer);
  return MOSS_OK;
}

// Sizes end here, so that sums of one and a tile's width stay within 32 bits.
constexpr int64_t kMostRows = int64_t{1} << 30;

// lowest <= value <= highest.
inline MossStatus check_range(const char* op, const char* name, int64_t value, int64_t lowest, int64_t highest) {
  if (value >= lowest && value <= highest) return MOSS_OK;
  return set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: `%s` must be %lld .. %lld, got %lld", op, name,
                   static_cast<long long>(lowest), static_cast<long long>(highest), static_cast<long long>(value));
}

inline MossStatus check_at_least(const char* op, const char* name, int64_t value, int64_t lowest) {
  if (value >= lowest) return MOSS_OK;
  return set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: `%s` must be >= %lld, got %lld", op, name,
                   static_cast<long long>(lowest), static_cast<long long>(value));
}

inline MossStatus check_dtype(const char* op, const char* name, MossDtype dtype) {
  if (dtype == MOSS_FLOAT32 || dtype == MOSS_BFLOAT16 || dtype == MOSS_FLOAT16) return MOSS_OK;
  return set_error(MOSS_ERROR_INVALID_ARGUMENT, "`%s`: `%s` must be a MossDtype, got %d", op, name,
                   static_cast<int>(dtype));
}

}  // namespace moss
