"""`embed_codes`: the backbone's input embedding of rows of one text id and Q codes."""

from moss_kernels.embed_codes.reference import embed_codes_reference

__all__ = ["embed_codes_reference"]
