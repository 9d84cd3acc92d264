"""Codes of reference audio: encoded once for all who ask, kept while there is room."""

import hashlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from moss_runtime.engine.stats import Stats
from moss_runtime.model.codec import Codec


class ReferenceCache:
    """Turns clips into codes on a thread of its own.

    A clip is known by its samples, the sampling rate and the codec. What is asked for while it is being encoded waits
    for that one encoding. Clips that come within a short time are encoded together, each to the codes that it has by
    itself; one that cannot be encoded fails alone and is not remembered.
    """

    def __init__(
        self,
        encode: Callable[[Sequence[Tensor]], Sequence[Tensor]],
        identity: bytes,
        stats: Stats,
        *,
        capacity: int,
        batch: int,
        wait_s: float,
    ):
        """Starts the thread.

        Args:
            encode: clips [C, n_i] float32 to codes [frames_i, Q], each as it would be alone; called without autograd.
            identity: of the codec and its sampling rate.
            stats: counts hits, joins, misses, failures, evictions and the seconds of `encode`.
            capacity: most bytes of codes that are kept.
            batch: most clips that are encoded together.
            wait_s: how long the first of them waits for others.
        """
        self._encode, self._identity, self._stats = encode, identity, stats
        self._capacity, self._batch, self._wait_s = capacity, batch, wait_s
        self._changed = threading.Condition()
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._bytes = 0
        self._waiting: deque[tuple[bytes, Tensor]] = deque()
        self._flights: dict[bytes, list[Future]] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="moss-reference", daemon=True)
        self._thread.start()

    @property
    def bytes(self) -> int:
        """Memory of the codes that are kept."""
        return self._bytes

    @property
    def waiting(self) -> int:
        """Clips that are being encoded or wait for it."""
        return len(self._flights)

    def get(self, clip: Tensor) -> "Future[Tensor]":
        """Codes of a clip.

        Args:
            clip: [C, n] float32; it may change afterwards.

        Returns:
            A future of [frames, Q] int16, the caller's own copy. It has the encoder's error if there was one.
        """
        future: Future = Future()
        # Not a view: the clip is encoded later.
        clip = clip.detach().to("cpu", copy=True).contiguous()
        key = self._key(clip)
        with self._changed:
            if self._closed:
                raise RuntimeError("the reference cache is closed")
            codes = self._kept.get(key)
            if codes is not None:
                self._kept.move_to_end(key)
                self._stats.count("reference_hits")
            elif key in self._flights:
                self._flights[key].append(future)
                self._stats.count("reference_joins")
            else:
                self._flights[key] = [future]
                self._waiting.append((key, clip))
                self._stats.count("reference_misses")
                self._changed.notify()
        if codes is not None:
            future.set_result(codes.clone())
        return future

    def close(self) -> None:
        """Stop after what is being encoded; what waits fails. Closing again does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        with self._changed:
            left, self._flights = self._flights, {}
        for futures in left.values():
            _settle(futures, RuntimeError("the reference cache was closed"))

    def _key(self, clip: Tensor) -> bytes:
        digest = hashlib.sha256(self._identity)
        digest.update(f"{clip.dtype} {tuple(clip.shape)}".encode())
        digest.update(clip.flatten().view(torch.uint8).numpy())
        return digest.digest()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                self._changed.wait_for(lambda: len(self._waiting) >= self._batch or self._closed, self._wait_s)
                taken = [self._waiting.popleft() for _ in range(min(self._batch, len(self._waiting)))]
            start = time.perf_counter()
            outcomes = self._outcomes([clip for _, clip in taken])
            self._stats.count("stage_seconds", time.perf_counter() - start, "reference")
            for (key, _), outcome in zip(taken, outcomes, strict=True):
                self._settle(key, outcome)

    def _outcomes(self, clips: list[Tensor]) -> list[Tensor | Exception]:
        """Codes [frames, Q] int16 on the CPU of each clip, or what is wrong with it."""
        try:
            with torch.no_grad():
                return [codes.to("cpu", torch.int16) for codes in self._encode(clips)]
        except Exception as error:
            if len(clips) == 1:
                return [error]
        return [outcome for clip in clips for outcome in self._outcomes([clip])]

    def _settle(self, key: bytes, outcome: Tensor | Exception) -> None:
        with self._changed:
            futures = self._flights.pop(key)
            if isinstance(outcome, Tensor):
                self._keep(key, outcome)
            else:
                self._stats.count("reference_failures")
        _settle(futures, outcome)

    def _keep(self, key: bytes, codes: Tensor) -> None:
        if codes.nbytes > self._capacity:
            return
        self._kept[key] = codes
        self._bytes += codes.nbytes
        while self._bytes > self._capacity:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.nbytes
            self._stats.count("reference_evictions")


def _settle(futures: Iterable[Future], outcome: Tensor | Exception) -> None:
    """Give each a copy of the codes, or the error; who has cancelled gets neither."""
    for future in futures:
        if not future.set_running_or_notify_cancel():
            continue
        if isinstance(outcome, Tensor):
            future.set_result(outcome.clone())
        else:
            future.set_exception(outcome)


def codec_identity(codec: Codec) -> bytes:
    """What codes of a clip depend on besides its samples: layout, rate and weights, told by the codebooks."""
    digest = hashlib.sha256(f"{codec.config} {codec.dtype}".encode())
    for name, tensor in sorted(codec.quantizer.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.digest()
