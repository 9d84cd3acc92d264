"""chunk_prologue: features of codes, valid tokens and rotary tables of all stages, in every implementation."""

import pytest
import torch

from moss_kernels.chunk_prologue import chunk_prologue, dequantize_codes_reference
from moss_kernels.ring_attention import rope_frequencies, rope_tables
from moss_kernels.testing.compare import implementation, require_equal

CODEBOOKS, VOCAB, SLOTS = 12, 37, 5
RATES = (1, 2, 20, 4)
WRITTEN = ("features", "stage_valid", "cos_sin")
# Of cosines and sines by other means; angles are the same numbers.
ROUNDINGS = 2e-7


class Inputs:
    """Arguments by name; of the codes one in five is the pad code, some are far outside."""

    def __init__(
        self,
        batch=3,
        frames=4,
        width=10,
        *,
        head_dim=16,
        start=1000,
        codes_dtype=torch.int64,
        dtype=torch.float32,
        rates=RATES,
        device="cpu",
    ):
        codes = torch.randint(VOCAB, (batch, frames, CODEBOOKS))
        codes[torch.rand(codes.shape) < 0.2] = VOCAB
        if codes.numel():
            codes[0, 0, :4] = torch.tensor([-1, VOCAB + 1, 32767, -32768])
        self.codes = codes.to(codes_dtype)
        self.table = torch.randn(CODEBOOKS, VOCAB, width)
        self.slots = torch.randint(SLOTS + 1, (batch,)).int()
        self.valid = torch.randint(frames + 1, (batch,)).int()
        self.offsets = torch.randint(start, start + 100, (len(rates), SLOTS + 1))
        self.rates = torch.tensor(rates, dtype=torch.int32)
        self.frequencies = rope_frequencies(head_dim, 10_000.0, "cpu")
        self.features = torch.full((batch, frames, width), torch.nan, dtype=dtype)
        # Rows of a larger buffer, as a step has them.
        wide = torch.full((len(rates), batch + 2), -7, dtype=torch.int32, device=device)
        self.stage_valid = wide[:, :batch]
        self.cos_sin = torch.full((batch * frames * sum(rates), head_dim // 2, 2), torch.nan)
        # A tensor that is there already keeps its strides.
        vars(self).update({name: tensor.to(device) for name, tensor in vars(self).items()})

    def run(self, function):
        function(*vars(self).values())
        return {name: getattr(self, name).cpu() for name in WRITTEN}

    def expected(self):
        """Row by row and stage by stage."""
        frames = self.codes.shape[1]
        slots = self.slots.cpu().long()
        parts = []
        for offset, rate in zip(self.offsets.cpu(), self.rates.tolist(), strict=True):
            for slot in slots:
                positions = offset[slot] + torch.arange(frames * rate)
                parts.append(rope_tables(positions, 2 * len(self.frequencies), 10_000.0))
        features = dequantize_codes_reference(self.codes.cpu(), self.table.cpu()).to(self.features.dtype)
        stage_valid = torch.stack([self.valid.cpu() * rate for rate in self.rates.tolist()]).int()
        cos_sin = torch.cat(parts) if parts else self.cos_sin.cpu()
        return {"features": features, "stage_valid": stage_valid, "cos_sin": cos_sin}


def require_right(function, inputs):
    actual, expected = inputs.run(function), inputs.expected()
    for name in ("features", "stage_valid"):
        require_equal(name, actual[name], expected[name])
    assert actual["cos_sin"].shape == expected["cos_sin"].shape
    torch.testing.assert_close(actual["cos_sin"], expected["cos_sin"], rtol=0, atol=ROUNDINGS)


@pytest.mark.parametrize("codes_dtype", [torch.int64, torch.int32, torch.int16])
@pytest.mark.parametrize(("batch", "frames"), [(3, 4), (1, 1), (2, 0), (0, 3)])
def test_the_op(batch, frames, codes_dtype):
    require_right(chunk_prologue, Inputs(batch, frames, codes_dtype=codes_dtype))


@pytest.mark.parametrize("codes_dtype", [torch.int64, torch.int32, torch.int16])
def test_features_are_sums_of_known_codes(codes_dtype):
    inputs = Inputs(codes_dtype=codes_dtype)
    expected = torch.zeros(3, 4, 10)
    for row in range(3):
        for frame in range(4):
            for q, code in enumerate(inputs.codes[row, frame].tolist()):
                if 0 <= code < VOCAB:
                    expected[row, frame] += inputs.table[q, code]
    require_equal("features", inputs.run(chunk_prologue)["features"], expected)


def test_a_bf16_sum_rounds_once():
    # Steps of bf16 are 2 at 256: each 0.75 would be lost on its own.
    inputs = Inputs(1, 1, 1, dtype=torch.bfloat16)
    inputs.codes.zero_()
    inputs.table.fill_(0.75)
    inputs.table[0] = 256
    assert inputs.run(chunk_prologue)["features"].item() == 264


def test_an_unknown_code_hides_nothing_of_the_table():
    inputs = Inputs()
    inputs.table[:, 0] = torch.nan
    inputs.codes[inputs.codes == 0] = 1
    assert inputs.run(chunk_prologue)["features"].isfinite().all()


def test_bad_arguments_are_named():
    def call(**changed):
        chunk_prologue(*(vars(Inputs()) | changed).values())

    with pytest.raises(ValueError, match=r"`table` must be \[Q, V, F\] with Q = 12, got \(11, 37, 10\)"):
        call(table=torch.zeros(11, 37, 10))
    with pytest.raises(TypeError, match="`codes` must be int64, int32 or int16, got float32"):
        call(codes=torch.zeros(3, 4, 12))
    with pytest.raises(ValueError, match=r"`stage_valid` must be \[L, B\] with L = 4, B = 3, got \(3, 3\)"):
        call(stage_valid=torch.zeros(3, 3, dtype=torch.int32))
    with pytest.raises(TypeError, match="`offsets` must be int64, got int32"):
        call(offsets=torch.zeros(4, 6, dtype=torch.int32))


@pytest.mark.parametrize("batch", [0, 2])
def test_opcheck(batch):
    inputs = Inputs(batch, 3)
    inputs.features.zero_(), inputs.cos_sin.zero_()
    torch.library.opcheck(torch.ops.moss.chunk_prologue, tuple(vars(inputs).values()))


def test_torch_compile():
    compiled = torch.compile(chunk_prologue, fullgraph=True, dynamic=True, backend="aot_eager")
    require_right(compiled, Inputs())


@pytest.mark.interpreter
@pytest.mark.parametrize("start", [0, 1_000_000, 10_000_000])
@pytest.mark.parametrize(("batch", "frames", "width", "head_dim"), [(2, 3, 24, 16), (1, 2, 300, 12)])
def test_triton_in_the_interpreter(batch, frames, width, head_dim, start):
    require_right(
        implementation("chunk_prologue", "triton"), Inputs(batch, frames, width, head_dim=head_dim, start=start)
    )


@pytest.mark.interpreter
def test_triton_reads_short_codes():
    require_right(implementation("chunk_prologue", "triton"), Inputs(2, 3, codes_dtype=torch.int16))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "frames", "width"), [(1, 1, 768), (64, 15, 768), (3, 2, 100)])
@pytest.mark.parametrize("start", [0, 1_000_000, 10_000_000])
def test_triton_on_the_gpu(dtype, batch, frames, width, start):
    options = {"head_dim": 64, "start": start, "dtype": dtype, "rates": (1, 2, 4, 8, 16, 32), "device": "cuda"}
    require_right(implementation("chunk_prologue", "triton"), Inputs(batch, frames, width, **options))


def require_rounded_once(start, device):
    """Cosines and sines against float64 of the same angles."""
    inputs = Inputs(2, 3, 8, head_dim=64, start=start, rates=(32,), device=device)
    actual = inputs.run(implementation("chunk_prologue", "triton"))["cos_sin"]
    positions = inputs.offsets[0, inputs.slots.long()][:, None] + torch.arange(3 * 32, device=device)
    angle = (inputs.frequencies * positions.flatten()[:, None].float()).double()
    exact = torch.stack((angle.cos(), angle.sin()), dim=-1).cpu()
    assert (actual - exact).abs().max() < 1.1 * 2**-25


@pytest.mark.interpreter
@pytest.mark.parametrize("start", [0, 10_000, 10_000_000])
def test_rotations_in_the_interpreter_round_once(start):
    require_rounded_once(start, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("start", [0, 10_000, 10_000_000])
def test_rotations_on_the_gpu_round_once(start):
    require_rounded_once(start, "cuda")
