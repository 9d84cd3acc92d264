"""Generation of a fixed list of prompts over a `Runtime`, with audio while it goes on if wanted."""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moss_kernels import SamplingParams
from moss_runtime.graphs.runtime import FrameDelta, Runtime
from moss_runtime.model.tts import Generation
from moss_runtime.state.decode_pool import PoolFull, RowLease, StaleLeaseError
from moss_runtime.state.kv_cache import OutOfPages


def generate(
    runtime: Runtime,
    prompts: Sequence[Tensor],
    params: Sequence[SamplingParams],
    *,
    max_frames: int | None = None,
    on_frames: Callable[[int, Tensor], None] | None = None,
    on_audio: Callable[[int, Tensor], None] | None = None,
) -> list[Generation]:
    """Generate every prompt to its end, as many at a time as the runtime has rows and pages for.

    Args:
        runtime: without other requests.
        prompts: B tensors [T_i, 1+n_vq] i64, as `PromptBuilder` makes them.
        params: sampling parameters and seed of each prompt; where the seed is None, one is drawn.
        max_frames: limit of each; the runtime limits too.
        on_frames: called with the index of a prompt and its next frames [n, n_vq] int16, a view that holds during the
            call.
        on_audio: called with the index of a prompt and its next samples [C, n] float32 on the CPU, if the runtime has
            a codec.

    Raises:
        As `Runtime.add` and `Runtime.step`; everything that the requests held has been given back then.
    """
    if len(prompts) != len(params):
        raise ValueError(
            f"generate: `params` must hold one entry for each of {len(prompts)} prompts, got {len(params)}"
        )
    return _Run(runtime, prompts, params, max_frames, on_frames, on_audio)()


class _Run:
    """One call of `generate`; request ids are the indices of the prompts."""

    def __init__(self, runtime, prompts, params, max_frames, on_frames, on_audio):
        self.runtime, self.feed = runtime, None if on_audio is None else runtime.feed
        self.prompts, self.params, self.max_frames = prompts, params, max_frames
        self.on_frames, self.on_audio = on_frames, on_audio
        self.waiting = deque(range(len(prompts)))
        self.leases: dict[int, RowLease] = {}
        self.results: dict[int, Generation] = {}

    def __call__(self) -> list[Generation]:
        stream = self.runtime.frame.graphs.stream
        try:
            while self.waiting or self.leases or (self.feed is not None and self.feed.busy):
                self._admit()
                deltas = self.runtime.step()
                final = [delta for delta in deltas if delta.final]
                for delta in deltas:
                    self._frames(delta)
                audio = self._audio()
                for delta in final:
                    self._release(delta)
                if not deltas and not audio:
                    (self.runtime if self.leases else self.feed).wait()
        finally:
            for lease in self.leases.values():
                # A step that failed has aborted its requests itself.
                with contextlib.suppress(StaleLeaseError):
                    self.runtime.abort(lease, None if self.feed is None else self.feed.event)
            if self.feed is not None:
                for index in range(len(self.prompts)):
                    self.feed.abort(index)
        if stream is not None:
            torch.cuda.current_stream(self.runtime.model.device).wait_stream(stream)
        return [self.results[index] for index in range(len(self.prompts))]

    def _admit(self) -> None:
        while self.waiting:
            index = self.waiting[0]
            try:
                limits = {"max_frames": self.max_frames}
                self.leases[index] = self.runtime.add(index, self.prompts[index], self.params[index], **limits)
            except (PoolFull, OutOfPages):
                # What chunks in flight still read comes back when they are over.
                if self.leases or (self.feed is not None and self.feed.busy):
                    return
                raise
            self.waiting.popleft()

    def _frames(self, delta: FrameDelta) -> None:
        if self.on_frames is not None and delta.frames:
            self.on_frames(delta.request_id, delta.codes)
        if self.feed is not None:
            self.feed.push(delta)

    def _audio(self) -> bool:
        """Hand on what has reached the host; whether there was anything."""
        landed = [] if self.feed is None else self.feed.step()
        for delta in landed:
            if delta.audio.shape[1]:
                self.on_audio(delta.request_id, delta.audio)
        return bool(landed)

    def _release(self, delta: FrameDelta) -> None:
        lease = self.leases[delta.request_id]
        codes, seed = self.runtime.codes(lease), self.runtime.seed(lease)
        self.results[delta.request_id] = Generation(codes, seed, delta.finish_reason)
        self.runtime.release(lease, None if self.feed is None else self.feed.event)
        del self.leases[delta.request_id]
