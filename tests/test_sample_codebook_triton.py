"""The Triton kernel without a GPU: its draws in the interpreter, its arithmetic in the machine code."""

import re

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moss_kernels.sample_codebook import triton_draw, triton_kernel
from moss_kernels.sample_codebook.reference import exp_weights
from moss_kernels.testing.cases import sample_codebook_inputs, top_p_edge_inputs, weight_arguments
from moss_kernels.testing.compare import require_equal, require_same_draws


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocab", "batch"), [(2, 20), (33, 30), (64, 20), (1000, 8), (1024, 12), (4096, 2)])
def test_draws_as_the_reference_in_the_interpreter(vocab, batch, dtype):
    inputs = sample_codebook_inputs(batch, vocab, seed=vocab, dtype=dtype, device_values=True)
    for words in (None, torch.zeros(batch, dtype=torch.int64), torch.full((batch,), 2**32 - 1)):
        inputs.random_words = words
        require_same_draws(triton_kernel.sample_codebook_triton, inputs, "cpu")


@triton.jit
def _weights_kernel(u_ptr, weight_ptr, count, BLOCK: tl.constexpr):
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    u = tl.load(u_ptr + ids, mask=ids < count, other=0.0)
    tl.store(weight_ptr + ids, triton_draw.exp_weights(u).to(tl.int64), mask=ids < count)


def _require_same_weights(device: str) -> None:
    u = weight_arguments().to(device)
    weights = torch.empty_like(u, dtype=torch.int64)
    _weights_kernel[(triton.cdiv(len(u), 256),)](u, weights, len(u), BLOCK=256, enable_fp_fusion=False)
    require_equal("weights", weights, exp_weights(u.cpu()))


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_weights_as_the_reference_in_the_interpreter():
    _require_same_weights("cpu")


@pytest.mark.gpu
def test_weights_as_the_reference_on_the_gpu():
    _require_same_weights("cuda")


@pytest.mark.interpreter
def test_a_code_that_starts_at_the_top_p_limit_stays_in_the_interpreter():
    require_same_draws(triton_kernel.sample_codebook_triton, top_p_edge_inputs(), "cpu")


@pytest.mark.interpreter
def test_draws_without_history_in_the_interpreter():
    inputs = sample_codebook_inputs(40, 2, seed=0)
    inputs.penalised = False
    require_same_draws(triton_kernel.sample_codebook_triton, inputs, "cpu")
    without = inputs.to("cpu")
    without.state.seen = None
    assert without.run(triton_kernel.sample_codebook_triton)[0].equal(
        inputs.run(triton_kernel.sample_codebook_triton)[0]
    )


def _ptx(options: dict) -> str:
    kernel, signature, constexprs, _ = triton_kernel.compile_specs()[1]
    source = ASTSource(kernel, signature, constexprs)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


def test_no_product_is_fused_with_a_sum_and_no_subnormal_is_flushed():
    options = triton_kernel.compile_specs()[1][3]
    # ptxas fuses what PTX leaves apart unless the same option forbids it.
    assert options["enable_fp_fusion"] is False
    ptx = _ptx(options)
    assert not re.search(r"\bfma\.|\.ftz|div\.(approx|full)", ptx)
    assert "div.rn.f32" in ptx
    assert re.search(r"\bfma\.", _ptx(options | {"enable_fp_fusion": True})), "the check above sees fused code"
