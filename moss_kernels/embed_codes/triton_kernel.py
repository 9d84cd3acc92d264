"""`embed_codes` in Triton: one program per batch row and block of columns."""

import torch
import triton
import triton.language as tl

BLOCK = 512
NUM_WARPS = 2


@triton.jit
def embed_codes_kernel(
    text_ids_ptr,
    codes_ptr,
    embed_tokens_ptr,
    audio_embeddings_ptr,
    out_ptr,
    text_ids_stride,
    codes_stride,
    text_vocab,
    vocab,
    width,
    pad_id,
    CODEBOOKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    text_id = tl.load(text_ids_ptr + row * text_ids_stride)
    valid = (text_id >= 0) & (text_id < text_vocab)
    total = tl.load(embed_tokens_ptr + text_id * width + columns, mask=inside & valid, other=0.0)
    for q in tl.static_range(CODEBOOKS):
        code = tl.load(codes_ptr + row * codes_stride + q)
        valid = (code >= 0) & (code < vocab) & (code != pad_id)
        table_row = (tl.full((), q, tl.int64) * vocab + code) * width
        term = tl.load(audio_embeddings_ptr + table_row + columns, mask=inside & valid, other=0.0)
        total = (total.to(tl.float32) + term.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + columns, total, mask=inside)


def embed_codes_triton(
    text_ids: torch.Tensor,
    codes: torch.Tensor,
    embed_tokens: torch.Tensor,
    audio_embeddings: torch.Tensor,
    pad_id: int,
    out: torch.Tensor,
) -> None:
    """Triton implementation of `moss_kernels.embed_codes`, which documents and checks the arguments."""
    rows, width = out.shape
    if rows == 0:
        return
    embed_codes_kernel[(rows, triton.cdiv(width, BLOCK))](
        text_ids,
        codes,
        embed_tokens,
        audio_embeddings,
        out,
        text_ids.stride(0),
        codes.stride(0),
        embed_tokens.shape[0],
        audio_embeddings.shape[1],
        width,
        pad_id,
        CODEBOOKS=codes.shape[1],
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )


def compile_specs() -> list[tuple[triton.JITFunction, dict[str, str], dict[str, object], dict[str, object]]]:
    """What to compile ahead of a launch: (kernel, signature, constexprs, options) of each variant in use."""
    scalars = ("text_ids_stride", "codes_stride", "text_vocab", "vocab", "width", "pad_id")
    constexprs: dict[str, object] = {"CODEBOOKS": 12, "BLOCK": BLOCK}
    specs = []
    for dtype in ("fp32", "bf16", "fp16"):
        pointers = dict.fromkeys(("embed_tokens_ptr", "audio_embeddings_ptr", "out_ptr"), f"*{dtype}")
        signature = {"text_ids_ptr": "*i64", "codes_ptr": "*i64"} | pointers | dict.fromkeys(scalars, "i32")
        signature |= dict.fromkeys(constexprs, "constexpr")
        specs.append((embed_codes_kernel, signature, constexprs, {"num_warps": NUM_WARPS}))
    return specs
