// moss_codec_linear for more rows than codec_linear.cu takes.
#pragma once
#include "error.h"

namespace moss::codec_linear {

// Launch for checked parameters. Errors: sizes that no block holds in shared memory.
MossStatus launch_split(const CodecLinearParams& params);

}  // namespace moss::codec_linear
