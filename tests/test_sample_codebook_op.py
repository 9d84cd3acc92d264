"""The torch op of sample_codebook: schema, fake implementation, torch.compile, messages about wrong arguments."""

import pytest
import torch

from moss_kernels import sample_codebook
from moss_kernels.testing.cases import sample_codebook_inputs
from moss_kernels.testing.compare import require_equal

NAMES = [argument.name for argument in torch.ops.moss.sample_codebook.default._schema.arguments]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _arguments(device="cpu", batch=8, vocab=64) -> dict[str, object]:
    inputs = sample_codebook_inputs(batch, vocab, seed=2).to(device)
    code = torch.zeros(batch, 2, dtype=torch.int64, device=device)
    status = torch.zeros(batch, dtype=torch.int32, device=device)
    return dict(zip(NAMES, inputs.arguments(code[:, 1], status), strict=False))


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device):
    arguments = _arguments(device)
    torch.library.opcheck(torch.ops.moss.sample_codebook.default, tuple(arguments.values()))
    # The stop head: no penalty, no history.
    stop_head = arguments | {"repetition_penalty": None, "seen": None, "channel": 0}
    torch.library.opcheck(torch.ops.moss.sample_codebook.default, tuple(stop_head.values()))


@pytest.mark.parametrize("device", DEVICES)
def test_compiles_into_a_full_graph(device):
    def step(logits, arguments):
        sample_codebook(**arguments | {"logits": logits * 2})
        return arguments["code"] + 1

    eager, compiled = _arguments(device), _arguments(device)
    backend = "inductor" if device == "cuda" else "aot_eager"
    expected = step(eager["logits"], eager)
    actual = torch.compile(step, fullgraph=True, backend=backend)(compiled["logits"], compiled)
    require_equal("result", actual, expected)
    for name in ("code", "status", "seen"):
        require_equal(name, compiled[name], eager[name])


def _wrong(name, error, message, value):
    return pytest.param(name, error, message, value, id=f"{name}: {message}")


@pytest.mark.parametrize(
    ("name", "error", "message", "value"),
    [
        _wrong("logits", ValueError, r"\[B, V\]", lambda x: x[0]),
        _wrong("logits", TypeError, "float32, bfloat16 or float16", lambda x: x.double()),
        _wrong("logits", ValueError, "stride 1 in its last dimension", lambda x: x.t().contiguous().t()),
        _wrong("logits", ValueError, r"2 \.\. 4096 columns, got 1", lambda x: x[:, :1]),
        _wrong("logits", ValueError, r"2 \.\. 4096 columns, got 4097", lambda x: x.new_zeros(8, 4097)),
        _wrong("row_map", TypeError, "int32", lambda x: x.long()),
        _wrong("row_map", ValueError, "B = 8", lambda x: x[:7]),
        _wrong("active", TypeError, "bool", lambda x: x.int()),
        _wrong("temperature", TypeError, "float32", lambda x: x.half()),
        _wrong("top_k", ValueError, r"S\+1 = 12", lambda x: x[:-1]),
        _wrong("top_p", ValueError, "contiguous", lambda x: x.repeat_interleave(2)[::2]),
        _wrong("repetition_penalty", ValueError, r"S\+1 = 12", lambda x: x[:-1]),
        _wrong("seed", TypeError, "int64", lambda x: x.int()),
        _wrong("frame", TypeError, "int32", lambda x: x.long()),
        _wrong("seen", ValueError, r"ceil\(V/32\) = 2", lambda x: x[:, :, :1].contiguous()),
        _wrong("channel", ValueError, r"0 \.\. 2\^31-1, got -1", lambda x: -1),
        _wrong("codebook", ValueError, r"0 \.\. 1, got 2", lambda x: 2),
        _wrong("code", TypeError, "int64", lambda x: x.int()),
        _wrong("status", ValueError, r"\[B\]", lambda x: x[:, None]),
    ],
)
def test_wrong_argument_is_named(name, error, message, value):
    arguments = _arguments()
    with pytest.raises(error, match=rf"`sample_codebook`: `{name}` must .*{message}"):
        sample_codebook(**arguments | {name: value(arguments[name])})


def test_empty_batch():
    arguments = _arguments()
    rows = ("logits", "row_map", "active", "code", "status")
    sample_codebook(**arguments | {name: arguments[name][:0] for name in rows})
