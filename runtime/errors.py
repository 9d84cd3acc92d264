"""Errors that a caller's input causes. The command line prints them as one line and exits with 2."""


class UserError(ValueError):
    """Something the caller gave cannot be used; the message names it, what was expected and what came."""


class CheckpointError(UserError):
    """A checkpoint directory, its config or its tensors cannot be used."""


class AudioError(UserError):
    """An audio file or waveform cannot be used."""


class PromptError(UserError):
    """A prompt cannot be built from the given fields."""
