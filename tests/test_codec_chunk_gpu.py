"""The codec chunk step on a GPU: graphs against eager steps, and bf16 at full size against float32."""

import json

import pytest
import torch

from moss_kernels.testing.codec_weights import codec_weights
from moss_runtime.graphs import CodecChunk
from moss_runtime.model.codec import Codec, CodecConfig

pytestmark = pytest.mark.gpu


def toy(golden, dtype):
    return Codec.from_pretrained(golden("codec").directory, dtype=dtype, device="cuda")


def state(chunk):
    return {
        f"{name} of stage {index}": getattr(rings, name).clone()
        for index, rings in enumerate(chunk.slots.stages)
        for name in ("keys", "values", "offset")
    }


def padded(codes, slots, valid, batch, frames):
    """The same step with the rows and frames that a graph of that size adds."""
    rows = len(slots)
    larger = torch.zeros(batch, frames, codes.shape[2], dtype=codes.dtype)
    larger[:rows, : codes.shape[1]] = codes
    return larger, slots + [7] * (batch - rows), valid + [0] * (batch - rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batches", [[1, 2, 4], [4, 1]])
def test_replay_equals_eager_bitwise(golden, dtype, batches):
    """Random schedules of 1 to 4 rows and 1 to 9 frames: other sizes than those captured, and longer ones."""
    codec = toy(golden, dtype)
    graph, eager = (CodecChunk(codec, 7, max_batch=4, frames=(1, 3, 6)) for _ in range(2))
    graph.capture(batches)
    steps = 0
    for step in range(40):
        rows, frames = 1 + step % 4, int(torch.randint(1, 10, ()))
        codes = torch.randint(64, (rows, frames, 12))
        slots = torch.randperm(7)[:rows].tolist()
        valid = torch.randint(0, frames + 1, (rows,)).tolist()
        audio = graph(codes, slots, valid)
        expected = []
        for start in range(0, frames, 6):
            part = codes[:, start : start + 6]
            counts = [min(max(count - start, 0), part.shape[1]) for count in valid]
            batch = min(size for size in batches if size >= rows)
            length = min(size for size in (1, 3, 6) if size >= part.shape[1])
            whole = eager(*padded(part, slots, counts, batch, length))
            expected.append(whole[:rows, :, : part.shape[1] * 8])
            steps += 1
        assert torch.equal(audio, torch.cat(expected, dim=2))
        if step % 9 == 0:
            graph.reset(slots[0]), eager.reset(slots[0])
    for (name, ours), theirs in zip(state(graph).items(), state(eager).values(), strict=True):
        assert torch.equal(ours, theirs), name
    assert (graph.replays, sum(graph.fallbacks.values())) == (steps, 0)


def test_what_was_not_captured_runs_eagerly_and_is_counted(golden):
    chunk = CodecChunk(toy(golden, torch.float32), 4, max_batch=4, frames=(1, 3))
    chunk.capture([2])
    chunk(torch.zeros(2, 3, 12, dtype=torch.int64), [0, 1], [3, 3])
    chunk(torch.zeros(3, 3, 12, dtype=torch.int64), [0, 1, 2], [3, 3, 3])
    assert (chunk.replays, chunk.fallbacks) == (1, {"not_captured": 1})


def test_a_failed_capture_is_logged_and_counted(golden, monkeypatch, caplog):
    chunk = CodecChunk(toy(golden, torch.float32), 2, max_batch=1, frames=(2,))
    compute = chunk.compute

    def fails_in_capture(batch, frames):
        compute(batch, frames)
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("no memory for this graph")

    monkeypatch.setattr(chunk, "compute", fails_in_capture)
    chunk.capture([1])
    chunk(torch.zeros(1, 2, 12, dtype=torch.int64), [0], [2])
    assert chunk.fallbacks == {"capture_failed": 1}
    assert "1 rows x 2 frames could not be captured" in caplog.text


def test_a_replay_neither_waits_nor_allocates(golden):
    chunk = CodecChunk(toy(golden, torch.bfloat16), 4, max_batch=4, frames=(3,))
    chunk.capture([4])
    codes, out = torch.zeros(3, 3, 12, dtype=torch.int64, device="cuda"), torch.empty(3, 2, 24, device="cuda")
    chunk(codes, [0, 1, 2], [3, 3, 3], out=out)
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        chunk(codes, [0, 1, 2], [3, 1, 3], out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated


@pytest.fixture(scope="module")
def full_size(request):
    """Codecs of the official size with random weights, float32 and bfloat16; no encoder."""
    config = json.loads((request.config.rootpath / "tests" / "manifests" / "codec_config.json").read_text())
    codecs = []
    for dtype in (torch.float32, torch.bfloat16):
        with torch.device("meta"):
            codec = Codec(CodecConfig.from_dict(config))
        codec.encoder = torch.nn.ModuleList()
        shapes = {name: tensor.shape for name, tensor in codec.state_dict().items()}
        codec.load_state_dict(codec_weights(shapes, 0, device="cuda"), assign=True)
        codec.decoder.to(dtype)
        codecs.append(codec.eval())
    return codecs


def snr(actual, expected):
    return (10 * torch.log10(expected.square().sum() / (actual - expected).square().sum())).item()


@pytest.mark.parametrize("residual_dtype", [torch.bfloat16, torch.float32])
@torch.no_grad()
def test_bf16_at_full_size_is_as_good_as_eager_bf16(full_size, residual_dtype, capsys):
    """60 frames: windows of 1 to 10 s are partly full. The residual stream in float32 must be better."""
    exact, codec = full_size
    codes = torch.randint(1024, (3, 60, 12), device="cuda")
    expected = exact.decode(codes)
    eager = snr(codec.decode(codes), expected)
    for frames in (1, 4, 15):
        chunk = CodecChunk(codec, 3, max_batch=3, residual_dtype=residual_dtype)
        audio = [chunk(part, [2, 0, 1], [part.shape[1]] * 3) for part in codes.split(frames, dim=1)]
        reached = snr(torch.cat(audio, dim=2), expected)
        with capsys.disabled():
            print(f"\nchunks of {frames}, {residual_dtype} residual: {reached:.2f} dB, eager bf16 {eager:.2f} dB")
        assert reached >= eager - 1
        assert residual_dtype == torch.bfloat16 or reached > eager + 1


@pytest.mark.parametrize(("rows", "frames"), [(24, 8), (33, 2), (48, 8), (64, 6), (96, 4)])
@torch.no_grad()
def test_bf16_of_many_ragged_streams_is_as_good_as_eager_bf16(full_size, rows, frames):
    """Batches and lengths that an engine under load runs, from the streams' first frame on; of some rows no frame."""
    codec = full_size[1]
    codes = torch.randint(1024, (rows, 20, 12), device="cuda")
    expected, eager = (torch.cat([each.decode(part) for part in codes.split(16)]) for each in full_size)
    chunk, taken = CodecChunk(codec, rows, max_batch=rows), torch.zeros(rows, dtype=torch.int64)
    samples, audio = codec.config.samples_per_frame, torch.zeros_like(expected)
    while (left := codes.shape[1] - taken).any():
        counts = torch.minimum(torch.randint(frames + 1, (rows,)), left)
        frame = (taken[:, None] + torch.arange(frames)).clamp(max=codes.shape[1] - 1)
        out = chunk(codes.gather(1, frame[:, :, None].expand(-1, -1, 12).cuda()), range(rows), counts)
        for row, (begin, count) in enumerate(zip(taken.tolist(), counts.tolist(), strict=True)):
            audio[row, :, begin * samples : (begin + count) * samples] = out[row, :, : count * samples]
        taken += counts
    assert snr(audio, expected) >= snr(eager, expected) - 1


@torch.no_grad()
def test_attention_matters_in_these_weights(full_size):
    """Without it a wrong ring would hide in the noise of bf16."""
    exact, codec = full_size
    codes = torch.randint(1024, (1, 30, 12), device="cuda")
    expected = exact.decode(codes)
    eager = snr(codec.decode(codes), expected)
    layers = [layer for stage in exact.decoder if hasattr(stage, "transformer") for layer in stage.transformer.layers]
    weights = [layer.self_attn.out_projs[0].weight for layer in layers]
    kept = [weight.clone() for weight in weights]
    try:
        for weight in weights:
            weight.zero_()
        assert snr(exact.decode(codes), expected) < eager - 20
    finally:
        for weight, old in zip(weights, kept, strict=True):
            weight.copy_(old)


@torch.no_grad()
def test_fp32_at_full_size_equals_offline(full_size):
    exact, _ = full_size
    codes = torch.randint(1024, (2, 22, 12), device="cuda")
    expected = exact.decode(codes)
    chunk = CodecChunk(exact, 2, max_batch=2)
    audio = torch.cat([chunk(part, [0, 1], [part.shape[1]] * 2) for part in codes.split(15, dim=1)], dim=2)
    assert (audio - expected).abs().max() <= 1e-4 * expected.abs().max()
