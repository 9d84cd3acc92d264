"""Bytes that kernels must move: what a call is noted with, and to which kernel that is brought."""

from types import SimpleNamespace

import pytest
import torch

from moss_kernels.codec_linear import codec_linear
from moss_kernels.local_frame_decode.reference import LocalFrameWeights
from moss_kernels.paged_attention import AttentionScratch, paged_attention
from moss_kernels.prefill_attention import prefill_attention
from moss_kernels.prefill_linear import prefill_linear
from moss_kernels.rms_norm import rms_norm
from moss_kernels.testing.backbone import PagedInputs
from moss_kernels.testing.ring import RingInputs
from moss_kernels.testing.weights import LOCAL_FRAME_SIZES, local_frame_weights
from moss_runtime.observe.traffic import BYTES, Traffic, bytes_by_kernel, local_frame_bytes, mean_bytes


def noted(run) -> dict[str, float]:
    with Traffic() as traffic:
        run()
    return mean_bytes(traffic.calls)


def test_operations_exist():
    for name in BYTES:
        namespace, op = name.split("::")
        assert hasattr(getattr(torch.ops, namespace), op), name


def test_products():
    x, weight, out = torch.ones(3, 8), torch.ones(8, 5), torch.ones(3, 5)
    assert noted(lambda: x @ weight) == {"aten::mm": 4 * (24 + 40 + 15)}
    assert noted(lambda: torch.mm(x, weight, out=out)) == {"aten::mm": 4 * (24 + 40 + 15)}
    # The sum is read and written.
    assert noted(lambda: torch.addmm(out, x, weight, out=out)) == {"aten::addmm": 4 * (24 + 40 + 30)}


def test_a_residual_is_read_and_written():
    x, partials, weight, out = torch.ones(2, 8), torch.ones(3, 2, 8), torch.ones(8), torch.ones(2, 8)
    assert noted(lambda: rms_norm(x, None, weight, 1e-6, out)) == {"moss::rms_norm": 4 * (16 + 8 + 16)}
    assert noted(lambda: rms_norm(x, partials, weight, 1e-6, out)) == {"moss::rms_norm": 4 * (32 + 48 + 8 + 16)}
    square, scale = torch.ones(8, 8), torch.ones(8)
    assert noted(lambda: prefill_linear(x, square, out)) == {"moss::prefill_linear": 4 * (16 + 64 + 16)}
    assert noted(lambda: prefill_linear(x, square, out, add=True)) == {"moss::prefill_linear": 4 * (16 + 64 + 32)}
    assert noted(lambda: codec_linear(x, square, out)) == {"moss::codec_linear": 4 * (16 + 64 + 16)}
    scaled = noted(lambda: codec_linear(x, square, out, scale=scale, scratch=torch.empty(16)))
    assert scaled == {"moss::codec_linear": 4 * (16 + 64 + 8 + 32)}


def test_angles_are_read_where_they_rotate():
    x, weight, out, cos_sin = torch.ones(2, 8), torch.ones(6, 8), torch.ones(2, 6), torch.ones(2, 1, 2)
    assert noted(lambda: codec_linear(x, weight, out, cos_sin=cos_sin)) == {"moss::codec_linear": 4 * (76 + 4)}


def test_attention_reads_the_tokens_that_rows_hold():
    heads, kv_heads, head_dim = 4, 2, 16
    kv = PagedInputs.make([(5, True), (70, True), (9, False), (None, False)], kv_heads=kv_heads, head_dim=head_dim)
    qkv, out = torch.ones(4, (heads + 2 * kv_heads) * head_dim), torch.empty(4, heads * head_dim)
    norm, cos_sin = torch.ones(head_dim), torch.ones(128, head_dim)
    scratch = AttentionScratch.allocate(4, heads, kv_heads, head_dim, "cpu")
    arguments = (qkv, norm, norm, 1e-6, cos_sin, *kv.layer(), out, scratch)
    expected = qkv.nbytes + out.nbytes + (6 + 71) * 2 * kv_heads * head_dim * 4
    assert noted(lambda: paged_attention(*arguments)) == {"moss::paged_attention": expected}


def test_attention_of_prompts_reads_each_key_once():
    q, pages, table = torch.ones(4 * 16, 4 * 16), torch.ones(12, 2, 16, 16), torch.arange(9, dtype=torch.int32)
    tiles = torch.tensor([(10, 16), (26, 4), (10, 1), (0, 0)], dtype=torch.int32)
    arguments = (q, pages, pages, table.view(3, 3)[[0, 0, 2, 1]], tiles, torch.empty_like(q))
    expected = 2 * q.nbytes + (30 + 11) * 2 * 2 * 16 * 4
    assert noted(lambda: prefill_attention(*arguments)) == {"moss::prefill_attention": expected}


@pytest.mark.parametrize("write", [False, True])
def test_attention_reads_the_window_of_each_stream(write):
    rows = [(0, 3, 2), (1, 2, 100), (2, 0, 50)]
    inputs = RingInputs.make(rows, slots=3, tokens=3, heads=2, head_dim=16, capacity=8, window=8)
    out, token = torch.empty(3, 3, 32), 2 * 2 * 16 * 4
    arguments = (inputs.qkv, inputs.cos_sin, inputs.ring_k, inputs.ring_v, inputs.slots, inputs.valid, inputs.offset, 8)
    expected = inputs.qkv.nbytes + inputs.cos_sin.nbytes + out.nbytes + (2 + 7 + 5 * write) * token
    assert noted(lambda: torch.ops.moss.ring_attention(*arguments, False, out, write)) == {
        "moss::ring_attention": expected
    }


def test_weights_of_a_frame():
    """1455 MB at full size, of 12 positions that each need three linears and a head."""
    sizes = LOCAL_FRAME_SIZES["tiny"]
    weights: LocalFrameWeights = local_frame_weights(0, device="cpu", dtype=torch.bfloat16, **sizes, never_stop=True)
    hidden, ffn = weights.fc_out_weight.shape
    books, vocab = len(weights.audio_embeddings), weights.audio_embeddings[0].shape[0]
    linears = hidden * hidden + 2 * hidden * ffn
    assert local_frame_bytes(weights) == 2 * (3 * hidden**2 + books * (linears + vocab * hidden))


class Event(SimpleNamespace):
    """A profiled operator with kernels [(name, duration)], and operators inside it."""

    def __init__(self, name, start, kernels=(), children=()):
        kernels = [SimpleNamespace(name=kernel, duration=duration) for kernel, duration in kernels]
        super().__init__(name=name, time_range=SimpleNamespace(start=start), kernels=kernels, cpu_parent=None)
        self.cpu_children = list(children)
        for child in self.cpu_children:
            child.cpu_parent = self


def test_bytes_go_to_the_longest_kernel_of_a_call():
    inner = Event("aten::mm", 4, [("library", 9)])
    outer = Event("moss::codec_linear", 3, [("norm", 2)], [inner])
    events = [
        outer,
        inner,
        Event("moss::codec_linear", 1, [("stream", 5), ("norm", 2)]),
        Event("aten::mm", 9, [("x", 1)]),
    ]
    calls = [("moss::codec_linear", 100), ("moss::codec_linear", 300), ("aten::mm", 50)]
    assert bytes_by_kernel(events, calls) == {"stream": 100, "library": 300, "x": 50}


def test_what_is_not_known_is_left_out():
    calls = [("moss::backbone_linear", 10), ("moss::rms_norm", 20), ("moss::rms_norm", 30)]
    # backbone_linear's kernel also runs for somebody else; one of two norms is missing; and one launches nothing.
    events = [Event("moss::backbone_linear", 0, [("stream", 1)]), Event("other", 1, [("stream", 1)])]
    assert bytes_by_kernel([*events, Event("moss::rms_norm", 2, [("norm", 1)])], calls) == {}
    both = [Event("moss::rms_norm", 2, [("norm", 1)]), Event("moss::rms_norm", 3)]
    assert bytes_by_kernel([*events, *both], calls) == {"norm": 20}
