"""`local_frame_decode` in CUDA C++: the structs and calls of libmoss_kernels.so."""

import ctypes
from functools import cache

from moss_kernels import _library

MODELS = {
    # hidden, inner, heads, vocab: value of MossLocalModel.
    (2560, 9728, 32, 1024): 0,
    (256, 512, 4, 128): 1,
}
CODEBOOKS = 12
MAX_BATCH = 128


def _fields(text: str, kind: type) -> tuple[tuple[str, type], ...]:
    return tuple((name, kind) for name in text.split())


class LocalFramePackParams(ctypes.Structure):
    """LocalFramePackParams of csrc/include/moss_kernels.h, which says what each field means."""

    _fields_ = (
        *_fields("struct_size abi_version", ctypes.c_uint32),
        ("model", ctypes.c_int),
        ("reserved", ctypes.c_int32),
        *_fields("c_attn c_proj fc_in fc_out audio_embeddings packed stream", ctypes.c_void_p),
    )


class LocalFrameDecodeParams(ctypes.Structure):
    """LocalFrameDecodeParams of csrc/include/moss_kernels.h, which says what each field means."""

    _fields_ = (
        *_fields("struct_size abi_version", ctypes.c_uint32),
        ("model", ctypes.c_int),
        *_fields("batch multiprocessors pool_rows", ctypes.c_int32),
        *_fields("audio_pad_id slot_id pad_token_id text_rows", ctypes.c_int64),
        ("layer_norm_epsilon", ctypes.c_float),
        ("reserved", ctypes.c_int32),
        *_fields(
            "packed ln_1_weight ln_1_bias ln_2_weight ln_2_bias ln_f_weight ln_f_bias c_attn_bias c_proj_bias "
            "fc_in_bias fc_out_bias stop_head audio_embeddings embed_tokens rope qkv_table hidden row_map active "
            "temperature top_k top_p repetition_penalty text_temperature text_top_k text_top_p seed frame seen "
            "teacher_codes codes continues feedback status stop_logits audio_logits hidden_out workspace stream",
            ctypes.c_void_p,
        ),
    )


@cache
def library() -> ctypes.CDLL:
    """libmoss_kernels.so with the prototypes of the local frame set."""
    lib = _library.load()
    for name in ("moss_local_frame_packed_bytes", "moss_local_frame_workspace_bytes"):
        getattr(lib, name).argtypes = [ctypes.c_int]
        getattr(lib, name).restype = ctypes.c_int64
    lib.moss_local_frame_pack.argtypes = [ctypes.POINTER(LocalFramePackParams)]
    lib.moss_local_frame_decode.argtypes = [ctypes.POINTER(LocalFrameDecodeParams)]
    lib.moss_local_qkv_table.argtypes = [ctypes.POINTER(LocalFrameDecodeParams), ctypes.c_void_p]
    for name in ("moss_local_frame_pack", "moss_local_frame_decode", "moss_local_qkv_table"):
        getattr(lib, name).restype = ctypes.c_int
    return lib
