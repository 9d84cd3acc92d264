// The kernels behind moss_codec_linear that lie in files of their own. Host code only.
#pragma once

#include "error.h"

namespace moss {

constexpr int kClusterStep = 64;  // inputs of a step; a slice is some of them
constexpr int kClusterMaxRows = 1 << 20;

constexpr int kWideColumns = 96;  // tiles of so many outputs or more, not in slices, are those of launch_tiles

inline bool is_wide(const CodecLinearParams& params) {
  return params.tile_columns >= kWideColumns && params.slices == 1;
}

// For arguments that have been checked, by the tile that they name.
MossStatus launch_clusters(const CodecLinearParams& params);
MossStatus launch_tiles(const CodecLinearParams& params);
MossStatus launch_partial(const CodecLinearParams& params);

// The same; checks what `normed` asks for beside the rest.
MossStatus launch_normed(const CodecLinearParams& params);

// For those of launch_tiles whose tile has 128 rows and 96, 128, 144 or 192 columns, with more tiles than
// multiprocessors.
MossStatus launch_pingpong(const CodecLinearParams& params, int multiprocessors);

}  // namespace moss
