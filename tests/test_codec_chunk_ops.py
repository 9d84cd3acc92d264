"""Where a wrong codec chunk goes wrong: every call of every op in a few steps, and what a step keeps on the device.

The first part runs on the toy codec on any device, to prove the search itself, and at full size on a GPU. The second
part, on a GPU alone, tells faults of ordering from faults of arithmetic.
"""

import json
from contextlib import ExitStack, nullcontext
from functools import partial
from unittest import mock

import pytest
import torch

from moss_kernels import _launch
from moss_kernels.chunk_epilogue import chunk_epilogue_reference
from moss_kernels.chunk_prologue import chunk_prologue_reference
from moss_kernels.codec_linear import codec_linear_reference
from moss_kernels.codec_linear.reference import add_partials_reference, layer_norm_reference, partial_sums_reference
from moss_kernels.ring_attention import ring_attention, ring_attention_reference, rope_tables, whole_qkv
from moss_kernels.ring_kv_write import ring_kv_write_reference
from moss_kernels.testing.codec_weights import codec_weights
from moss_runtime.graphs import CodecChunk, codec_chunk, codec_layers
from moss_runtime.model.codec import Codec, CodecConfig

# Each op of a step, and the module that calls it.
OPS = {
    "chunk_prologue": codec_chunk,
    "codec_linear": codec_layers,
    "ring_attention": codec_chunk,
    "chunk_epilogue": codec_chunk,
}
# Relative error of one call on its own inputs: bfloat16 roundings of inputs and output stay well below.
TOLERANCE = 0.02
# Outputs of which every bit is promised.
EXACT = ("ring_k", "ring_v", "stage_valid", "offsets", "audio")


def toy(golden, device, dtype):
    return Codec.from_pretrained(golden("codec").directory, device=device, dtype=dtype)


@pytest.fixture(scope="module")
def full_size(request):
    """A bfloat16 codec of the official size with random weights and without an encoder."""
    config = json.loads((request.config.rootpath / "tests" / "manifests" / "codec_config.json").read_text())
    with torch.device("meta"):
        codec = Codec(CodecConfig.from_dict(config))
    codec.encoder = torch.nn.ModuleList()
    shapes = {name: tensor.shape for name, tensor in codec.state_dict().items()}
    codec.load_state_dict(codec_weights(shapes, 0, device="cuda"), assign=True)
    codec.decoder.to(torch.bfloat16)
    return codec.eval()


def random_rings(chunk):
    """What streams before left behind; it must not matter."""
    generator = torch.Generator(chunk.codec.device).manual_seed(0)
    for rings in chunk.slots.stages:
        for ring in (rings.keys, rings.values):
            ring[:, :-1].normal_(generator=generator)


def replaced_ops(replacement):
    """A context in which each op of a step is what `replacement(name, op)` makes of it."""
    stack = ExitStack()
    for op, module in OPS.items():
        stack.enter_context(mock.patch.object(module, op, replacement(op, getattr(module, op))))
    return stack


def relative_error(actual, expected):
    actual, expected = actual.double(), expected.double()
    difference = (actual - expected).norm() / expected.norm().clamp_min(1e-30)
    return difference.item() if difference.isfinite() else float("inf")


def expected_outputs(op, arguments, options):
    """The tensors an op must write and what they must hold, from its inputs before the call; float32 arithmetic."""
    if op == "chunk_prologue":
        *inputs, features, stage_valid, cos_sin = arguments
        copies = (torch.empty_like(features, dtype=torch.float32), torch.empty_like(stage_valid), cos_sin.clone())
        chunk_prologue_reference(*inputs, *copies)
        named = {"features": features, "stage_valid": stage_valid, "cos_sin": cos_sin}
        return dict(zip(named, zip(named.values(), copies, strict=True), strict=True))
    if op == "chunk_epilogue":
        *inputs, offsets, audio = arguments
        copies = (offsets.clone(), audio.clone())
        chunk_epilogue_reference(*inputs, *copies)
        return {"offsets": (offsets, copies[0]), "audio": (audio, copies[1])}
    if op == "codec_linear":
        options = dict(zip(("x", "weight", "out"), arguments, strict=False)) | options
        out, x, weight = options["out"], options["x"].float(), options["weight"].float()
        written = {}
        if options.get("partials") is not None:
            x = x.clone()
            add_partials_reference(x, options["partials"], options["partials_scale"])
            written = {"x": (options["x"], x)}
            x = x.to(options["x"].dtype).float()
        parts = {name: options.get(name) for name in ("norm_weight", "norm_bias", "scale")}
        parts = {name: part if part is None else part.float() for name, part in parts.items()}
        if out.dim() == 3:
            sums = torch.empty_like(out)
            if parts["norm_weight"] is not None:
                x = layer_norm_reference(x, parts["norm_weight"], parts["norm_bias"])
            partial_sums_reference(x, weight, sums)
            return written | {"out": (out, sums)}
        residual = None if parts["scale"] is None else out.float()
        parts |= {"residual": residual, "gelu": options.get("gelu", False), "cos_sin": options.get("cos_sin")}
        y = codec_linear_reference(x, weight, **parts)
        if options.get("normed") is not None:
            norm = (options[name].float() for name in ("next_norm_weight", "next_norm_bias"))
            written |= {"normed": (options["normed"], layer_norm_reference(y.to(out.dtype).float(), *norm))}
        return written | {"out": (out, y)}
    qkv, cos_sin, ring_k, ring_v, *rest, out = arguments
    qkv = whole_qkv(qkv, ring_k.dtype)
    y, keys, values = torch.empty(out.shape, device=out.device), ring_k.clone(), ring_v.clone()
    ring_attention_reference(qkv.float(), cos_sin, ring_k.float(), ring_v.float(), *rest, y)
    assert options == {"write": True, "settled": True}
    ring_kv_write_reference(qkv, cos_sin, keys, values, *rest[:3])
    return {"out": (out, y), "ring_k": (ring_k, keys), "ring_v": (ring_v, values)}


def checked(op, function, place, faults, *arguments, **options):
    """Calls an op; what it wrote is compared with the reference on the same inputs."""
    expected = expected_outputs(op, arguments, options)
    function(*arguments, **options)
    for name, (actual, value) in expected.items():
        error = relative_error(actual, value)
        if not error <= (0 if name in EXACT else TOLERANCE):
            shapes = [tuple(x.shape) for x in (*arguments, *options.values()) if isinstance(x, torch.Tensor)]
            faults.append(f"{place()}: {op} `{name}` is off by {error:.3g}, inputs {shapes}")


def step_faults(chunk, codes, slots, valid):
    """Faults of one step in the order of their calls, by the step's own inputs and by the reference of each op."""
    faults, calls = [], {"number": 0}

    def place():
        return f"call {calls['number']}"

    def counted(op, function, *arguments, **options):
        calls["number"] += 1
        checked(op, function, place, faults, *arguments, **options)

    buffers, rows = chunk.buffers, len(slots)
    before = chunk.slots.offsets[:, slots].clone()
    with replaced_ops(lambda op, function: partial(counted, op, function)):
        audio = chunk(codes, slots, valid)
    layers = sum(stage.config.layers for stage in chunk.stages)
    assert calls["number"] == 2 + 5 * layers + len(chunk.stages)  # one op that no replacement sees would go unchecked
    rates = torch.tensor([[stage.tokens_per_frame] for stage in chunk.stages])
    consumed = rates * torch.tensor(valid)
    kept = {
        "codes": (chunk._codes(rows, codes.shape[1]).cpu(), codes.cpu().long()),
        "slots": (buffers.slots[:rows].cpu(), torch.tensor(slots)),
        "stage_valid": (buffers.stage_valid[:, :rows].cpu(), consumed),
        "offsets": (chunk.slots.offsets[:, slots].cpu(), before.cpu() + consumed),
    }
    for name, (actual, value) in kept.items():
        if not (actual == value).all():
            faults.append(f"`{name}` must be {value.tolist()}, got {actual.tolist()}")
    config, rotations = chunk.stages[0].config, chunk._rotations(rows, codes.shape[1])
    for stage, (rotation, start, rate) in enumerate(zip(rotations, before.cpu(), rates.flatten(), strict=True)):
        positions = start[:, None] + torch.arange(codes.shape[1] * rate)
        expected = rope_tables(positions, config.head_dim, config.max_period)
        if not relative_error(rotation.cpu(), expected) <= TOLERANCE:
            faults.append(f"rotations of stage {stage} are not those of the positions from {start.tolist()} on")
    if not audio.isfinite().all():
        faults.append("audio that is not finite")
    return faults


def require_right_steps(codec, frames, *, steps=3, start=0):
    chunk = CodecChunk(codec, 3, max_batch=4, frames=(frames,))
    random_rings(chunk)
    rates = torch.tensor([[stage.tokens_per_frame] for stage in chunk.stages], device=codec.device)
    chunk.slots.offsets[:, :-1] = start * rates
    size = codec.config.codebook_size
    for step in range(steps):
        codes = torch.randint(size, (2, frames, codec.config.codebooks), device=codec.device)
        faults = step_faults(chunk, codes, [2, 0], [frames, frames])
        assert not faults, f"step {step}, {len(faults)} faults, the first of them:\n" + "\n".join(faults[:10])


def test_every_op_of_the_toy_step_is_right(golden):
    require_right_steps(toy(golden, "cpu", torch.float32), 2)
    require_right_steps(toy(golden, "cpu", torch.bfloat16), 3, start=50)


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_whose_norms_add_partial_sums_is_right(golden, monkeypatch, dtype, attention):
    """Every linear into the stream but a stage's last in two slices, and with `attention` q, k and v, as few rows on a
    GPU do; the same audio."""
    monkeypatch.setattr(codec_chunk, "takes_slices", lambda *sizes: attention)
    codec = toy(golden, "cpu", dtype)
    codes, audio = torch.randint(codec.config.codebook_size, (2, 3, codec.config.codebooks)), []
    for slices in (0, 2):
        monkeypatch.setattr(codec_layers, "partial_slices", mock.Mock(return_value=slices))
        monkeypatch.setattr(codec_layers, "partial_elements", lambda m, n, k: 2 * m * n)
        chunk = CodecChunk(codec, 2, max_batch=2, frames=(3,))
        with mock.patch.object(codec_layers, "codec_linear", side_effect=codec_layers.codec_linear) as linear:
            audio.append(chunk(codes, [0, 1], [3, 3]))
        left = [call.kwargs for call in linear.call_args_list if call.kwargs.get("partials") is not None]
        layers = sum(stage.config.layers for stage in chunk.stages)
        assert len(left) == (2 * layers - len(chunk.stages) if slices else 0)
        outputs = [call.kwargs["out"].dim() for call in linear.call_args_list if "norm_weight" in call.kwargs]
        assert outputs.count(3) == (layers if slices and attention else 0)
        require_right_steps(codec, 2)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    assert relative_error(audio[1], audio[0]) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_whose_linears_leave_normed_rows_is_right(golden, monkeypatch, dtype):
    """Every linear into the stream but a stage's last, as some numbers of rows on a GPU do; the same audio."""
    codec = toy(golden, "cpu", dtype)
    codes, audio = torch.randint(codec.config.codebook_size, (2, 3, codec.config.codebooks)), []
    for leaves in (False, True):
        monkeypatch.setattr(codec_layers, "leaves_normed", mock.Mock(return_value=leaves))
        monkeypatch.setattr(codec_layers, "normed_rows", lambda m, n, k: m)
        chunk = CodecChunk(codec, 2, max_batch=2, frames=(3,))
        with mock.patch.object(codec_layers, "codec_linear", side_effect=codec_layers.codec_linear) as linear:
            audio.append(chunk(codes, [0, 1], [3, 3]))
        calls = [call.kwargs for call in linear.call_args_list]
        layers = sum(stage.config.layers for stage in chunk.stages)
        expected = 2 * layers - len(chunk.stages) if leaves else 0
        assert sum("normed" in call for call in calls) == expected
        assert sum("norm_weight" in call for call in calls) == 2 * layers - expected
        require_right_steps(codec, 2)
    assert torch.equal(audio[1], audio[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"write": False}, "first of them:\n.*call 3: ring_attention `ring_k`"),
        (None, "first of them:\n.*call 3: ring_attention `out`"),
    ],
)
def test_the_search_finds_the_op_that_does_too_little(golden, options, message):
    def replaced(*arguments, write, settled):
        return options and ring_attention(*arguments, **options)

    with mock.patch.object(codec_chunk, "ring_attention", replaced), pytest.raises(AssertionError, match=message):
        require_right_steps(toy(golden, "cpu", torch.float32), 1)


def test_the_search_finds_offsets_that_stay(golden):
    nothing = mock.patch.object(torch.Tensor, "index_add_", lambda *arguments: None)
    with nothing, pytest.raises(AssertionError, match="`offsets` must be"):
        require_right_steps(toy(golden, "cpu", torch.float32), 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("start", [0, 10_000])
@pytest.mark.parametrize("frames", [1, 15])
@torch.no_grad()
def test_every_op_at_full_size_is_right(full_size, monkeypatch, frames, start, dependent):
    """The reference runs between the calls, so that nothing overlaps: what is found is arithmetic or addressing."""
    monkeypatch.setattr(_launch, "enabled", dependent)
    require_right_steps(full_size, frames, start=start)


def waiting(function):
    """The op, and a wait for the device after it."""

    def call(*arguments, **options):
        function(*arguments, **options)
        torch.cuda.synchronize()

    return call


def audio_and_rings(codec, batch, frames, *, wait=False, graph=False):
    """Results of four steps from the same state on."""
    generator = torch.Generator("cuda").manual_seed(1)
    chunk = CodecChunk(codec, batch, max_batch=batch, frames=(frames,))
    random_rings(chunk)
    if graph:
        chunk.capture([batch])
    with replaced_ops(lambda _, function: waiting(function)) if wait else nullcontext():
        shape = (batch, frames, codec.config.codebooks)
        codes = [torch.randint(codec.config.codebook_size, shape, generator=generator, device="cuda") for _ in range(4)]
        audio = [chunk(part, range(batch), [frames] * batch) for part in codes]
    assert bool(chunk.replays) == graph
    state = {f"audio of step {step}": part for step, part in enumerate(audio)}
    for index, rings in enumerate(chunk.slots.stages):
        state |= {f"keys of stage {index}": rings.keys, f"values of stage {index}": rings.values}
    return state


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize(("batch", "frames"), [(1, 1), (3, 15)])
@torch.no_grad()
def test_kernels_one_after_another_give_the_same_bits(full_size, monkeypatch, batch, frames, dependent, graph):
    """Kernels that the stream orders, alone or with dependent launch, against kernels that run alone on the device."""
    monkeypatch.setattr(_launch, "enabled", False)
    expected = audio_and_rings(full_size, batch, frames, wait=True)
    monkeypatch.setattr(_launch, "enabled", dependent)
    actual = audio_and_rings(full_size, batch, frames, graph=graph)
    different = [name for name, value in expected.items() if not torch.equal(actual[name], value)]
    assert not different
