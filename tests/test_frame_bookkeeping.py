"""frame_bookkeeping: every buffer bit by bit against a loop over rows, in every implementation."""

import importlib

import pytest
import torch

from moss_kernels.frame_bookkeeping import frame_bookkeeping_begin, frame_bookkeeping_end
from moss_kernels.testing.compare import require_equal

HIDDEN, CODEBOOKS, MAX_FRAMES, NULL = 20, 12, 6, 7
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Pool row, active, continues, draw status, frames before, limit, finished before.
ROWS = [
    (3, True, True, 0, 0, 6, False),  # first frame
    (0, True, True, 0, 5, 6, False),  # reaches the limit
    (NULL, False, False, 0, 0, 0, True),  # padding
    (5, True, False, 0, 2, 6, False),  # stops
    (1, True, True, 2, 3, 6, False),  # its logits were not finite
    (6, True, False, 3, 1, 6, False),  # nor here, and it drew stop
    (2, False, True, 1, 4, 6, False),  # paused
    (4, True, True, 0, 2, 2, True),  # finished, and the host does not know
    (NULL, False, True, 5, 0, 0, True),
    (3, False, True, 0, 0, 6, False),  # paused, and of a row that also is live
]


class Pool:
    """Inputs and state of a frame; what must not be read is NaN or nonsense."""

    def __init__(self, rows=ROWS, dtype=torch.float32):
        generator = torch.Generator().manual_seed(5)

        def floats(*shape):
            return torch.randn(shape, generator=generator).to(dtype)

        def integers(*shape, dtype=torch.int32):
            return torch.randint(900, shape, generator=generator).to(dtype)

        index, active, continues, draw_status, frames, limit, finished = zip(*rows, strict=True)
        self.row_map = torch.tensor(index, dtype=torch.int32)
        self.active, self.continues = torch.tensor(active), torch.tensor(continues)
        self.draw_status = torch.tensor(draw_status, dtype=torch.int32)
        self.codes, self.feedback = integers(len(rows), CODEBOOKS, dtype=torch.int64), floats(len(rows), HIDDEN)
        self.embeds = torch.full_like(self.feedback, torch.nan)
        self.live = torch.ones(len(rows), dtype=torch.bool)
        self.staging = floats(NULL + 1, HIDDEN)
        self.pool_codes = integers(NULL + 1, CODEBOOKS, dtype=torch.int64)
        self.history = integers(NULL + 1, MAX_FRAMES, CODEBOOKS, dtype=torch.int16)
        self.positions, self.status = integers(NULL + 1), torch.full((NULL + 1,), 4, dtype=torch.int32)
        self.stopped = torch.zeros(NULL + 1, dtype=torch.bool)
        self.frames, self.max_frames = (torch.zeros(NULL + 1, dtype=torch.int32) for _ in range(2))
        self.finished = torch.zeros(NULL + 1, dtype=torch.bool)
        self.frames[self.row_map] = torch.tensor(frames, dtype=torch.int32)
        self.max_frames[self.row_map] = torch.tensor(limit, dtype=torch.int32)
        self.finished[self.row_map] = torch.tensor(finished)

    def to(self, device) -> "Pool":
        copy = object.__new__(Pool)
        vars(copy).update({name: tensor.to(device, copy=True) for name, tensor in vars(self).items()})
        return copy

    @property
    def begin(self) -> tuple[torch.Tensor, ...]:
        return self.row_map, self.active, self.staging, self.finished, self.embeds, self.live

    @property
    def end(self) -> tuple[torch.Tensor, ...]:
        inputs = (self.row_map, self.live, self.codes, self.continues, self.feedback, self.draw_status)
        state = (self.staging, self.pool_codes, self.history, self.positions, self.frames, self.max_frames)
        return (*inputs, *state, self.stopped, self.finished, self.status)

    def expected(self) -> "Pool":
        """After one frame, row by row."""
        after = self.to("cpu")
        for b, row in enumerate(self.row_map.tolist()):
            after.embeds[b] = self.staging[row]
            after.live[b] = live = bool(self.active[b]) and not bool(self.finished[row])
            if not live:
                continue
            if self.continues[b] and self.draw_status[b] == 0:
                after.staging[row], after.pool_codes[row] = self.feedback[b], self.codes[b]
                after.history[row, self.frames[row]] = self.codes[b].short()
                after.positions[row] += 1
                after.frames[row] += 1
                after.finished[row] = bool(after.frames[row] == self.max_frames[row])
            else:
                after.finished[row] = True
                after.stopped[row] = not self.continues[b]
                after.status[row] |= self.draw_status[b]
        return after


def require_frame(begin, end, pool: Pool, device="cpu") -> None:
    actual, expected = pool.to(device), pool.expected()
    begin(*actual.begin)
    end(*actual.end)
    for name, tensor in vars(expected).items():
        require_equal(name, getattr(actual, name), tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_op(dtype):
    pool = Pool(dtype=dtype)
    require_frame(frame_bookkeeping_begin, frame_bookkeeping_end, pool)
    # A loop that never wrote would agree with an op that never does.
    assert not torch.equal(pool.expected().staging, pool.staging)
    assert pool.expected().finished.tolist() == [True, True, False, False, True, True, True, True]
    assert pool.expected().status.tolist() == [4, 6, 4, 4, 4, 4, 7, 4]


def triton_kernels():
    module = importlib.import_module("moss_kernels.frame_bookkeeping.triton_kernel")
    return module.frame_bookkeeping_begin_triton, module.frame_bookkeeping_end_triton


@pytest.mark.interpreter
@pytest.mark.parametrize("rows", [ROWS, ROWS[2:3], ROWS[:1]])
def test_triton_in_the_interpreter(rows):
    require_frame(*triton_kernels(), Pool(rows))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [ROWS, ROWS[2:3], ROWS[:1]])
def test_triton_on_the_gpu(rows, dtype):
    require_frame(*triton_kernels(), Pool(rows, dtype), "cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_finished_row_is_masked_from_the_next_frame_on(device):
    pool = Pool().to(device)
    frame_bookkeeping_begin(*pool.begin)
    frame_bookkeeping_end(*pool.end)
    before = pool.to("cpu")
    frame_bookkeeping_begin(*pool.begin)
    assert pool.live.tolist() == [True] + [False] * (len(ROWS) - 1)
    frame_bookkeeping_end(*pool.end)
    for name, tensor in vars(pool.to("cpu")).items():
        if name not in ("embeds", "live"):
            changed = [row for row in range(len(tensor)) if not torch.equal(tensor[row], getattr(before, name)[row])]
            assert changed in ([], [3]), name


def test_empty_batch():
    require_frame(frame_bookkeeping_begin, frame_bookkeeping_end, _first_rows(Pool(), 0))


def _first_rows(pool: Pool, count: int) -> Pool:
    short = pool.to("cpu")
    for name in ("row_map", "active", "continues", "draw_status", "codes", "feedback", "embeds", "live"):
        setattr(short, name, getattr(short, name)[:count])
    return short


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device):
    pool = Pool().to(device)
    pool.embeds.zero_()
    torch.library.opcheck(torch.ops.moss.frame_bookkeeping_begin.default, pool.begin)
    torch.library.opcheck(torch.ops.moss.frame_bookkeeping_end.default, pool.end)


def test_wrong_argument_is_named():
    row_map, active, *rest = Pool().begin
    with pytest.raises(ValueError, match=r"`frame_bookkeeping_begin`: `active` must be \[B\] with B = 10, got \(9,\)"):
        frame_bookkeeping_begin(row_map, active[1:], *rest)
    *inputs, status = Pool().end
    with pytest.raises(TypeError, match=r"`frame_bookkeeping_end`: `status` must be int32, got int64"):
        frame_bookkeeping_end(*inputs, status.long())
