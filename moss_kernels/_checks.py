"""Argument checks shared by all ops.

Every message reads "`op`: `argument` must be <what was expected>, got <what came>". Shapes and layouts raise
ValueError, dtypes raise TypeError. The checks look at metadata alone: they hold for fake tensors and never synchronise.
"""

from functools import cache

import torch


@cache
def _dimensions(layout: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in layout.strip("[]").split(",") if part.strip())


def require_shape(op: str, name: str, tensor: torch.Tensor, layout: str, sizes: dict[str, int]) -> None:
    """Check a shape against a layout and bind the dimensions that are new.

    Args:
        op: Name of the op, for the message.
        name: Name of the argument, for the message.
        tensor: any shape and dtype. The argument.
        layout: Dimensions as the documentation writes them: "[B, Q]", "[S+1, 4]", "[]". A number is a fixed size; any
            other text is a name, compared as it stands ("S+1" is one name, not a sum).
        sizes: Sizes of the names known so far. A name that is not in it is bound to the tensor's size; put a size in
            by hand to fix it ("ceil(V/32)").

    Raises:
        ValueError: Another number of dimensions, or a dimension of another size.
    """
    shape = tensor.shape
    dimensions = _dimensions(layout)
    known = [f"{dimension} = {sizes[dimension]}" for dimension in dimensions if dimension in sizes]
    matches = len(shape) == len(dimensions)
    if matches:
        for dimension, size in zip(dimensions, shape, strict=True):
            expected = int(dimension) if dimension.isdigit() else sizes.setdefault(dimension, size)
            matches = matches and size == expected
    if not matches:
        expected = f"{layout} with {', '.join(known)}" if known else layout
        raise ValueError(f"`{op}`: `{name}` must be {expected}, got {tuple(shape)}")


def require_dtype(op: str, name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    """Raise TypeError unless the tensor has one of the dtypes."""
    if tensor.dtype not in dtypes:
        names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        expected = " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
        raise TypeError(f"`{op}`: `{name}` must be {expected}, got {str(tensor.dtype).removeprefix('torch.')}")


def require_device(op: str, name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise ValueError unless the tensor is on the device (usually that of the op's first argument)."""
    if tensor.device != device:
        raise ValueError(f"`{op}`: `{name}` must be on {device}, got {tensor.device}")


def require_contiguous(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless the elements lie in memory in row-major order without gaps."""
    if not tensor.is_contiguous():
        raise ValueError(f"`{op}`: `{name}` must be contiguous, got strides {tensor.stride()}")


def require_contiguous_rows(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless the last dimension has stride 1 (the others may be strided)."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"`{op}`: `{name}` must have stride 1 in its last dimension, got strides {tensor.stride()}")
