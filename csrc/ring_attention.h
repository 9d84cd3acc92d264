// The kernels behind moss_ring_attention that lie in files of their own. Host code only.
#pragma once

#include "error.h"

namespace moss {

// Few rows, chunks of up to 512 tokens: blocks that all run at once, for arguments that have been checked.
bool takes_clusters(const RingAttentionParams& params);
MossStatus launch_clusters(const RingAttentionParams& params);

// Chunks of up to four tokens of many rows, for arguments that have been checked.
bool takes_few(const RingAttentionParams& params);
// Whether q, k and v of one token may come in so many slices as the arguments say.
bool takes_slices(const RingAttentionParams& params);
MossStatus launch_few(const RingAttentionParams& params);

// Chunks whose queries and keys are rotated already, for arguments that have been checked.
MossStatus launch_wide(const RingAttentionParams& params);

}  // namespace moss
