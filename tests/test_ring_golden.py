"""The recorded codec streams with every layer's attention and ring going through an implementation of the ring ops."""

import pytest
import torch

from moss_kernels import ring_attention, ring_kv_write
from moss_kernels.testing.compare import implementation
from moss_runtime.model.codec import Codec, stream

TOLERANCE = 1e-5  # of the largest value
# Golden folder, implementation of `ring_kv_write`, device. One folder in the interpreter, which is slow.
WHERE = [
    pytest.param("codec", "op", "cpu"),
    pytest.param("codec_mono", "op", "cpu"),
    pytest.param("codec", "triton", "cpu", marks=pytest.mark.interpreter),
    *(
        pytest.param(folder, writer, "cuda", marks=pytest.mark.gpu)
        for folder in ("codec", "codec_mono")
        for writer in ("triton", "cuda")
    ),
]
everywhere = pytest.mark.parametrize(("folder", "writer", "device"), WHERE)


def make_stream(monkeypatch, recorded, ring: str, writer: str, device: str):
    """A stream of three slots; `writer` implements `ring_kv_write`, and Triton the attention, unless it is "op"."""
    attend = ring_attention if writer == "op" else implementation("ring_attention", "triton")
    write = ring_kv_write if writer == "op" else implementation("ring_kv_write", writer)
    # The model shares its masks between layers; the ops make their own.
    monkeypatch.setattr(stream, "ring_attention_reference", lambda *arguments, visible: attend(*arguments))
    monkeypatch.setattr(stream, "ring_kv_write_reference", lambda *arguments, target: write(*arguments))
    return Codec.from_pretrained(recorded.directory, device=device).streaming(3, ring=ring)


def require_close(audio: torch.Tensor, expected: torch.Tensor) -> None:
    assert audio.shape == expected.shape
    assert (audio - expected).abs().max() <= TOLERANCE * expected.abs().max()


@everywhere
@pytest.mark.parametrize("ring", ["exact", "reference"])
def test_streams(monkeypatch, golden, ring, folder, writer, device):
    """Chunks of 15 frames: 60 tokens at the last stage, whose window is 32."""
    recorded = golden(folder)
    decoder = make_stream(monkeypatch, recorded, ring, writer, device)
    codes = recorded.expected["codes"].permute(1, 2, 0)
    chunks = [decoder.step(chunk, [0, 1, 2], [chunk.shape[1]] * 3).cpu() for chunk in codes.split(15, dim=1)]
    key = "offline.audio" if ring == "exact" else "stream.15.audio"
    require_close(torch.cat(chunks, dim=2), recorded.expected[key])


@everywhere
@pytest.mark.parametrize("ring", ["exact", "reference"])
def test_masked_schedule(monkeypatch, golden, ring, folder, writer, device):
    recorded = golden(folder)
    decoder = make_stream(monkeypatch, recorded, ring, writer, device)
    codes = recorded.expected["codes"].permute(1, 2, 0)
    done, parts = [0, 0, 0], [[], [], []]
    for executes in recorded.expected["masked.schedule"].tolist():
        chunk = torch.stack([codes[row, start : start + 3] for row, start in enumerate(done)])
        audio = decoder.step(chunk, [0, 1, 2], [3 * run for run in executes]).cpu()
        for row in (row for row in range(3) if executes[row]):
            parts[row].append(audio[row])
            done[row] += 3
    for row in range(3):
        audio = torch.cat(parts[row], dim=1)
        offline = recorded.expected["offline.audio"][row, :, : audio.shape[1]]
        require_close(audio, recorded.expected[f"masked.audio.{row}"] if ring == "reference" else offline)
