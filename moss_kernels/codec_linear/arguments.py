"""The arguments of the op `codec_linear`, which `moss_kernels.codec_linear` documents, in the order of its schema."""

from typing import NamedTuple

from torch import Tensor


class CodecLinearArguments(NamedTuple):
    """What the dispatcher hands over; it leaves out what stands last and is the default."""

    x: Tensor
    weight: Tensor
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    norm_sums: Tensor | None
    gelu: bool
    scale: Tensor | None
    scratch: Tensor | None
    out: Tensor
    partials: Tensor | None = None
    partials_scale: Tensor | None = None
    next_norm_weight: Tensor | None = None
    next_norm_bias: Tensor | None = None
    normed: Tensor | None = None
    moments: Tensor | None = None
    cos_sin: Tensor | None = None
