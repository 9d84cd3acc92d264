"""local_frame_decode: the q, k, v table, the error of the CUDA kernel's logits, and what it draws and writes."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moss_kernels.embed_codes import embed_codes_reference
from moss_kernels.local_frame_decode import (
    LocalFrame,
    LocalFrameDecoder,
    LocalFrameWeights,
    local_frame_decode_reference,
    qkv_table_reference,
    reference,
)
from moss_kernels.local_rope_attention import local_rope_attention_lookup_reference
from moss_kernels.sample_codebook import SamplingParams, SamplingState, sample_codebook_reference
from moss_kernels.testing.compare import require_equal
from moss_kernels.testing.local_frame import LocalFrameOutputs, clone_state, frame_state
from moss_kernels.testing.weights import LOCAL_FRAME_SIZES, local_frame_weights

ROOT = Path(__file__).parents[1]
CODEBOOKS = 12
TINY = LOCAL_FRAME_SIZES["tiny"]


@dataclasses.dataclass
class Model:
    weights: LocalFrameWeights
    decoder: LocalFrameDecoder

    @property
    def vocab(self) -> int:
        return self.weights.audio_embeddings.shape[1]

    def hidden(self, batch: int) -> torch.Tensor:
        return torch.randn(batch, self.weights.c_proj_weight.shape[0]).to("cuda", torch.bfloat16)

    def decode(self, hidden, state, row_map, active, teacher_codes=None) -> LocalFrameOutputs:
        outputs = LocalFrameOutputs.allocate(self.weights, len(hidden))
        self.decoder.decode(hidden, state, row_map, active, teacher_codes=teacher_codes, **outputs.arguments())
        return outputs


@pytest.fixture(scope="module", params=["full", "tiny"])
def model(request) -> Model:
    weights = local_frame_weights(7, device="cuda", dtype=torch.bfloat16, **LOCAL_FRAME_SIZES[request.param])
    return Model(weights, LocalFrameDecoder(weights, max_batch=128))


def everyone(batch: int, device: str = "cuda") -> tuple[torch.Tensor, torch.Tensor]:
    """row_map and active of a batch whose row b is request b."""
    return torch.arange(batch, dtype=torch.int32, device=device), torch.ones(batch, dtype=torch.bool, device=device)


def test_weights_give_logits_that_sampling_cares_about():
    for never_stop in (False, True):
        weights = local_frame_weights(3, device="cpu", dtype=torch.float32, **TINY, never_stop=never_stop)
        hidden = torch.randn(64, 256)
        frame = local_frame_decode_reference(hidden, weights, frame_state(weights, 64), *everyone(64, "cpu"))
        assert 2 < frame.audio_logits[frame.continues].std() < 3.5
        share = frame.continues.float().mean()
        assert share == 1 if never_stop else 0.2 < share < 0.8


def test_the_table_form_is_the_plain_form():
    weights = local_frame_weights(1, device="cpu", dtype=torch.float32, **TINY)
    hidden, codes = torch.randn(5, 256), torch.randint(128, (5, CODEBOOKS))
    plain = local_frame_decode_reference(hidden, weights, None, None, everyone(5, "cpu")[1], teacher_codes=codes)
    table = qkv_table_reference(weights)
    assert table.shape == (CODEBOOKS - 1, 128, 3 * 256)
    k_cache, v_cache = plain.k_cache.clone(), plain.v_cache.clone()
    k_cache[:, 1:] = v_cache[:, 1:] = torch.nan
    for p in range(1, CODEBOOKS):
        tables = (table, weights.audio_embeddings)
        attention, x = local_rope_attention_lookup_reference(codes[:, p - 1], *tables, k_cache, v_cache, p)
        # Matrix products of another height may sum in another order.
        output = reference._after_attention(x, attention, weights)
        torch.testing.assert_close(output, plain.hidden[:, p], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(k_cache, plain.k_cache, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(v_cache, plain.v_cache, rtol=1e-4, atol=1e-5)


def test_a_decoder_refuses_what_it_cannot_run():
    sizes = TINY | {"ffn": 768}
    weights = local_frame_weights(1, device="cpu", dtype=torch.bfloat16, **sizes)
    with pytest.raises(NotImplementedError, match=r"`local_frame_decode`: .* got \(256, 768, 4, 128\) with 12"):
        LocalFrameDecoder(weights, max_batch=8)
    weights = local_frame_weights(1, device="cpu", dtype=torch.bfloat16, **TINY)
    with pytest.raises(ValueError, match="`weights` must be on a CUDA device, got cpu"):
        LocalFrameDecoder(weights, max_batch=8)
    with pytest.raises(ValueError, match=r"`max_batch` must be in 1 \.\. 128, got 129"):
        LocalFrameDecoder(weights, max_batch=129)


def test_the_benchmark_checks_its_baseline_without_a_gpu():
    command = [sys.executable, "-m", "bench.bench_local_frame", "--smoke"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == 4
    assert all(line.endswith(" ok") for line in lines)


@dataclasses.dataclass
class Forced:
    """A frame with given codes, by the kernel, by eager bf16 and in float64."""

    codes: torch.Tensor
    kernel: LocalFrameOutputs
    eager: LocalFrame
    exact: LocalFrame

    def errors(self, kernel_name: str, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Absolute errors of the kernel and of eager bf16."""
        exact = getattr(self.exact, name)
        errors = (getattr(self.kernel, kernel_name).double() - exact).abs(), (getattr(self.eager, name) - exact).abs()
        assert not any(error.isnan().any() for error in errors), name
        return errors


@pytest.fixture
def forced(model) -> Forced:
    batch = 128
    hidden, codes = model.hidden(batch), torch.randint(model.vocab, (batch, CODEBOOKS), device="cuda")
    row_map, active = everyone(batch)
    state = frame_state(model.weights, batch, SamplingParams(temperature=0))
    frames = [
        local_frame_decode_reference(hidden.to(dtype), model.weights.to(dtype), None, None, active, teacher_codes=codes)
        for dtype in (torch.bfloat16, torch.float64)
    ]
    return Forced(codes, model.decode(hidden, state, row_map, active, teacher_codes=codes), *frames)


@pytest.mark.gpu
def test_errors_are_at_most_twice_those_of_eager_bf16(forced):
    for kernel_name, name in (
        ("audio_logits", "audio_logits"),
        ("hidden_out", "hidden"),
        ("stop_logits", "stop_logits"),
    ):
        kernel, eager = forced.errors(kernel_name, name)
        # Positions apart: an error in the last ones must not hide behind the first.
        kernel, eager = (error.unflatten(1, (-1, 1)) if error.dim() == 2 else error for error in (kernel, eager))
        allowed = 2 * eager.square().mean((0, 2)).sqrt()
        assert (kernel.square().mean((0, 2)).sqrt() <= allowed).all(), name
        assert kernel.max() <= 2 * eager.max(), name
        # A yardstick that is off by itself would allow anything.
        assert eager.square().mean().sqrt() < 0.02 * getattr(forced.exact, name).std(), name


@pytest.mark.gpu
def test_greedy_codes_are_those_of_eager_bf16_where_the_margin_decides(model, forced):
    kernel, eager = forced.errors("audio_logits", "audio_logits")
    best = forced.eager.audio_logits.float().topk(2).values
    decided = best[..., 0] - best[..., 1] > 2 * (kernel.amax(-1) + eager.amax(-1))
    assert decided.float().mean(0).min() > 0.4
    expected = forced.eager.audio_logits.argmax(-1)
    require_equal("codes", forced.kernel.codes[decided], expected[decided])
    assert forced.kernel.continues.all()
    require_equal("feedback", forced.kernel.feedback, forced.eager.feedback)


def draws(outputs: LocalFrameOutputs, before: SamplingState, row_map, active, pad_id: int) -> tuple[torch.Tensor, ...]:
    """continues, codes and status that the sampler makes of the kernel's own logits, on the CPU."""
    batch = len(row_map)
    status = torch.zeros(batch, dtype=torch.int32)

    def draw(logits, active, parameters, seen, channel) -> torch.Tensor:
        code, bits = torch.empty(batch, dtype=torch.int64), torch.zeros(batch, dtype=torch.int32)
        scalars = (channel, max(channel - 1, 0), pad_id)
        sample_codebook_reference(
            logits.cpu(), row_map, active, *parameters, before.seed, before.frame, seen, *scalars, code, bits
        )
        status.bitwise_or_(bits)
        return code

    text = (before.text_temperature, before.text_top_k, before.text_top_p, None)
    continues = active & (draw(outputs.stop_logits, active, text, None, 0) == 0)
    audio = (before.temperature, before.top_k, before.top_p, before.repetition_penalty)
    channels = [draw(outputs.audio_logits[:, q], continues, audio, before.seen, q + 1) for q in range(CODEBOOKS)]
    before.frame.index_add_(0, row_map.long(), continues.int())
    return continues, torch.stack(channels, 1), status


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 8, 64, 128])
def test_draws_and_state_are_those_of_the_sampler(model, batch):
    state = frame_state(model.weights, batch)
    expected_state = clone_state(state, "cpu")
    row_map, _ = everyone(batch)
    row_map = row_map[torch.randperm(batch)].contiguous()
    active = torch.rand(batch, device="cuda") < 0.9
    row_map[~active] = batch  # the null row
    hidden = model.hidden(batch)
    hidden[~active] = torch.nan
    outputs = model.decode(hidden, state, row_map, active)
    expected = draws(outputs, expected_state, row_map.cpu(), active.cpu(), model.vocab)
    for name, value in zip(("continues", "codes", "status"), expected, strict=True):
        require_equal(name, getattr(outputs, name), value)
    for field in dataclasses.fields(state):
        require_equal(field.name, getattr(state, field.name), getattr(expected_state, field.name))

    weights, continues = model.weights, outputs.continues
    if batch > 8:
        assert 0 < continues.sum() < active.sum()
    text_ids = torch.where(continues, weights.audio_assistant_slot_token_id, weights.pad_token_id)
    tables = (weights.embed_tokens, weights.audio_embeddings)
    require_equal("feedback", outputs.feedback, embed_codes_reference(text_ids, outputs.codes, *tables, model.vocab))


@pytest.mark.gpu
def test_not_finite_input_stays_in_its_row(model):
    row_map, active = everyone(4)
    hidden = model.hidden(4)
    state = frame_state(model.weights, 4)
    clean = model.decode(hidden, clone_state(state), row_map, active)
    broken = hidden.clone()
    broken[1] = torch.nan
    outputs = model.decode(broken, clone_state(state), row_map, active)
    assert outputs.status.ne(0).tolist() == [False, True, False, False]
    rest = torch.tensor([0, 2, 3], device="cuda")
    require_equal("codes", outputs.codes[rest], clean.codes[rest])
    again = model.decode(hidden, clone_state(state), row_map, active)
    require_equal("codes of the next frame", again.codes, clean.codes)
