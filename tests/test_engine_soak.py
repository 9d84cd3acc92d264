"""Two hundred requests of all kinds at random: all that is held comes back, and nobody's codes change."""

import dataclasses
import random
import threading
import time
from collections import Counter
from pathlib import Path

import numpy
import pytest
import torch

from moss_kernels import SamplingParams
from moss_runtime.engine import DeadlineExceeded, Engine, EngineBusy, EngineConfig, Request
from moss_runtime.engine.transport import HostCopy, InProcess
from moss_runtime.errors import AudioError, PromptError
from moss_runtime.model import MossTTS
from moss_runtime.model.codec import Codec
from moss_runtime.model.prompt import PromptBuilder

GOLDEN = Path(__file__).parent / "golden"
FRAMES, CLIENTS, REQUESTS = 12, 10, 200
KINDS = ("read", "result", "slow", "abort now", "abort while reading", "deadline", "bad prompt", "bad reference")


def load():
    return MossTTS.from_pretrained(GOLDEN / "local_hd16"), Codec.from_pretrained(GOLDEN / "codec")


@dataclasses.dataclass(frozen=True)
class Expected:
    request: Request
    codes: torch.Tensor
    reason: str
    audio: torch.Tensor


@pytest.fixture(scope="module")
def expected():
    """What each of the different requests gives when it is served alone."""
    model, codec = load()
    prompts = PromptBuilder(GOLDEN / "prompt" / "tokenizer.json", model.config)
    generator = torch.Generator().manual_seed(3)
    clips = [torch.rand(2, length, generator=generator) - 0.5 for length in (100, 57)]
    found = []
    for seed in range(14):
        params = SamplingParams(text_temperature=0.3, seed=seed, repetition_penalty=1.0 + seed % 3 / 10)
        if seed % 7 == 0:  # stops at once: some of them have no frames
            params = dataclasses.replace(params, text_temperature=3.0)
        if seed % 2:
            rows = torch.randint(0, 64, (3 + seed, 13), generator=generator)
            rows[-1] = torch.tensor([3] + [64] * 12)
            request = Request(prompt=rows, params=params)
            prompt = rows
        else:
            references = [clips[seed // 2 % 2]]
            request = Request(f"text {seed}", references=references, params=params)
            prompt = prompts.build(request.text, references=codec.encode(references))
        request = dataclasses.replace(request, max_frames=(None, 1, 5)[seed % 3])
        result = model.generate([prompt], [params], max_frames=request.max_frames or FRAMES)[0]
        audio = codec.decode(result.codes[None])[0] if len(result.codes) else torch.empty(2, 0)
        found.append(Expected(request, result.codes, result.finish_reason, audio))
    assert {one.reason for one in found} == {"stop", "length"}
    assert min(len(one.codes) for one in found) == 0
    return found


class Client(threading.Thread):
    """Sends requests one after the other and checks what comes back."""

    def __init__(self, engine, expected, seed, count):
        super().__init__()
        self.engine, self.expected, self.rng, self.count = engine, expected, random.Random(seed), count
        self.kinds, self.error = Counter(), None

    def run(self):
        try:
            for _ in range(self.count):
                kind = self.rng.choices(KINDS, (6, 2, 2, 2, 3, 1, 1, 2))[0]
                self.serve(kind, self.rng.choice(self.expected))
                self.kinds[kind] += 1
        except BaseException as error:
            self.error = error

    def submit(self, request):
        while True:
            try:
                return self.engine.submit(request)
            except EngineBusy:
                time.sleep(0.005)

    def serve(self, kind, expected):
        if kind.startswith("bad"):
            return self.fail(kind, expected.request)
        request = expected.request
        if kind == "deadline":
            request = dataclasses.replace(request, deadline_s=self.rng.choice((0.001, 0.05)))
        handle = self.submit(request)
        if kind == "abort now":
            handle.abort()
        chunks = [] if kind == "result" else self.read(handle, kind)
        result = handle.result(60)
        if kind == "result":
            chunks = list(handle)
        if kind in ("read", "result", "slow"):
            assert (result.finish_reason, result.error) == (expected.reason, None)
            assert torch.equal(result.codes.long(), expected.codes)
        else:
            assert result.finish_reason in ("abort", "error", expected.reason)
            assert torch.equal(result.codes.long(), expected.codes[: result.frames])
        return self.check(chunks, expected)

    def read(self, handle, kind):
        chunks = []
        try:
            for chunk in handle:
                chunks.append(chunk)
                if kind == "slow":
                    time.sleep(0.03)
                if kind == "abort while reading" and self.rng.random() < 0.5:
                    handle.abort()
        except DeadlineExceeded:
            assert kind == "deadline"
        return chunks

    def check(self, chunks, expected):
        """What was handed out is the beginning of the audio."""
        if not chunks:
            return
        audio = torch.from_numpy(numpy.concatenate([chunk.pcm for chunk in chunks], axis=1))
        offline = expected.audio[:, : audio.shape[1]]
        assert audio.shape == offline.shape
        assert (audio - offline).abs().max() <= 1e-5 * expected.audio.abs().max()

    def fail(self, kind, request):
        if kind == "bad prompt":
            request, error = Request(prompt=torch.full((4, 13), 999)), PromptError
        else:
            clip = torch.full((2, 60), torch.nan)
            request, error = Request("text", references=[clip], params=request.params), AudioError
        result = self.submit(request).result(60)
        assert isinstance(result.error, error) and result.frames == 0


class LateEvent:
    """An event of a device that is some polls behind the host."""

    def __init__(self, polls):
        self.polls = polls

    def query(self):
        self.polls -= 1
        return self.polls < 0


def make_late(runtime, monkeypatch):
    """The host learns of each launch late, as on a GPU: launches overlap, and finished rows are in later ones."""
    rng, add = random.Random(0), runtime._flights.add

    def add_late(batch, report):
        add(batch, report)
        runtime._flights._flights[-1].event = LateEvent(rng.randrange(4))

    monkeypatch.setattr(runtime._flights, "add", add_late)


@pytest.mark.parametrize(
    ("mode", "transport", "changes"),
    [
        ("streaming-low-latency", InProcess, {"rows": 6, "codec_slots": 4, "slot_policy": "offline"}),
        ("streaming-balanced", lambda history: HostCopy(), {"rows": 5, "max_waiting": 3, "pages": 12}),
    ],
)
def test_two_hundred_requests(expected, monkeypatch, mode, transport, changes):
    model, codec = load()
    prompts = PromptBuilder(GOLDEN / "prompt" / "tokenizer.json", model.config)
    bounds = {"largest_chunk": 5, "max_pending_frames": 8, "max_pending_total": 24, "max_output_frames": 5}
    options = {"max_tokens": 128, "max_frames": FRAMES, "chunk_ramp": [1, 2, 4], **bounds, **changes}
    with Engine(EngineConfig.from_mode(mode, **options), model, codec, prompts, transport=transport) as engine:
        make_late(engine.runtime, monkeypatch)
        clients = [Client(engine, expected, seed, REQUESTS // CLIENTS) for seed in range(CLIENTS)]
        for client in clients:
            client.start()
        for client in clients:
            client.join(120)
            assert not client.is_alive() and client.error is None
        assert sum((client.kinds for client in clients), Counter()).keys() == set(KINDS)
        engine.drain(20)
        pool, kv, slots = engine.runtime.pool, engine.runtime.kv, engine.stage.chunk.slots
        assert (pool.in_use, pool.free, kv.free_pages) == (0, engine.config.rows, kv.pages)
        assert (slots.free, engine._scheduler.empty) == (slots.null_slot, True)
        kept = engine.stage.transport
        assert not (kept._first if isinstance(kept, InProcess) else kept._sent)
        assert engine.stats.value("reference_misses") <= 2 + engine.stats.value("reference_failures")
        assert engine.stats.value("reference_hits") > 0
        finished = engine.snapshot()["requests_finished"]
        assert sum(finished.values()) == engine.stats.value("requests_submitted") == REQUESTS
        assert min(finished.get(reason, 0) for reason in ("stop", "length", "abort", "error")) > 0
