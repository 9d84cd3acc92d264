"""Programmatic dependent launch: a kernel may start while the one ahead of it in the stream still runs."""

import os

import torch

# Off unless asked for. Read by each launch, so that tests and benchmarks can set it.
enabled = os.environ.get("MOSS_DEPENDENT_LAUNCH") == "1"


def dependent_launch(device: torch.device) -> bool:
    """Whether to launch that way on a device. The kernel then waits ahead of its first read of what others write."""
    return enabled and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
