"""Numbers on their way from the host to the device."""

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor


def pinned(values: ArrayLike, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor on the host that `copy_` or `to` with `non_blocking` brings to a device without waiting.

    The host allocator does not reuse a pinned block before the copies from it are done, so it may be dropped at once.
    numpy fills it, whose small operations are faster than PyTorch's and keep the interpreter's lock: a thread that
    gives it up waits until another one lets go of it.

    Args:
        values: numbers of any shape.
        dtype: of the tensor.
        device: where it goes.

    Returns:
        [shape of the values], in pinned memory if the device is a GPU.
    """
    values = np.asarray(values)
    tensor = torch.empty(values.shape, dtype=dtype, pin_memory=device.type == "cuda")
    tensor.numpy()[...] = values
    return tensor
