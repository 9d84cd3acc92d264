"""`local_frame_decode`: one frame, from the backbone's hidden state to the stop decision and Q drawn codes."""

from moss_kernels.local_frame_decode.decoder import LocalFrameDecoder
from moss_kernels.local_frame_decode.reference import (
    LocalFrame,
    LocalFrameWeights,
    local_frame_decode_reference,
    qkv_table_reference,
)

__all__ = [
    "LocalFrame",
    "LocalFrameDecoder",
    "LocalFrameWeights",
    "local_frame_decode_reference",
    "qkv_table_reference",
]
