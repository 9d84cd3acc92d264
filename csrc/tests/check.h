// What the test programs share.
#pragma once

#include <cstdio>
#include <cstring>

#include "moss_kernels.h"

inline int failures = 0;

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      ++failures;                                                          \
    }                                                                      \
  } while (false)

inline bool message_contains(const char* part) { return std::strstr(moss_last_error_message(), part) != nullptr; }

template <typename Params>
Params with_header() {
  Params params = {};
  params.struct_size = sizeof(params);
  params.abi_version = MOSS_ABI_VERSION;
  return params;
}
