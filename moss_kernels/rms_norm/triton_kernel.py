"""`rms_norm` in Triton: one program per row."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moss_kernels._launch import dependent_launch

WARPS = 16


@triton.jit
def rms_norm_kernel(
    x_ptr,
    partials_ptr,
    weight_ptr,
    out_ptr,
    eps,
    split_stride,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    place = tl.program_id(0).to(tl.int64) * WIDTH + column
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    if DEPENDENT:
        # The next linear's weights come while this kernel, and the one before, run.
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + place, mask=inside, other=0.0)
    partials = ()
    for split in tl.static_range(SPLITS):
        partials += (tl.load(partials_ptr + split * split_stride.to(tl.int64) + place, mask=inside, other=0.0),)
    if DEPENDENT:
        # Only because no load crosses it: else the compiler loads and adds one slice after the other.
        gdc_launch_dependents()
    if SPLITS > 0:
        total = x.to(tl.float32)
        for split in tl.static_range(SPLITS):
            total += partials[split]
        x = total.to(x.dtype)
        tl.store(x_ptr + place, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.math.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    normed = (wide * scale).to(x.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(out_ptr + place, normed.to(x.dtype), mask=inside)


def rms_norm_triton(
    x: torch.Tensor, partials: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """Triton implementation of `moss_kernels.rms_norm`, which documents and checks the arguments."""
    batch, width = x.shape
    if batch == 0:
        return
    dependent = dependent_launch(x.device, default=True)
    rms_norm_kernel[(batch,)](
        x,
        partials,
        weight,
        out,
        eps,
        batch * width,
        SPLITS=0 if partials is None else partials.shape[0],
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        DEPENDENT=dependent,
        num_warps=WARPS,
        launch_pdl=dependent,
    )


def compile_specs() -> list[tuple[triton.JITFunction, dict[str, str], dict[str, object], dict[str, object]]]:
    """What to compile ahead of a launch: (kernel, signature, constexprs, options) of each variant in use."""
    specs = []
    for dtype in ("bf16", "fp32"):
        for splits in (0, 1, 4):
            signature = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), f"*{dtype}")
            signature |= {"partials_ptr": "*fp32", "eps": "fp32", "split_stride": "i32"}
            constexprs = {"SPLITS": splits, "WIDTH": 2560, "BLOCK": 4096, "DEPENDENT": True}
            signature = {name: signature.get(name, "constexpr") for name in rms_norm_kernel.arg_names}
            specs.append((rms_norm_kernel, signature, constexprs, {"num_warps": WARPS, "launch_pdl": True}))
    return specs
