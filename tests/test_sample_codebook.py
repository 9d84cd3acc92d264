"""sample_codebook's reference against an independent oracle and the official sampler's record."""

import math

import oracle_sample_codebook as oracle
import pytest
import torch

from moss_kernels import sample_codebook
from moss_kernels.sample_codebook import philox, reference
from moss_kernels.testing.cases import PAD_ID, sample_codebook_inputs, top_p_edge_inputs, weight_arguments

LARGEST_WORD = 2**32 - 1


def test_philox_vectors():
    vectors = [(0x0123456789ABCDEF, 5, 7, 0x384A3E87), (42, 0, 0, 0x9CEAF053), (2**63 - 1, 4095, 12, 0x3BA264CA)]
    for seed, frame, channel, word in vectors:
        frames = torch.tensor([frame], dtype=torch.int32)
        assert philox.philox_word(torch.tensor([seed]), frames, channel).item() == word
        assert oracle.philox_word(seed, frame, channel) == word


def test_weight_vectors():
    u = torch.tensor([0.0, -0.5, -1.0, -3.25, -10.0, -23.0, -math.inf])
    assert reference.exp_weights(u).tolist() == [1073741824, 651257344, 395007552, 41633488, 48748, 0, 0]


def test_weights_equal_the_oracle():
    u = weight_arguments()
    assert reference.exp_weights(u).tolist() == [oracle.weight(value) for value in u.numpy()]


def _oracle_rows(inputs) -> list[oracle.Row]:
    state, rows = inputs.state, []
    bits = torch.arange(32)
    for b, row in enumerate(inputs.row_map.tolist()):
        words = state.seen[row, inputs.codebook].long()
        rows.append(
            oracle.Row(
                logits=inputs.logits[b].float().numpy(),
                temperature=state.temperature[row].item(),
                top_k=state.top_k[row].item(),
                top_p=state.top_p[row].item(),
                penalty=state.repetition_penalty[row].item(),
                seen=set(((words[:, None] >> bits) & 1).flatten().nonzero().flatten().tolist()),
            )
        )
    return rows


def _check_draw(inputs, rows: list[oracle.Row], words: list[int]) -> None:
    seen = inputs.state.seen.clone()
    code, status = inputs.run(sample_codebook)
    for b, (row, x) in enumerate(zip(rows, words, strict=True)):
        if not inputs.active[b]:
            assert (code[b], status[b]) == (PAD_ID, 64)
            continue
        assert (code[b], status[b]) == row.draw(x), f"row {b}, x = {x}, {row}"
        if row.candidates:
            bit = 1 << (code[b].item() & 31)
            word = seen[inputs.row_map[b], inputs.codebook, code[b] >> 5]
            word |= bit - 2**32 if bit == 2**31 else bit
    assert torch.equal(inputs.state.seen, seen)


@pytest.mark.parametrize(
    ("vocab", "batch", "dtype"),
    [
        (2, 1500, torch.float32),
        (3, 1500, torch.float16),
        (17, 3000, torch.float32),
        (32, 2000, torch.bfloat16),
        (64, 1800, torch.float32),
        (1024, 100, torch.float32),
        (1024, 80, torch.bfloat16),
        (4096, 20, torch.float32),
    ],
)
def test_equals_the_oracle(vocab, batch, dtype):
    inputs = sample_codebook_inputs(batch, vocab, seed=vocab, dtype=dtype, device_values=True)
    rows = _oracle_rows(inputs)
    pool = inputs.row_map.tolist()
    philox_words = [
        oracle.philox_word(inputs.state.seed[row].item(), inputs.state.frame[row].item(), inputs.codebook + 1)
        for row in pool
    ]
    before = inputs.state.seen.clone()
    random_words = torch.randint(2**32, (batch,)).tolist()
    for words in ([0] * batch, [LARGEST_WORD] * batch, random_words, philox_words):
        inputs.state.seen.copy_(before)
        inputs.random_words = None if words is philox_words else torch.tensor(words)
        _check_draw(inputs, rows, words)


def test_a_code_that_starts_at_the_top_p_limit_stays():
    inputs = top_p_edge_inputs()
    rows = _oracle_rows(inputs)
    assert [len(row.weights) for row in rows] == [2] * 24 + [3] * 24
    _check_draw(inputs, rows, inputs.random_words.tolist())


def _weights(logits, seen_words, temperature, top_k, top_p, penalty) -> torch.Tensor:
    scores = reference.penalised_scores(logits, seen_words, penalty)
    z = scores / temperature[:, None]
    return reference.filtered_weights(torch.where(z == 0, 0.0, z), scores > -math.inf, top_k, top_p)


@pytest.mark.parametrize("name", ["local_hd16", "local_hd80"])
def test_distribution_is_the_official_one(golden, name):
    expected = {key[9:]: value for key, value in golden(name).expected.items() if key.startswith("sampling.")}
    logits, probs = expected["logits"], expected["probs"]
    count, vocab = logits.shape
    words = torch.zeros(count, (vocab + 31) // 32, dtype=torch.int64)
    for row, history in enumerate(expected["history"].tolist()):
        for code in set(history):
            words[row, code >> 5] |= 1 << (code & 31)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    penalty = expected["repetition_penalty"]
    weights = _weights(
        logits, words, expected["temperature"], expected["top_k"].to(torch.int32), expected["top_p"], penalty
    )
    ours = weights.double() / weights.sum(1, keepdim=True)
    z = reference.penalised_scores(logits, words, penalty) / expected["temperature"][:, None]
    for row in range(count):
        # Among codes of equal score at the top_p edge the official choice is arbitrary: compare by falling score.
        order = z[row].sort(descending=True, stable=True).indices
        mine, official = ours[row][order], probs[row].double()[order]
        for score in z[row].unique():
            equal = z[row][order] == score
            official[equal] = official[equal].sort(descending=True).values
        dropped = (official > 0) & (mine == 0)
        assert not ((mine > 0) & (official == 0)).any(), f"row {row}: keeps more"
        assert (official[dropped] <= official.max() * 2**-31).all(), f"row {row}: keeps less"
        exact = torch.softmax(torch.where(mine > 0, z[row][order].double(), -math.inf), 0)
        assert (mine - exact).abs().max() < 1e-7, f"row {row}"
        if z[row].abs().max() < 100:
            assert (mine - official).abs().max() < 1e-6, f"row {row}"
