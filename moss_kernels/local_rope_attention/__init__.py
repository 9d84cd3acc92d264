"""`local_rope_attention`: one position of the local transformer's attention, over the positions of its own frame."""

from moss_kernels.local_rope_attention.reference import local_rope_attention_reference

__all__ = ["local_rope_attention_reference"]
