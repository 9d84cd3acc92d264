// Argument checks of the ops that draw. Host code only.
#pragma once

#include "checks.h"

namespace moss {

inline MossStatus check_draw_sizes(const char* op, const SampleCodebookParams& params) {
  MossStatus status = check_range(op, "batch", params.batch, 0, 65535);
  if (status == MOSS_OK) status = check_range(op, "vocab", params.vocab, 2, 4096);
  if (status == MOSS_OK) status = check_at_least(op, "pool_rows", params.pool_rows, 1);
  if (status == MOSS_OK) status = check_at_least(op, "channel", params.channel, 0);
  if (status == MOSS_OK && params.seen) status = check_range(op, "codebook", params.codebook, 0, params.codebooks - 1);
  if (status == MOSS_OK && params.batch > 1) status = check_at_least(op, "code_stride", params.code_stride, 1);
  return status;
}

// All of a draw's parameters but those of its logits.
inline MossStatus check_draw(const char* op, const SampleCodebookParams& params) {
  const MossStatus sizes = check_draw_sizes(op, params);
  if (sizes != MOSS_OK) return sizes;
  const struct {
    const char* name;
    const void* pointer;
    size_t bytes;
    bool optional;
  } pointers[] = {
      {"row_map", params.row_map, 4, false},
      {"active", params.active, 1, false},
      {"temperature", params.temperature, 4, false},
      {"top_k", params.top_k, 4, false},
      {"top_p", params.top_p, 4, false},
      {"repetition_penalty", params.repetition_penalty, 4, true},
      {"seed", params.seed, 8, false},
      {"frame", params.frame, 4, false},
      {"seen", params.seen, 4, true},
      {"code", params.code, 8, false},
      {"status", params.status, 4, false},
      {"random_words", params.random_words, 8, true},
  };
  for (const auto& entry : pointers) {
    const MossStatus status = check_pointer(op, entry.name, entry.pointer, entry.bytes, entry.optional);
    if (status != MOSS_OK) return status;
  }
  return MOSS_OK;
}

}  // namespace moss
