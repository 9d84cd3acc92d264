"""rms_norm: the eager norm and residual sum, and the Triton kernel against them."""

import pytest
import torch

from moss_kernels.rms_norm import rms_norm, rms_norm_reference, triton_kernel
from moss_kernels.testing.compare import require_equal

EPS = 1e-6
SPLITS = [None, 1, 4]


def make_arguments(batch, width, splits, *, dtype=torch.float32, device="cpu"):
    """x, partials, weight, eps, out of `rms_norm`; the rows differ in size by far."""
    x = (torch.randn(batch, width, device=device) * torch.logspace(-4, 2, batch, device=device)[:, None]).to(dtype)
    partials = None if splits is None else torch.randn(splits, batch, width, device=device)
    weight = (1 + torch.randn(width, device=device) / 4).to(dtype)
    return x, partials, weight, EPS, torch.full_like(x, torch.nan)


def exact(arguments):
    """Stream and norm in float64, the stream rounded to its dtype as the op rounds it."""
    x, partials, weight, eps, _ = arguments
    total = (x.double() + (0 if partials is None else partials.double().sum(0))).to(x.dtype)
    return total, rms_norm_reference(total.double(), weight.double(), eps)


def require_close(arguments, expected, got):
    stream, norm = expected
    torch.testing.assert_close(got[0], stream, rtol=0 if arguments[1] is None else 1e-5, atol=1e-6)
    torch.testing.assert_close(got[-1].double(), norm, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("splits", SPLITS)
def test_op_follows_float64(splits):
    arguments = make_arguments(5, 24, splits)
    expected = exact(arguments)
    rms_norm(*arguments)
    require_close(arguments, expected, arguments)


@pytest.mark.interpreter
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("width", [24, 64])
def test_triton_in_the_interpreter(splits, width):
    arguments = make_arguments(5, width, splits)
    expected = exact(arguments)
    triton_kernel.rms_norm_triton(*arguments)
    require_close(arguments, expected, arguments)


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("batch", [0, 3])
def test_opcheck(batch, splits):
    arguments = [x.nan_to_num() if torch.is_tensor(x) else x for x in make_arguments(batch, 16, splits)]
    torch.library.opcheck(torch.ops.moss.rms_norm.default, tuple(arguments))


@pytest.mark.parametrize(
    ("index", "value", "error", "message"),
    [
        (0, torch.zeros(3, 8).half(), TypeError, "`x` must be float32 or bfloat16, got float16"),
        (0, torch.zeros(8, 3).T, ValueError, "`x` must be contiguous"),
        (1, torch.zeros(2, 3, 9), ValueError, r"`partials` must be \[S, B, H\] with B = 3, H = 8"),
        (1, torch.zeros(2, 3, 8).bfloat16(), TypeError, "`partials` must be float32, got bfloat16"),
        (2, torch.zeros(9), ValueError, r"`weight` must be \[H\] with H = 8, got \(9,\)"),
        (4, torch.zeros(2, 8), ValueError, r"`out` must be \[B, H\] with B = 3, H = 8, got \(2, 8\)"),
    ],
)
def test_bad_arguments_are_named(index, value, error, message):
    arguments = list(make_arguments(3, 8, 2))
    arguments[index] = value
    with pytest.raises(error, match=f"`rms_norm`: {message}"):
        rms_norm(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", SPLITS)
def test_bf16_rounds_as_the_eager_norm_and_rows_do_not_depend_on_the_batch(splits):
    arguments = make_arguments(128, 2560, splits, dtype=torch.bfloat16, device="cuda")
    stream, norm = exact(arguments)
    x, partials, weight, eps, out = (value.clone() if torch.is_tensor(value) else value for value in arguments)
    triton_kernel.rms_norm_triton(x, partials, weight, eps, out)
    # A sum near the middle of two values may round either way; the norm is rounded before and after the weight.
    assert (x != stream).float().mean() < 1e-3
    assert ((out - norm).abs() <= 2.01 * 2**-8 * norm.abs() + 1e-6)[x == stream].all()
    for rows in (slice(0, 1), slice(17, 24), slice(95, 128)):
        part = arguments[0][rows].clone()
        part_out = torch.empty_like(part)
        part_partials = None if partials is None else partials[:, rows].contiguous()
        triton_kernel.rms_norm_triton(part, part_partials, weight, eps, part_out)
        require_equal("x", part, x[rows])
        require_equal("out", part_out, out[rows])
