"""dequantize_codes: one row per codebook summed in order, pad codes and strange ids."""

import pytest
import torch

from moss_kernels.dequantize_codes import dequantize_codes, dequantize_codes_reference, triton_kernel
from moss_kernels.testing.compare import require_equal

CODEBOOKS, VOCAB = 12, 37


def make_inputs(batch, frames, width, *, codes_dtype=torch.int64, device="cpu"):
    """Codes of which one in five is the pad code, some are far outside; a table."""
    codes = torch.randint(VOCAB, (batch, frames, CODEBOOKS))
    codes[torch.rand(codes.shape) < 0.2] = VOCAB
    codes[0, 0, :4] = torch.tensor([-1, VOCAB + 1, 32767, -32768])
    return codes.to(codes_dtype).to(device), torch.randn(CODEBOOKS, VOCAB, width, device=device)


def run(implementation, codes, table, dtype=torch.float32):
    out = torch.full((*codes.shape[:2], table.shape[2]), torch.nan, dtype=dtype, device=table.device)
    implementation(codes, table, out)
    return out


@pytest.mark.parametrize("codes_dtype", [torch.int64, torch.int32, torch.int16])
def test_the_op_sums_known_codes(codes_dtype):
    codes, table = make_inputs(3, 4, 10, codes_dtype=codes_dtype)
    expected = torch.zeros(3, 4, 10)
    for row in range(3):
        for frame in range(4):
            for q, code in enumerate(codes[row, frame].tolist()):
                if 0 <= code < VOCAB:
                    expected[row, frame] += table[q, code]
    require_equal("out", run(dequantize_codes, codes, table), expected)


def test_a_bf16_sum_rounds_once():
    # Steps of bf16 are 2 at 256: each 0.75 would be lost on its own.
    table = torch.full((CODEBOOKS, 4, 1), 0.75)
    table[0] = 256
    out = run(dequantize_codes, torch.zeros(1, 1, CODEBOOKS, dtype=torch.int64), table, torch.bfloat16)
    assert out.item() == 264


def test_an_unknown_code_hides_nothing_of_the_table():
    codes, table = make_inputs(2, 2, 6)
    table[:, 0] = torch.nan
    codes[codes == 0] = 1
    assert run(dequantize_codes, codes, table).isfinite().all()


def test_bad_arguments_are_named():
    codes, table = make_inputs(2, 3, 8)
    with pytest.raises(ValueError, match=r"`table` must be \[Q, V, D\] with Q = 12, got \(11, 37, 8\)"):
        dequantize_codes(codes, table[:11], torch.empty(2, 3, 8))
    with pytest.raises(TypeError, match="`codes` must be int64, int32 or int16, got float32"):
        dequantize_codes(codes.float(), table, torch.empty(2, 3, 8))
    with pytest.raises(ValueError, match=r"`out` must be \[B, T, D\] with B = 2, T = 3, D = 8, got \(2, 3, 9\)"):
        dequantize_codes(codes, table, torch.empty(2, 3, 9))


@pytest.mark.parametrize("batch", [0, 2])
def test_opcheck(batch):
    codes, table = make_inputs(2, 3, 8)
    torch.library.opcheck(torch.ops.moss.dequantize_codes, (codes[:batch], table, torch.empty(batch, 3, 8)))


def test_torch_compile():
    codes, table = make_inputs(2, 3, 8)
    compiled = torch.compile(dequantize_codes, fullgraph=True, dynamic=True, backend="aot_eager")
    require_equal("out", run(compiled, codes, table), dequantize_codes_reference(codes, table))


@pytest.mark.interpreter
@pytest.mark.parametrize("width", [24, 300])
@pytest.mark.parametrize("codes_dtype", [torch.int64, torch.int16])
def test_triton_in_the_interpreter(width, codes_dtype):
    codes, table = make_inputs(2, 3, width, codes_dtype=codes_dtype)
    actual = run(triton_kernel.dequantize_codes_triton, codes, table)
    require_equal("out", actual, dequantize_codes_reference(codes, table))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "frames", "width"), [(1, 1, 768), (64, 15, 768), (3, 2, 100)])
def test_implementations_are_bitwise_equal(dtype, batch, frames, width):
    codes, table = make_inputs(batch, frames, width, device="cuda")
    expected = dequantize_codes_reference(codes.cpu(), table.cpu()).to(dtype)
    require_equal("out", run(triton_kernel.dequantize_codes_triton, codes, table, dtype), expected)
