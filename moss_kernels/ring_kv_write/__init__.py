"""Writing the keys and values of a chunk into the rings of its slots."""

from moss_kernels.ring_kv_write.reference import RingTarget, ring_kv_write_reference, ring_target

__all__ = ["RingTarget", "ring_kv_write_reference", "ring_target"]
