"""Random codec weights with realistic gains: activations of order one, so that every part shows in the audio."""

import math
from collections.abc import Mapping, Sequence

import torch

# Random keys share little with random queries: without a gain, attention would average its window away.
_QUERY_KEY_GAIN = 1.5
# Gain of the linears by the part of the name that tells them apart.
_GAINS = {"linear1": 1.5, "linear2": 1.0, "out_projs": 1.5, "input_proj": 1.0, "output_proj": 0.4}


def codec_weights(
    shapes: Mapping[str, Sequence[int]], seed: int, *, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Weights for the tensors of a codec, by their official names.

    Args:
        shapes: name -> shape of each tensor.
        seed: the same weights for the same seed, device kind and shapes.
        device: where to make them.

    Returns:
        name -> float32 tensor. Layer scales are 0.1 .. 0.6.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(shape: Sequence[int], std: float) -> torch.Tensor:
        return torch.randn(tuple(shape), generator=generator, device=device).mul_(std)

    def uniform(shape: Sequence[int], low: float, high: float) -> torch.Tensor:
        return torch.rand(tuple(shape), generator=generator, device=device).mul_(high - low).add_(low)

    def tensor(name: str, shape: Sequence[int]) -> torch.Tensor:
        if name.endswith(".scale"):
            return uniform(shape, 0.1, 0.6)
        if "norm" in name:
            return uniform(shape, 0.7, 1.3) if name.endswith(".weight") else normal(shape, 0.2)
        if name.endswith(".original0"):  # the length of each row; twelve codebooks add up
            return torch.full(tuple(shape), 12**-0.5 if ".out_proj." in name else 1.0, device=device)
        if name.endswith((".original1", "codebook.weight")):
            return normal(shape, 1.0)
        if name.endswith(".bias"):
            return normal(shape, 0.1)
        if "in_projs" in name:
            weight = normal(shape, shape[1] ** -0.5)
            weight[: 2 * shape[1]] *= _QUERY_KEY_GAIN
            return weight
        gain = next(gain for part, gain in _GAINS.items() if part in name)
        return normal(shape, gain / math.sqrt(shape[1]))

    return {name: tensor(name, shape) for name, shape in shapes.items()}
