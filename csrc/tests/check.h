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

// A call whose parameters `spoil` has spoiled is refused, with a message that names the op and contains `part`.
template <typename Params, typename Spoil>
void check_refused(const char* op, MossStatus (*call)(const Params*), Params params, const char* part, Spoil spoil) {
  spoil(params);
  CHECK(call(&params) == MOSS_ERROR_INVALID_ARGUMENT);
  if (message_contains(op) && message_contains(part)) return;
  std::fprintf(stderr, "the message must contain \"%s\" and \"%s\", got: %s\n", op, part, moss_last_error_message());
  ++failures;
}
