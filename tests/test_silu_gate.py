"""silu_gate: the op and the Triton kernel against float64."""

import pytest
import torch
import torch.nn.functional as F

from moss_kernels.silu_gate import silu_gate, triton_kernel
from moss_kernels.testing.compare import require_equal

SIZES = [(1, 1), (3, 24), (5, 1000), (2, 2048)]


def make_arguments(rows, width, dtype=torch.float32, device="cpu"):
    """gate_up, with values where the sigmoid is 0, 1 and between, and out."""
    gate_up = (torch.randn(rows, 2 * width, device=device) * torch.logspace(-2, 2, rows, device=device)[:, None]).to(
        dtype
    )
    gate_up[0, 0] = -200
    return gate_up, torch.full((rows, width), torch.nan, dtype=dtype, device=device)


def exact(gate_up):
    gate, up = gate_up.double().unflatten(1, (-1, 2)).unbind(2)
    return F.silu(gate) * up


@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_op_follows_float64(rows, width):
    gate_up, out = make_arguments(rows, width)
    silu_gate(gate_up, out)
    torch.testing.assert_close(out.double(), exact(gate_up), rtol=1e-6, atol=1e-30)


@pytest.mark.interpreter
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_triton_in_the_interpreter(rows, width):
    gate_up, out = make_arguments(rows, width)
    triton_kernel.silu_gate_triton(gate_up, out)
    torch.testing.assert_close(out.double(), exact(gate_up), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("rows", [0, 3])
def test_opcheck(rows):
    torch.library.opcheck(torch.ops.moss.silu_gate.default, (torch.randn(rows, 16), torch.zeros(rows, 8)))


@pytest.mark.parametrize(
    ("index", "value", "error", "message"),
    [
        (0, torch.zeros(3, 8).half(), TypeError, "`gate_up` must be float32, got float16"),
        (0, torch.zeros(8, 3).T, ValueError, "`gate_up` must be contiguous"),
        (0, torch.zeros(3, 4), ValueError, r"`gate_up` must be \[M, 2\*F\] with M = 3, 2\*F = 8, got \(3, 4\)"),
        (1, torch.zeros(3, 4).half(), TypeError, "`out` must be float32 or bfloat16, got float16"),
    ],
)
def test_bad_arguments_are_named(index, value, error, message):
    arguments = [torch.zeros(3, 8), torch.zeros(3, 4)]
    arguments[index] = value
    with pytest.raises(error, match=f"`silu_gate`: {message}"):
        silu_gate(*arguments)


@pytest.mark.gpu
def test_bf16_is_rounded_once_and_rows_do_not_depend_on_the_others():
    gate_up, out = make_arguments(160, 9728, torch.bfloat16, "cuda")
    triton_kernel.silu_gate_triton(gate_up, out)
    expected = exact(gate_up)
    assert ((out - expected).abs() <= (2**-8 + 1e-5) * expected.abs() + 1e-37).all()
    part = torch.empty_like(out[17:24])
    triton_kernel.silu_gate_triton(gate_up[17:24], part)
    require_equal("out", part, out[17:24])
