"""Every operation and graph of a loaded checkpoint against its reference, on the machine at hand."""

from moss_runtime.verify.checks import verify
from moss_runtime.verify.results import Result, Results
from moss_runtime.verify.speech import load_recogniser, load_speaker_model, verify_speech

__all__ = ["Result", "Results", "load_recogniser", "load_speaker_model", "verify", "verify_speech"]
