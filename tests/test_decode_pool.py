"""Rows of the decode pool: their life, their reset, and what a frame may touch."""

import dataclasses

import pytest
import torch

from moss_kernels import SamplingParams
from moss_kernels.testing.compare import require_equal
from moss_runtime.model.config import ModelConfig
from moss_runtime.state.decode_pool import DecodePool, PoolFull, StaleLeaseError

ROWS, MAX_FRAMES = 4, 6
PARAMS = SamplingParams(temperature=0.7, top_k=0, top_p=0.5, repetition_penalty=1.3, text_top_k=-1, text_top_p=1e-300)


@pytest.fixture
def config(golden) -> ModelConfig:
    return ModelConfig.from_directory(golden("local_hd16").directory)


def make_pool(config, device="cpu", rows=ROWS, dtype=torch.float32) -> DecodePool:
    return DecodePool(config, rows=rows, max_frames=MAX_FRAMES, dtype=dtype, device=device)


@pytest.fixture
def pool(config) -> DecodePool:
    return make_pool(config)


def state(pool: DecodePool) -> dict[str, torch.Tensor]:
    """All tensors by name."""
    tensors = {name: value for name, value in vars(pool).items() if isinstance(value, torch.Tensor)}
    named = {name: value for name, value in tensors.items() if not name.startswith("_")}
    return named | {field.name: getattr(pool.sampling, field.name) for field in dataclasses.fields(pool.sampling)}


def poison(pool: DecodePool, rows=slice(0, -1)) -> None:
    """What earlier holders may have left."""
    for tensor in state(pool).values():
        tensor[rows] = torch.nan if tensor.is_floating_point() else 1 if tensor.dtype == torch.bool else 77


class Event:
    done = False

    def query(self) -> bool:
        return self.done


def acquire(pool: DecodePool, request_id="a", **options):
    return pool.acquire(request_id, SamplingParams(), **{"seed": 1, "max_frames": 3} | options)


def end(pool: DecodePool, lease, event=None) -> None:
    pool.finish(lease)
    pool.consumed(lease, event)
    pool.release(lease)


@pytest.mark.parametrize("rows", [1, 15, 16, 64])
def test_layout_and_size(config, rows):
    pool = make_pool(config, rows=rows, dtype=torch.bfloat16)
    shapes = {name: (tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in state(pool).items()}
    codebooks, words = config.n_vq, -(-config.audio_vocab_size // 32)
    assert shapes["staging"] == ((config.backbone.hidden_size,), torch.bfloat16)
    assert shapes["history"] == ((MAX_FRAMES, codebooks), torch.int16)
    assert shapes["seen"] == ((codebooks, words), torch.int32)
    assert shapes["stopped"] == ((), torch.bool)
    for name, tensor in state(pool).items():
        assert len(tensor) == rows + 1 and tensor.is_contiguous() and tensor.data_ptr() % 16 == 0, name
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in state(pool).values()}
    allocated = sum(storage.nbytes() for storage in storages.values())
    assert pool.size_in_bytes == allocated
    assert DecodePool.bytes(config, rows=rows, max_frames=MAX_FRAMES, dtype=torch.bfloat16) == allocated


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_reused_row_is_as_new(config, device):
    fresh, used = make_pool(config, device), make_pool(config, device)
    for _ in range(2):
        end(used, acquire(used, "earlier"))
        poison(used)
        leases = [p.acquire("a", PARAMS, seed=2**63 - 1, max_frames=3, position=41) for p in (fresh, used)]
        assert leases[0].row == leases[1].row
        row = leases[0].row
        for name, tensor in state(used).items():
            if name not in ("staging", "history"):
                require_equal(name, tensor[row], state(fresh)[name][row])
        fresh.abort(leases[0])
        end(used, leases[1])


@pytest.mark.parametrize("device", DEVICES)
def test_acquired_row_holds_the_request(config, device):
    pool = make_pool(config, device)
    poison(pool)
    row = pool.acquire("a", PARAMS, seed=2**63 - 1, max_frames=3, position=41).row
    expected = make_pool(config).sampling
    expected.set_row(row, PARAMS, seed=2**63 - 1)
    for field in dataclasses.fields(expected):
        require_equal(field.name, getattr(pool.sampling, field.name)[row], getattr(expected, field.name)[row])
    values = {"positions": 41, "frames": 0, "max_frames_row": 3, "status": 0, "stopped": False, "finished": False}
    assert {name: getattr(pool, name)[row].item() for name in values} == values
    assert not pool.codes[row].any()


@pytest.mark.parametrize("device", DEVICES)
def test_reset_touches_no_other_row(config, device):
    pool = make_pool(config, device)
    poison(pool)
    before = {name: tensor.clone().nan_to_num(5) for name, tensor in state(pool).items()}
    row = acquire(pool).row
    for name, tensor in state(pool).items():
        for other in set(range(ROWS + 1)) - {row}:
            require_equal(name, tensor[other].nan_to_num(5), before[name][other])


@pytest.mark.gpu
def test_reset_does_not_wait(config):
    pool = make_pool(config, "cuda", rows=64)
    pool.abort(acquire(pool))
    # Pinned memory that the host allocator has to get first may wait.
    size = 9 * len(pool._places[0])
    pinned = [torch.zeros(size, dtype=torch.uint8).pin_memory() for _ in range(400)]
    del pinned
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    done = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows = [acquire(pool, request, seed=request, position=request).row for request in range(64)]
        done.record()
        assert not done.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert pool.positions[rows].tolist() == pool.sampling.seed[rows].tolist() == list(range(64))


def test_rows_run_out_and_the_error_says_why(pool):
    leases = [acquire(pool, request) for request in range(ROWS)]
    assert sorted(lease.row for lease in leases) == list(range(ROWS))
    assert [pool.row_of(lease.request_id) for lease in leases] == [lease.row for lease in leases]
    end(pool, leases[0], Event())
    with pytest.raises(PoolFull, match="all 4 rows are taken: 3 by requests, 1 until their codes are read"):
        acquire(pool, "late")
    assert (pool.free, pool.in_use) == (0, 3)
    with pytest.raises(KeyError):
        pool.row_of("late")


def test_request_holds_one_row(pool):
    lease = acquire(pool)
    with pytest.raises(ValueError, match=f"request 'a' holds row {lease.row} already"):
        acquire(pool)
    end(pool, lease)
    assert acquire(pool).generation == lease.generation + 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_frames": 0}, r"`max_frames` must be in 1\.\.6, got 0"),
        ({"max_frames": MAX_FRAMES + 1}, r"`max_frames` must be in 1\.\.6, got 7"),
        ({"position": -1}, r"`position` must be in 0\.\.2\^31-1, got -1"),
        ({"seed": 2**63}, r"`seed` must be in 0\.\.2\^63-1, got"),
    ],
)
def test_refused_request_takes_no_row(pool, options, message):
    with pytest.raises(ValueError, match=f"DecodePool: {message}"):
        acquire(pool, **options)
    assert (pool.free, pool.in_use) == (ROWS, 0)


def test_row_comes_back_when_its_reset_fails(pool, monkeypatch):
    monkeypatch.setattr(pool, "_reset", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        acquire(pool)
    assert (pool.free, pool.in_use) == (ROWS, 0)


def test_row_is_reused_only_after_its_codes_were_read(config):
    pool, event = make_pool(config, rows=1), Event()
    end(pool, acquire(pool), event)
    assert pool.in_use == 0
    with pytest.raises(PoolFull, match="0 by requests, 1 until"):
        acquire(pool, "b")
    event.done = True
    assert acquire(pool, "b").row == 0


def test_abort_waits_for_reads_under_way(config):
    pool, event = make_pool(config, rows=1), Event()
    lease = acquire(pool)
    pool.consumed(lease, event)
    pool.abort(lease)
    assert pool.free == 0
    event.done = True
    assert pool.free == 1


def test_release_needs_the_last_frames_to_be_consumed(pool):
    lease = acquire(pool)
    for stage, step in (("decoding", lambda: pool.consumed(lease, None)), ("decoding", lambda: pool.finish(lease))):
        with pytest.raises(RuntimeError, match=f"of request 'a' is {stage}, not consumed"):
            pool.release(lease)
        step()
    with pytest.raises(RuntimeError, match="is finished, not consumed"):
        pool.release(lease)
    with pytest.raises(RuntimeError, match="request 'a' finished before"):
        pool.finish(lease)
    assert pool.in_use == 1
    pool.consumed(lease, None)
    pool.release(lease)
    assert (pool.free, pool.in_use) == (ROWS, 0)


@pytest.mark.parametrize("leave", [end, DecodePool.abort])
def test_stale_lease_reaches_nothing(pool, leave):
    stale = acquire(pool)
    leave(pool, stale)
    for holder in (None, "another", "a"):
        lease = None if holder is None else acquire(pool, holder)
        assert lease is None or lease.row == stale.row
        before = {name: tensor.clone() for name, tensor in state(pool).items()}
        for use in (pool.check, pool.finish, pool.release, pool.abort, lambda x: pool.consumed(x, None)):
            with pytest.raises(StaleLeaseError, match=f"lease {stale.generation} of row {stale.row} .* was released"):
                use(stale)
        assert (pool.free, pool.in_use) == (ROWS - (holder is not None), holder is not None)
        for name, tensor in state(pool).items():
            require_equal(name, tensor, before[name])
        if lease is not None:
            pool.check(lease)
            pool.abort(lease)


def run_frame(pool: DecodePool, rows, active, continues, value: int, status=None) -> list[bool]:
    """One frame of the given rows that draws the code `value` everywhere."""
    count, device = len(rows), pool.codes.device
    row_map = torch.tensor(rows, dtype=torch.int32, device=device)
    embeds, live = torch.empty_like(pool.staging[:count]), torch.empty(count, dtype=torch.bool, device=device)
    pool.begin_frame(row_map, torch.tensor(active, device=device), embeds=embeds, live=live)
    pool.advance(
        row_map,
        live,
        codes=torch.full((count, pool.codes.shape[1]), value, device=device),
        continues=torch.tensor(continues, device=device),
        feedback=embeds + value,
        draw_status=torch.tensor(status or [0] * count, dtype=torch.int32, device=device),
    )
    return live.tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_frames_of_mixed_rows(config, device):
    pool = make_pool(config, device)
    stops, limited, paused = (
        acquire(pool, name, max_frames=limit).row for name, limit in zip("slp", (6, 2, 6), strict=True)
    )
    null = pool.null_row
    before = {name: tensor[null].clone() for name, tensor in state(pool).items()}
    rows = [limited, null, stops, paused]
    assert run_frame(pool, rows, [True, False, True, True], [True] * 4, 5) == [True, False, True, True]
    assert run_frame(pool, rows, [True, False, True, False], [True, True, False, True], 6) == [True, False, True, False]
    assert pool.finished[rows].tolist() == [True, True, True, False]
    assert pool.stopped[rows].tolist() == [False, False, True, False]
    # The host knows of nothing yet; the batch is in another order.
    assert run_frame(pool, rows[::-1], [True, True, False, True], [True] * 4, 7) == [True, False, False, False]
    assert pool.frames[rows].tolist() == pool.positions[rows].tolist() == [2, 0, 1, 2]
    assert pool.history[limited, :2, 0].tolist() == [5, 6]
    assert pool.history[paused, :2, 0].tolist() == [5, 7]
    assert pool.staging[paused, 0].item() == 12
    for name, tensor in state(pool).items():
        require_equal(name, tensor[null], before[name])


def test_row_with_a_bad_draw_ends_alone(pool):
    bad, good = acquire(pool, "bad").row, acquire(pool, "good").row
    run_frame(pool, [bad, good], [True, True], [True, True], 3, status=[2, 0])
    assert pool.status[[bad, good]].tolist() == [2, 0]
    assert pool.finished[[bad, good]].tolist() == [True, False]
    assert pool.stopped[bad].item() is False
    assert pool.frames[[bad, good]].tolist() == [0, 1]
