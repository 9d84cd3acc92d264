"""What the steps of generation compute: the prefill, and logits that do not depend on the batch."""

from pathlib import Path

import pytest
import torch

from moss_kernels import SamplingParams
from moss_runtime.model import MossTTS, tts

GOLDEN = Path(__file__).parent / "golden"
FRAMES = 6


@pytest.fixture(params=["local_hd16", "local_hd80"])
def model(request) -> MossTTS:
    return MossTTS.from_pretrained(GOLDEN / request.param)


def make_prompts(model: MossTTS, lengths: list[int]) -> list[torch.Tensor]:
    config = model.config
    prompts = []
    for length in lengths:
        rows = torch.randint(0, config.audio_vocab_size, (length, 1 + config.n_vq))
        rows[torch.rand(length) < 0.5, 1:] = config.audio_pad_token_id
        prompts.append(rows)
    return prompts


@pytest.mark.parametrize("lengths", [[7], [5, 9, 1], [1, 1]])
def test_prefill_leaves_the_last_row_to_the_first_frame(model, lengths):
    prompts = make_prompts(model, lengths)
    inputs = []
    model.transformer.register_forward_pre_hook(lambda module, args: inputs.append(args[0].clone()))
    next(model.generate_frames(prompts, [SamplingParams(text_temperature=0)] * len(prompts)))
    *prefill, first_frame = inputs
    longest = max(lengths)
    assert [part.shape[1] for part in prefill] == ([longest - 1] if longest > 1 else [])
    assert torch.equal(first_frame[:, 0], torch.stack([model.embed(rows[-1]) for rows in prompts]))
    for part in prefill:
        for row, rows in zip(part, prompts, strict=True):
            assert torch.equal(row[longest - len(rows) :], model.embed(rows[:-1]))


def test_logits_alone_and_in_a_batch_agree(model, monkeypatch):
    prompts = make_prompts(model, [9, 1, 23, 4, 17, 6])
    params = [SamplingParams(seed=seed, text_temperature=0.3) for seed in range(6)]
    decode, steps = tts.local_frame_decode_reference, []

    def record(hidden, weights, state, row_map, active):
        frame = decode(hidden, weights, state, row_map, active)
        # Rows that do not take part hold arbitrary values.
        stop = frame.stop_logits.where(active[:, None], 0)
        audio = frame.audio_logits.flatten(1).where(frame.continues[:, None], 0)
        steps.append(torch.cat((stop, audio), 1))
        return frame

    def logits(rows: list[int]) -> torch.Tensor:
        """[rows, steps, logits] of a batch of these requests."""
        steps.clear()
        model.generate([prompts[i] for i in rows], [params[i] for i in rows], max_frames=FRAMES)
        return torch.stack(steps, 1)

    monkeypatch.setattr(tts, "local_frame_decode_reference", record)
    together = logits(list(range(6)))
    assert together.shape[1] > 3
    for row in range(6):
        (alone,) = logits([row])
        taken = together[row, : len(alone)]
        assert (alone - taken).abs().max() <= 1e-5 * taken.abs().max()
        assert not together[row, len(alone) :].any()


def test_tables_of_codebooks_are_one_piece():
    """No second copy of them, and after a move to another dtype those of the moved model."""
    model = MossTTS.from_pretrained(GOLDEN / "local_hd16")
    before = [table.weight.clone() for table in model.audio_embeddings]
    for dtype in (torch.float32, torch.bfloat16):
        packed = model.to(dtype).frame_weights().audio_embeddings
        assert packed.dtype == dtype and torch.equal(packed, torch.stack(before).to(dtype))
        assert [part.data_ptr() for part in packed] == [table.weight.data_ptr() for table in model.audio_embeddings]
        assert model.frame_weights().audio_embeddings is packed
