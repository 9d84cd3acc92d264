"""Every operation and graph of a loaded checkpoint against its reference, on the machine at hand."""

from moss_runtime.verify.checks import verify
from moss_runtime.verify.results import Result, Results

__all__ = ["Result", "Results", "verify"]
