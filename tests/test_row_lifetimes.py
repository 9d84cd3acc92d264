"""Ten thousand request lifetimes against a plain-Python model: no row, page or slot leaks, and nobody's data mixes."""

import dataclasses
import random

import pytest
import torch

from moss_kernels import SamplingParams
from moss_kernels.testing.compare import require_equal
from moss_runtime.model.codec.config import TransformerConfig
from moss_runtime.model.config import ModelConfig
from moss_runtime.state.codec_slots import CodecSlots, Lease
from moss_runtime.state.decode_pool import DecodePool, PoolFull, RowLease, StaleLeaseError
from moss_runtime.state.kv_cache import OutOfPages, PagedKV

LIFETIMES = 10_000
ROWS, PAGES, PAGE_SIZE, MAX_FRAMES, LONGEST_PROMPT = 8, 20, 4, 6, 12
STAGES = [TransformerConfig(4, 4, 8, 2, 1, 8, 5, 1e4)]
PARAMS = SamplingParams()


class Event:
    """Completes some steps after it was recorded."""

    def __init__(self, clock: list[int], delay: int):
        self.clock, self.due = clock, clock[0] + delay

    def query(self) -> bool:
        return self.clock[0] >= self.due


@dataclasses.dataclass
class Request:
    """What the model knows of a request. It draws the code `number % 997` in each of its frames."""

    number: int
    row: RowLease
    slot: Lease
    prompt: int
    limit: int
    stop_at: int
    frames: int = 0
    done: bool = False

    @property
    def code(self) -> int:
        return self.number % 997

    @property
    def stops(self) -> bool:
        """Its next draw is "stop"."""
        return self.frames == self.stop_at

    def draw(self) -> None:
        stopped = self.stops
        self.frames += not stopped
        self.done = stopped or self.frames == self.limit


class StepError(Exception):
    pass


class Soak:
    """A host that admits, steps, pauses, ends and aborts requests at random, and knows what must come of it."""

    def __init__(self, config: ModelConfig, seed: int):
        self.random = random.Random(seed)
        self.pool = DecodePool(config, rows=ROWS, max_frames=MAX_FRAMES, dtype=torch.float32, device="cpu")
        sizes = {"rows": ROWS, "pages": PAGES, "page_size": PAGE_SIZE, "max_tokens": LONGEST_PROMPT + MAX_FRAMES}
        self.kv = PagedKV(config.backbone, **sizes, dtype=torch.float32, device="cpu")
        self.slots = CodecSlots(STAGES, ROWS, dtype=torch.float32, device="cpu")
        self.clock, self.reading = [0], []
        self.live: dict[int, Request] = {}
        self.stale: list[Request] = []
        self.admitted = self.ended = 0
        self.outcomes = dict.fromkeys(("stop", "length", "abort", "step error", "no pages", "full"), 0)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def write_tokens(self, requests: list[Request], positions: list[int]) -> None:
        """Keys of tokens, by way of the page table as kernels go: the number of the request."""
        rows, positions = torch.tensor([request.row.row for request in requests]), torch.tensor(positions)
        pages = self.kv.page_table[rows, positions // PAGE_SIZE].long()
        assert (pages != PAGES).all()
        numbers = torch.tensor([float(request.number) for request in requests])
        self.kv.key_pages[0, pages, 0, positions % PAGE_SIZE, 0] = numbers

    def admit(self) -> None:
        number, prompt = self.admitted, self.random.randint(1, LONGEST_PROMPT)
        limit, stop_at = self.random.randint(1, MAX_FRAMES), self.random.randint(0, 2 * MAX_FRAMES)
        being_read = {row for row, event in self.reading if not event.query()}
        try:
            options = {"seed": number, "max_frames": limit, "position": prompt - 1}
            lease = self.pool.acquire(number, PARAMS, **options)
        except PoolFull:
            assert len(self.live) + len(being_read) == ROWS
            self.outcomes["full"] += 1
            return
        self.admitted += 1
        assert lease.row not in being_read
        assert lease.row not in {request.row.row for request in self.live.values()}
        request = self.live[number] = Request(number, lease, self.slots.lease(), prompt, limit, stop_at)
        try:
            self.kv.reserve(lease.row, prompt)
        except OutOfPages:
            self.leave(request, "no pages")
            return
        if prompt > 1:
            self.write_tokens([request] * (prompt - 1), list(range(prompt - 1)))

    def step(self) -> None:
        """One frame of some live rows in any order, padded; an exception ends the rows of the step and no other."""
        batch = [request for request in self.live.values() if self.chance(0.9)]
        self.random.shuffle(batch)
        for request in list(batch):
            try:
                # A row that has ended without the host knowing asks for no more than its limit.
                self.kv.reserve(request.row.row, request.prompt + min(request.frames, request.limit - 1))
            except OutOfPages:
                batch.remove(request)
                self.leave(request, "no pages")
        try:
            self.launch(batch, failing=self.chance(0.005))
        except StepError:
            for request in batch:
                self.leave(request, "step error")

    def launch(self, batch: list[Request], *, failing: bool) -> None:
        padding = self.random.randint(0, 2)
        row_map = torch.tensor([r.row.row for r in batch] + [ROWS] * padding, dtype=torch.int32)
        active = torch.tensor([True] * len(batch) + [False] * padding, dtype=torch.bool)
        embeds, live = torch.empty(len(active), self.pool.staging.shape[1]), torch.empty_like(active)
        self.pool.begin_frame(row_map, active, embeds=embeds, live=live)
        assert live.tolist() == [not request.done for request in batch] + [False] * padding
        if failing:
            raise StepError
        running = [request for request, is_live in zip(batch, live.tolist(), strict=False) if is_live]
        if running:
            self.write_tokens(running, [request.prompt - 1 + request.frames for request in running])
        codes = torch.tensor([r.code for r in batch] + [0] * padding, dtype=torch.int64)
        codes = codes[:, None].repeat(1, self.pool.codes.shape[1])
        continues = torch.tensor([not r.stops for r in batch] + [True] * padding, dtype=torch.bool)
        outputs = {"codes": codes, "continues": continues, "feedback": embeds + 1}
        self.pool.advance(row_map, live, **outputs, draw_status=torch.zeros_like(row_map))
        for request in running:
            request.draw()

    def check(self, request: Request) -> None:
        """The request's own history, and only its own."""
        pool, row = self.pool, request.row.row
        assert pool.frames[row] == request.frames
        assert pool.positions[row] == request.prompt - 1 + request.frames
        assert pool.sampling.seed[row] == request.number
        assert (pool.history[row, : request.frames] == request.code).all()
        tokens = torch.arange(request.prompt - 1 + request.frames)
        pages = self.kv.page_table[row, tokens // PAGE_SIZE].long()
        assert (self.kv.key_pages[0, pages, 0, tokens % PAGE_SIZE, 0] == request.number).all()

    def finish(self, request: Request) -> None:
        """The normal end, which the host may learn of some steps late."""
        self.check(request)
        row = request.row.row
        assert bool(self.pool.stopped[row]) == (request.frames < request.limit)
        self.pool.finish(request.row)
        event = self.event(row)
        self.pool.consumed(request.row, event)
        self.pool.release(request.row)
        self.give_back(request, "stop" if request.frames < request.limit else "length", event)

    def leave(self, request: Request, outcome: str) -> None:
        """An early end; the codec may still read the row."""
        event = None
        if self.chance(0.5):
            event = self.event(request.row.row)
            self.pool.consumed(request.row, event)
        self.pool.abort(request.row)
        self.give_back(request, outcome, event)

    def event(self, row: int) -> Event | None:
        if self.chance(0.3):
            return None
        event = Event(self.clock, self.random.randint(0, 3))
        self.reading.append((row, event))
        return event

    def give_back(self, request: Request, outcome: str, event: Event | None) -> None:
        self.kv.release(request.row.row, event)
        self.slots.release(request.slot)
        del self.live[request.number]
        self.outcomes[outcome] += 1
        self.ended += 1
        self.stale.append(request)

    def use_stale(self) -> None:
        request = self.random.choice(self.stale[-50:])
        for use in (self.pool.check, self.pool.finish, self.pool.release, self.pool.abort):
            with pytest.raises(StaleLeaseError):
                use(request.row)
        with pytest.raises(ValueError, match="was released"):
            self.slots.release(request.slot)

    def check_counts(self) -> None:
        pool, kv = self.pool, self.kv
        self.reading = [(row, event) for row, event in self.reading if not event.query()]
        assert pool.in_use == len(self.live)
        assert pool.free == ROWS - len(self.live) - len(self.reading)
        assert self.slots.free == ROWS - len(self.live)
        held = [page for row in range(ROWS) for page in kv.pages_of(row)]
        assert len(set(held)) == len(held) <= PAGES - kv.free_pages
        holders = {request.row.row for request in self.live.values()}
        assert all(not kv.pages_of(row) for row in range(ROWS) if row not in holders)

    def run(self, lifetimes: int) -> None:
        while self.ended < lifetimes:
            self.clock[0] += 1
            while self.chance(0.7) and self.admitted < lifetimes:
                self.admit()
            self.step()
            for request in list(self.live.values()):
                if self.pool.finished[request.row.row] and self.chance(0.6):
                    self.finish(request)
                elif self.chance(0.02):
                    self.leave(request, "abort")
            if self.stale and self.chance(0.05):
                self.use_stale()
            self.check_counts()


def test_nothing_leaks(golden):
    soak = Soak(ModelConfig.from_directory(golden("local_hd16").directory), seed=11)
    pool, kv = soak.pool, soak.kv
    tensors = [pool.staging, pool.codes, pool.history, pool.positions, pool.frames, pool.max_frames_row, pool.stopped]
    tensors += [pool.finished, pool.status, *vars(pool.sampling).values(), kv.page_table]
    null = [tensor[ROWS].clone() for tensor in tensors]
    soak.run(LIFETIMES)
    assert min(soak.outcomes.values()) > 50, soak.outcomes
    soak.clock[0] += 10
    soak.check_counts()
    assert (pool.free, kv.free_pages, soak.slots.free) == (ROWS, PAGES, ROWS)
    assert (kv.page_table == PAGES).all()
    assert not kv.key_pages[:, PAGES].any()
    for tensor, before in zip(tensors, null, strict=True):
        require_equal("null row", tensor[ROWS], before)
