"""The codec chunk step: offline audio for every cut, and what it leaves alone."""

import importlib
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moss_kernels.testing.compare import implementation
from moss_runtime.graphs import CodecChunk, codec_chunk, codec_layers
from moss_runtime.graphs.codec_weights import code_table, decoder_weights
from moss_runtime.model.codec import Codec

ROOT = Path(__file__).parents[1]
FRAMES = 61
TOLERANCE = 1e-5  # of the peak
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=["codec", "codec_mono"])
def recorded(request, golden):
    return golden(request.param)


@pytest.fixture(scope="module", params=DEVICES)
def codec(request, recorded):
    return Codec.from_pretrained(recorded.directory, device=request.param)


@pytest.fixture(scope="module")
def codes(recorded):
    return recorded.expected["codes"].permute(1, 2, 0)


@pytest.fixture(scope="module")
def offline(recorded):
    return recorded.expected["offline.audio"]


@pytest.fixture(scope="module")
def stereo(golden):
    return Codec.from_pretrained(golden("codec").directory)


def assert_close(actual, expected):
    assert actual.shape == expected.shape
    assert (actual.cpu() - expected.cpu()).abs().max() <= TOLERANCE * expected.abs().max()


def state(chunk):
    return [part.clone() for rings in chunk.slots.stages for part in (rings.keys, rings.values, rings.offset)]


def poison(chunk):
    """What no valid token wrote must not matter: stale rings, and whatever the buffers hold."""
    for rings in chunk.slots.stages:
        rings.keys[:, :-1], rings.values[:, :-1] = float("nan"), float("nan")
    for name in ("streams", "wide", "audio"):
        getattr(chunk.buffers, name).fill_(float("nan"))


@pytest.mark.parametrize("frames", [1, 3, 7, 15, 40])
def test_every_cut_is_the_recorded_offline_audio(codec, codes, offline, frames):
    chunk = CodecChunk(codec, 4, max_batch=3)
    poison(chunk)
    audio = [chunk(part, [2, 0, 3], [part.shape[1]] * 3) for part in codes.split(frames, dim=1)]
    assert_close(torch.cat(audio, dim=2), offline)
    assert all(not ring[:, -1].any() for rings in chunk.slots.stages for ring in (rings.keys, rings.values))


@settings(max_examples=15, deadline=None)
@given(data=st.data(), frames=st.integers(1, 9))
def test_ragged_rows_equal_the_stream_step_by_step(golden, stereo, data, frames):
    """Rows change places, some wait, some are padding; long input goes in several steps (here of at most 4 frames)."""
    codes = golden("codec").expected["codes"].permute(1, 2, 0)
    chunk, stream = CodecChunk(stereo, 5, max_batch=5, frames=(1, 4)), stereo.streaming(5)
    slots, done = [4, 1, 2], [0, 0, 0]
    for _ in range(6):
        order = data.draw(st.permutations([0, 1, 2, None, None]), label="order")
        part = torch.full((5, frames, 12), 1024)  # the pad code, which is out of range
        counts = []
        for row, source in enumerate(order):
            limit = 0 if source is None else min(frames, FRAMES - done[source])
            counts.append(data.draw(st.integers(0, limit), label="valid"))
            if counts[-1]:
                part[row, : counts[-1]] = codes[source, done[source] : done[source] + counts[-1]]
                done[source] += counts[-1]
        names = [5 if source is None else slots[source] for source in order]
        expected = stream.step(part, names, counts)
        assert_close(chunk(part, names, counts), expected)
        for row, count in enumerate(counts):
            assert not chunk(part, names, [0] * 5)[row].any()
            assert not expected[row, :, count * 8 :].any()
        for ours, theirs in zip(chunk.slots.stages, stream.slots.stages, strict=True):
            assert torch.equal(ours.offset, theirs.offset)
            torch.testing.assert_close(ours.keys, theirs.keys)


def test_a_step_changes_only_the_slots_it_names(stereo, golden):
    codes = golden("codec").expected["codes"].permute(1, 2, 0)
    chunk = CodecChunk(stereo, 4, max_batch=6)
    chunk(codes[:, :9], [0, 1, 2], [9, 9, 9])
    before = state(chunk)
    chunk(codes[:, 9:14].repeat(2, 1, 1), [2, 0, 4, 0, 3, 4], [5, 0, 0, 0, 0, 0])
    for old, new in zip(before, state(chunk), strict=True):
        slot_dimension = old.dim() - 4 if old.dim() > 1 else 0
        rest = torch.tensor([0, 1, 3, 4])
        assert torch.equal(old.index_select(slot_dimension, rest), new.index_select(slot_dimension, rest))
        assert not torch.equal(old, new)


def test_a_reset_slot_equals_a_fresh_one(stereo, golden):
    codes = golden("codec").expected["codes"].permute(1, 2, 0)[:1, :40]
    chunk = CodecChunk(stereo, 2, max_batch=1)
    fresh = chunk(codes, [0], [40])
    poison(chunk)
    chunk.reset(0)
    assert torch.equal(chunk(codes, [0], [40]), fresh)


def test_slots_and_weights_are_shared(stereo, golden):
    """A stream begun by `CodecStream` goes on in the chunk step, over the same slots; linears are not copied."""
    expected = golden("codec").expected
    codes = expected["codes"].permute(1, 2, 0)
    stream = stereo.streaming(3)
    chunk = CodecChunk(stereo, stream.slots, max_batch=3)
    audio = [stream.step(codes[:, :20], [0, 1, 2], [20] * 3), chunk(codes[:, 20:], [0, 1, 2], [41] * 3)]
    assert_close(torch.cat(audio, dim=2), expected["offline.audio"])
    layer = stereo.decoder[0].transformer.layers[0]
    assert chunk.stages[0].layers[0].linear1["weight"].data_ptr() == layer.linear1.weight.data_ptr()


def test_output_goes_where_it_is_wanted(stereo, golden):
    codes = golden("codec").expected["codes"].permute(1, 2, 0)[:2, :5]
    expected = CodecChunk(stereo, 2, max_batch=2)(codes, [0, 1], [5, 3])
    out = torch.full((2, 2, 40), torch.nan)
    chunk = CodecChunk(stereo, 2, max_batch=2)
    assert chunk(codes.to(torch.int16), torch.tensor([0, 1]), torch.tensor([5, 3]), out=out) is out
    assert torch.equal(out, expected)
    kept = chunk(codes, [0, 1], [5, 5])
    before = kept.clone()
    chunk(codes, [0, 1], [5, 5])
    assert torch.equal(kept, before)  # the next step does not overwrite what was handed out


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_counts_of_any_dtype_go_in_several_steps(codec, codes, dtype):
    expected = CodecChunk(codec, 2, max_batch=2, frames=(1, 4))(codes[:2, :9], [1, 0], [9, 3])
    slots, valid = torch.tensor([[1, 0], [9, 3]], dtype=dtype)
    for device in {torch.device("cpu"), codec.device}:
        chunk = CodecChunk(codec, 2, max_batch=2, frames=(1, 4))
        assert torch.equal(chunk(codes[:2, :9], slots.to(device), valid.to(device)), expected)


def test_float32_residual_stream_around_bf16(golden):
    """With the toy's small gains a bf16 stream loses the branches; a float32 one keeps them."""
    recorded = golden("codec")
    codes, offline = recorded.expected["codes"].permute(1, 2, 0), recorded.expected["offline.audio"]
    codec = Codec.from_pretrained(recorded.directory, dtype=torch.bfloat16)

    def snr(residual_dtype):
        chunk = CodecChunk(codec, 3, max_batch=3, residual_dtype=residual_dtype)
        audio = chunk(codes, [0, 1, 2], [FRAMES] * 3)
        return 10 * torch.log10(offline.square().sum() / (audio - offline).square().sum())

    assert snr(torch.float32) > snr(None) > 20


def test_code_table_is_the_quantizer_and_the_first_input_projection(stereo, golden):
    codes = golden("codec").expected["codes"].permute(1, 2, 0)
    table = code_table(stereo.quantizer, stereo.decoder[0].input_proj)
    stream = sum(table[q][codes[..., q]] for q in range(12))
    torch.testing.assert_close(stream, stereo.decoder[0].input_proj(stereo.quantizer.decode(codes)))


def test_output_projections_make_the_next_residual_stream(stereo):
    stages, starts = decoder_weights(stereo), (0, 2, 4)
    assert [stage.tokens_per_frame for stage in stages] == [1, 2, 4]
    for stage, start in zip(stages, starts, strict=True):
        x = torch.randn(2, 3, stage.config.d_model)
        expected = stereo.decoder[start + 1](stereo.decoder[start].output_proj(x))
        if start != starts[-1]:
            expected = stereo.decoder[start + 2].input_proj(expected)
        actual = (x @ stage.output_proj.T).reshape(expected.shape)
        torch.testing.assert_close(actual, expected)


def test_what_ran_eagerly_is_counted(stereo, golden):
    codes = golden("codec").expected["codes"].permute(1, 2, 0)
    chunk = CodecChunk(stereo, 3, max_batch=3, frames=(1, 4))
    chunk.capture([1, 3])
    chunk(codes[:, :9], [0, 1, 2], [9, 9, 9])
    assert (chunk.replays, chunk.fallbacks) == (0, {"device": 3})


def test_buffers_are_sized_before_the_first_step(stereo):
    small, large = (CodecChunk(stereo, 1, max_batch=rows, frames=(1, 3)).buffers for rows in (2, 4))
    assert small.size_in_bytes * 2 == large.size_in_bytes
    assert small.size_in_bytes >= sum(tensor.nbytes for tensor in (small.streams, small.wide, small.audio))


@pytest.mark.parametrize(
    ("slots", "valid", "message"),
    [
        ([0, 0], [1, 2], "names slot 0 twice"),
        ([0, 3], [1, 1], "must be in 0..2, got 3"),
        ([0, 1], [1, 4], "`valid` must be in 0..3, got 4"),
        ([0, 1, 2], [0, 0, 0], "at most 2 rows, got 3"),
    ],
)
def test_wrong_rows_are_refused_before_anything_changes(stereo, golden, slots, valid, message):
    codes = golden("codec").expected["codes"].permute(1, 2, 0)
    chunk = CodecChunk(stereo, 2, max_batch=2)
    with pytest.raises(ValueError, match=message):
        chunk(codes[: len(slots), :3], slots, valid)
    assert not any(part.any() for part in state(chunk))


def test_sizes_must_be_positive(stereo):
    with pytest.raises(ValueError, match=r"`max_batch` and `frames` must be positive, got 0 and \[1\]"):
        CodecChunk(stereo, 2, max_batch=0, frames=(1,))


def test_no_rows_and_no_frames(stereo):
    chunk = CodecChunk(stereo, 2, max_batch=2)
    assert chunk(torch.zeros(0, 3, 12, dtype=torch.int64), [], []).shape == (0, 2, 24)
    assert chunk(torch.zeros(2, 0, 12, dtype=torch.int64), [0, 1], [0, 0]).shape == (2, 2, 0)


@pytest.mark.interpreter
def test_the_step_of_triton_kernels_is_the_recorded_audio(golden, monkeypatch):
    """Every kernel of the step, as a GPU would run them, on two rows and three chunks."""
    recorded = golden("codec")
    codec = Codec.from_pretrained(recorded.directory)
    ops = ("chunk_epilogue", "chunk_prologue", "codec_linear", "ring_attention")
    kernels = {op: implementation(op, "triton") for op in ops}
    kernels["ring_attention"] = _attend_and_write
    for op, kernel in kernels.items():
        module = importlib.import_module(f"moss_kernels.{op}")
        place = codec_layers if op == "codec_linear" else codec_chunk
        monkeypatch.setattr(place, op, partial(_launch, op, module._check, kernel))
    chunk = CodecChunk(codec, 3, max_batch=2, frames=(6,))
    poison(chunk)
    codes = recorded.expected["codes"].permute(1, 2, 0)[:2]
    audio = torch.cat([chunk(part, [2, 0], [part.shape[1]] * 2) for part in codes[:, :15].split(6, dim=1)], dim=2)
    assert_close(audio, recorded.expected["offline.audio"][:2, :, : 15 * 8])


def _attend_and_write(*arguments):
    *step, write, _settled = arguments
    implementation("ring_attention", "triton")(*step)
    assert write
    implementation("ring_kv_write", "triton")(*step[:7])


def _launch(op, check, kernel, *arguments, **options):
    """Calls a kernel with the arguments of its op, in the op's order."""
    names = [argument.name for argument in getattr(torch.ops.moss, op).default._schema.arguments]
    if op == "codec_linear":
        options |= dict(zip(("x", "weight", "out"), arguments, strict=False))
        *arguments, cos_sin = [options.get(name, False if name == "gelu" else None) for name in names]
        assert cos_sin is None
    else:
        arguments = (*arguments, *options.values())
    check(*arguments)
    kernel(*arguments)


def test_the_benchmark_runs_without_a_gpu():
    command = [sys.executable, "-m", "bench.bench_codec_chunk", "--smoke"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[:2] for line in lines if line.endswith(" ok")] == [
        [f"codec_chunk/B3/T4{rings}", impl]
        for rings in ("", "/young")
        for impl in ("runtime", "runtime_fp32_residual", "torch_graph")
    ]
