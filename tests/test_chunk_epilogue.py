"""chunk_epilogue: audio channel by channel, silence beyond the valid frames, offsets of live rows alone."""

import pytest
import torch

from moss_kernels.chunk_epilogue import chunk_epilogue
from moss_kernels.testing.compare import implementation, require_equal

# Stages, and slots with the null slot.
STAGES, SLOTS = 3, 6
# Slot and valid frames of each row: rows without frames name the null slot, and slots of other rows.
ROWS = [(4, 3), (5, 0), (1, 1), (4, 0), (0, 2), (1, 0)]


def make_inputs(rows=ROWS, frames=3, samples=12, channels=2, device="cpu"):
    """Arguments by name; samples that must not be read are NaN."""
    slots, valid = torch.tensor(rows, dtype=torch.int32).view(-1, 2).unbind(1)
    values = torch.randn(len(rows), frames, samples, channels)
    for row, count in zip(values, valid, strict=True):
        row[count:] = torch.nan
    inputs = {
        "samples": values,
        "slots": slots.contiguous(),
        "valid": valid.contiguous(),
        "stage_valid": valid * torch.tensor([[1], [2], [4]], dtype=torch.int32),
        # Beyond 32 bits.
        "offsets": torch.randint(2**33, (STAGES, SLOTS)),
        "audio": torch.full((len(rows), channels, frames * samples), torch.nan),
    }
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def require_right(function, inputs):
    samples, slots, valid, stage_valid, before, _ = (tensor.cpu().clone() for tensor in inputs.values())
    offsets, audio = before.clone(), torch.zeros(inputs["audio"].shape)
    for row, (slot, count) in enumerate(zip(slots.tolist(), valid.tolist(), strict=True)):
        offsets[:, slot] += stage_valid[:, row]
        part = samples[row, :count].flatten(0, 1).T
        audio[row, :, : part.shape[1]] = part
    function(*inputs.values())
    require_equal("audio", inputs["audio"], audio)
    require_equal("offsets", inputs["offsets"], offsets)


@pytest.mark.parametrize("channels", [1, 2, 3])
@pytest.mark.parametrize("rows", [ROWS, ROWS[1:2], ROWS[:1], []])
def test_the_op(rows, channels):
    require_right(chunk_epilogue, make_inputs(rows, channels=channels))


def test_no_frames():
    require_right(chunk_epilogue, make_inputs([(1, 0), (5, 0)], frames=0))


def test_bad_arguments_are_named():
    def call(**changed):
        chunk_epilogue(*(make_inputs() | changed).values())

    with pytest.raises(
        ValueError, match=r"`audio` must be \[B, C, T\*N\] with B = 6, C = 2, T\*N = 36, got \(6, 2, 35\)"
    ):
        call(audio=torch.zeros(6, 2, 35))
    with pytest.raises(TypeError, match="`samples` must be float32, got bfloat16"):
        call(samples=torch.zeros(6, 3, 12, 2, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="`stage_valid` must have stride 1 in its last dimension"):
        call(stage_valid=torch.zeros(6, STAGES, dtype=torch.int32).T)


@pytest.mark.parametrize("rows", [ROWS, []])
def test_opcheck(rows):
    inputs = make_inputs(rows)
    inputs["samples"].nan_to_num_(), inputs["audio"].zero_()
    torch.library.opcheck(torch.ops.moss.chunk_epilogue, tuple(inputs.values()))


@pytest.mark.interpreter
@pytest.mark.parametrize("channels", [1, 2, 3])
@pytest.mark.parametrize(("rows", "samples"), [(ROWS, 12), (ROWS[:3], 300), (ROWS[1:2], 512)])
def test_triton_in_the_interpreter(rows, samples, channels):
    require_right(implementation("chunk_epilogue", "triton"), make_inputs(rows, samples=samples, channels=channels))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "frames", "samples"), [(ROWS, 15, 3840), (ROWS[:1], 3, 3840), (ROWS, 4, 100)])
@pytest.mark.parametrize("channels", [1, 2])
def test_triton_on_the_gpu(rows, frames, samples, channels):
    inputs = make_inputs(rows, frames, samples, channels, device="cuda")
    require_right(implementation("chunk_epilogue", "triton"), inputs)
