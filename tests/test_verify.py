"""`moss-tts verify`: the demo checkpoint passes, and whatever computes something else is named."""

import contextlib
import dataclasses
import math
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from moss_kernels import _library, backbone_linear, sample_codebook
from moss_kernels.local_frame_decode import local_frame_decode_reference
from moss_runtime.cli import main
from moss_runtime.demo_checkpoint import write_demo_checkpoint
from moss_runtime.graphs.clip_encoder import ClipEncoder
from moss_runtime.graphs.mixed import MixedStep
from moss_runtime.model.tts import MossTTS
from moss_runtime.observe import FallbackReason
from moss_runtime.random_weights import codec_config, random_codec, random_model, random_prompts
from moss_runtime.verify import Result, Results, checks, ops
from moss_runtime.verify.results import compare

ALL_OPS = {name.removeprefix("moss::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("moss::")}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    directory = tmp_path_factory.mktemp("verify") / "demo"
    write_demo_checkpoint(directory)
    return str(directory)


def verified(demo, capsys, *options: str, frames: int = 3) -> tuple[int, str, list[str]]:
    """Exit code, output, and what is said to have failed."""
    code = main(["verify", "--model", demo, "--device", "cpu", "--frames", str(frames), *options])
    output = capsys.readouterr().out
    *_, last = output.splitlines()
    return code, output, [] if last.endswith("all passed") else last.split("FAILED: ")[1].split(", ")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_checkpoint_passes(demo, capsys, dtype):
    code, output, failed = verified(demo, capsys, "--dtype", dtype, frames=6)
    assert (code, failed) == (0, [])
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]
    table = {(row[0], row[1]): row for row in rows}
    assert len(ALL_OPS) >= 15
    # In bfloat16 the codes of the model may differ.
    stages = {"backbone", "streamed audio", "clip encoder"}
    stages |= {"frames", "mixed step"} if dtype == "float32" else set()
    assert {name for name, _ in table} == ALL_OPS | stages
    assert all(row[-1].startswith("ok") and int(row[2]) > 0 for row in rows)
    assert int(table["sample_codebook", "reference"][5]) > 12 * 6 * 3
    assert " dB to float32 offline, at least " in table["streamed audio", "eager"][-1]


def flipped(compute, output):
    """An implementation whose last argument gets the wrong sign."""

    def wrong(*arguments, **options):
        compute(*arguments, **options)
        arguments[output].neg_()

    return wrong


@pytest.mark.parametrize(
    ("module", "name", "output", "failed"),
    [
        # An op calls something else than its reference.
        ("moss_kernels.rms_norm", "add_rms_norm_reference", -1, "rms_norm (reference)"),
        ("moss_kernels.prefill_linear", "prefill_linear_reference", -1, "prefill_linear (reference)"),
        ("moss_kernels.paged_attention", "paged_attention_reference", 5, "paged_attention (reference)"),
        ("moss_kernels.prefill_attention", "prefill_attention_reference", -1, "prefill_attention (reference)"),
        ("moss_kernels.ring_kv_write", "ring_kv_write_reference", 3, "ring_kv_write (reference)"),
        ("moss_kernels.chunk_prologue", "chunk_prologue_reference", -1, "chunk_prologue (reference)"),
        ("moss_kernels.chunk_epilogue", "chunk_epilogue_reference", -1, "chunk_epilogue (reference)"),
        # All ops are right, and what is made of them is not.
        ("moss_runtime.graphs.backbone_step", "rms_norm", 0, "backbone (eager)"),
        ("moss_runtime.graphs.codec_chunk", "chunk_prologue", -3, "streamed audio (eager)"),
        ("moss_runtime.graphs.clip_encoder", "ring_attention", -1, "clip encoder (eager)"),
    ],
)
def test_a_flipped_sign_fails(demo, capsys, monkeypatch, module, name, output, failed):
    # Packages of ops are shadowed by the functions of their names.
    place = sys.modules[module]
    monkeypatch.setattr(place, name, flipped(getattr(place, name), output))
    code, _, found = verified(demo, capsys)
    assert code == 1 and failed in found


def test_frames_that_differ_beside_a_prefill_pass_fail(demo, capsys, monkeypatch):
    backbone = MixedStep._backbone
    monkeypatch.setattr(MixedStep, "_backbone", lambda *arguments: -backbone(*arguments))
    code, _, failed = verified(demo, capsys)
    assert (code, failed) == (1, ["mixed step (eager)"])


def test_draws_that_differ_fail(demo, capsys, monkeypatch):
    place = sys.modules["moss_kernels.sample_codebook"]
    draw = place.sample_codebook_reference

    def wrong(*arguments):
        draw(*arguments)
        arguments[13][:1] ^= 1  # the first row's code

    monkeypatch.setattr(place, "sample_codebook_reference", wrong)
    code, output, failed = verified(demo, capsys)
    assert code == 1 and "sample_codebook (reference)" in failed
    (row,) = (line for line in output.splitlines() if "│ sample_codebook " in line)
    compared, equal = (int(cell) for cell in row.split("│")[6:8])
    assert 0 < equal < compared


def test_streams_of_a_wrong_length_fail(demo, capsys, monkeypatch):
    speak = checks.speak

    def shortened(runtime, prompts):
        spoken = speak(runtime, prompts)
        return dataclasses.replace(spoken, audio=[spoken.audio[0][:, :-1], *spoken.audio[1:]])

    monkeypatch.setattr(checks, "speak", shortened)
    code, output, failed = verified(demo, capsys)
    assert (code, failed) == (1, ["streamed audio (eager)"]) and " samples, not " in output


def test_codes_that_depend_on_another_clip_fail(demo, capsys, monkeypatch):
    encode = ClipEncoder._pass

    def mixed(encoder, clips, length):
        codes = encode(encoder, clips, length)
        codes[0][0] ^= len(clips) - 1
        return codes

    monkeypatch.setattr(ClipEncoder, "_pass", mixed)
    code, output, failed = verified(demo, capsys)
    assert (code, failed) == (1, ["clip encoder (eager)"]) and "98.7% of the codes as in float32" in output


def test_a_codec_that_only_decodes():
    model = random_model("tiny", device="cpu", dtype=torch.float32, layers=1)
    codec = random_codec(codec_config("tiny"), device="cpu")
    results = checks.verify(model, codec, random_prompts(model, [3]), frames=1)
    assert results.passed and "clip encoder" not in {result.name for result in results}


def linear_inputs() -> tuple[torch.Tensor, ...]:
    return torch.randn(3, 8), torch.randn(4, 8), torch.empty(3, 4)


def test_every_implementation_that_works_is_compared(monkeypatch):
    @contextlib.contextmanager
    def missing():
        raise NotImplementedError
        yield

    @contextlib.contextmanager
    def broken():
        raise RuntimeError("no such instruction")
        yield

    contexts = [("cuda", missing()), ("triton", broken()), ("reference", contextlib.nullcontext())]
    monkeypatch.setattr(ops, "_implementations", lambda device: contexts)
    results = Results()
    with ops.OpCheck(results):
        backbone_linear(*linear_inputs())
    found = {result.implementation: result for result in results}
    assert list(found) == ["triton", "reference"] and found["reference"].passed
    assert found["triton"].failure == "RuntimeError: no such instruction" and not results.passed


def test_a_call_is_compared_once_and_leaves_its_arguments_alone():
    results, (x, weight, out) = Results(), linear_inputs()
    with ops.OpCheck(results):
        for _ in range(2):
            backbone_linear(x, weight, out)
        backbone_linear(x.clone(), weight, out)
    (result,) = results
    assert result.cases == 2
    expected = torch.empty_like(out)
    backbone_linear(x, weight, expected)
    assert torch.equal(out, expected)


def test_forced_backend_holds_for_a_while():
    requested, device = _library.requested_backend(), torch.device("cpu")
    with _library.forced_backend("reference"):
        assert _library.requested_backend() == "reference"
        assert _library.backend_for("backbone_linear", ("triton", "reference"), device) == "reference"
        with _library.forced_backend("triton"), pytest.raises(NotImplementedError, match="MOSS_BACKEND=triton"):
            _library.backend_for("backbone_linear", ("triton", "reference"), device)
    assert _library.requested_backend() == requested


def test_results():
    good, bad = Result("op", "cuda", 1.0, 2.0, 3, 3), Result("op", "cuda", 0.5, 0.1, 5, 5)
    results = Results()
    assert not results.passed  # nothing was compared
    results.add(good)
    assert results.passed
    results.add(bad)
    (both,) = results
    assert (both.error, both.bound, both.codes, both.equal, both.cases) == (0.5, 0.1, 8, 8, 2) and not both.passed
    assert not Result("op", "cuda", codes=3, equal=2).passed
    assert not Result("op", "cuda", error=math.nan, bound=1.0).passed
    assert not good.merged(Result("op", "cuda", failure="broke")).passed


def test_bound_is_twice_the_error_of_eager():
    exact = torch.tensor([1.0, -2.0, math.nan], dtype=torch.float64)
    eager = exact.float() + 0.25
    numbers = compare(exact.float() - 0.5, exact, eager, torch.float32)
    assert numbers["error"] == 0.5 and numbers["bound"] == pytest.approx(0.5, rel=1e-4)
    assert compare(torch.tensor([1.0, -2.0, 0.0]), exact, eager, torch.float32)["error"] == math.inf
    assert compare(torch.tensor([1.0, math.nan, math.nan]), exact, eager, torch.float32)["error"] == math.inf
    empty = torch.empty(0)
    assert compare(empty, empty.double(), empty, torch.float32) == {"error": 0.0, "bound": 0.0}


class Decoder:
    """Stands in for the kernel of a frame: the logits of the reference, and what the sampler draws of them."""

    def __init__(self, model, *, sign: float = 1.0, shift: int = 0):
        self.model, self.sign, self.shift = model, sign, shift

    def decode(self, hidden, state, row_map, active, *, teacher_codes, codes, audio_logits, **others):
        weights = self.model.frame_weights()
        frame = local_frame_decode_reference(hidden, weights, None, None, active, teacher_codes=teacher_codes)
        audio_logits.copy_(self.sign * frame.audio_logits)
        parameters = (state.temperature, state.top_k, state.top_p, state.repetition_penalty, state.seed, state.frame)
        for book in range(codes.shape[1]):
            code, status = torch.empty_like(codes[:, 0]), torch.zeros(len(codes), dtype=torch.int32)
            numbers = (book + 1, book, weights.audio_pad_token_id)
            draw = (audio_logits[:, book].contiguous(), row_map, active, *parameters, state.seen, *numbers)
            sample_codebook(*draw, code, status)
            codes[:, book] = (code + self.shift) % audio_logits.shape[2]


@pytest.mark.parametrize(
    ("fault", "error", "equal"), [({}, False, True), ({"sign": -1.0}, True, True), ({"shift": 1}, False, False)]
)
def test_the_kernel_of_a_frame(demo, fault, error, equal):
    """Its logits are compared with the reference, its codes with what the sampler draws of its own logits."""
    model = MossTTS.from_pretrained(demo)
    runtime = SimpleNamespace(model=model, frame=SimpleNamespace(decoder=Decoder(model, **fault)))
    results = Results()
    with torch.no_grad():
        checks._check_local_frame(runtime, torch.randn(2, model.config.backbone.hidden_size), results)
    (result,) = results
    assert (result.error > result.bound, result.equal == result.codes) == (error, equal)
    assert result.codes == 2 * model.config.n_vq and result.passed == (not fault)


@pytest.mark.parametrize(("replays", "failed", "passed"), [(3, 0, True), (0, 0, False), (3, 1, False)])
def test_work_that_no_graph_did_shows(replays, failed, passed):
    used = SimpleNamespace(replays=5, fallbacks=Counter({"not_captured": 4}))
    graphs = SimpleNamespace(replays=replays, fallbacks=Counter({FallbackReason.CAPTURE_FAILED: failed}))
    chunk = SimpleNamespace(chunk=used)
    runtime = SimpleNamespace(frame=SimpleNamespace(graphs=used), prefill=SimpleNamespace(graphs=graphs), feed=chunk)
    results = Results()
    checks._check_replays(runtime, results)
    assert [result.passed for result in results] == [True, passed, True]


@pytest.mark.gpu
@pytest.mark.parametrize("size", ["tiny", "full"])
def test_all_kernels_of_a_gpu_pass(size, capsys):
    layers = 2 if size == "full" else None
    model = random_model(size, device="cuda", dtype=torch.bfloat16, layers=layers)
    codec = random_codec(codec_config(size), device="cuda", dtype=torch.bfloat16, encoder=True)
    results = checks.verify(model, codec, random_prompts(model, [20, 33, 40]))
    failed = [dataclasses.astuple(result) for result in results if not result.passed]
    assert results.passed, failed
    assert {(result.name, result.implementation) for result in results} >= {
        ("sample_codebook", "triton"),
        ("rms_norm", "triton"),
        ("frames", "graph"),
        ("mixed step", "graph"),
        ("mixed replays", "graph"),
        ("streamed audio", "graph"),
        ("clip encoder", "graph"),
        ("clip encoder replays", "graph"),
    }
