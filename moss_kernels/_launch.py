"""Programmatic dependent launch: a kernel may start while the one ahead of it in the stream still runs."""

import os

import torch

_SWITCH = {"": None, "0": False, "1": True}
_value = os.environ.get("MOSS_DEPENDENT_LAUNCH", "")
if _value not in _SWITCH:
    raise ValueError(f"MOSS_DEPENDENT_LAUNCH must be 0 or 1, or not set, got {_value!r}")
# For all ops that ask below; None leaves it to each. Read by each launch, so that tests and benchmarks can set it.
enabled = _SWITCH[_value]


def dependent_launch(device: torch.device, *, default: bool = False) -> bool:
    """Whether to launch that way on a device.

    The kernel then waits ahead of its first access to what others write or read. It waits in any case: one that ended
    without waiting would end the wait of a third kernel while the first still runs.

    Args:
        device: of the launch.
        default: what was measured to be faster for the op.
    """
    wanted = default if enabled is None else enabled
    return wanted and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
