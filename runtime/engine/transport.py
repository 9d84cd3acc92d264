"""How frames get from the stage that makes them to the codec's: as deltas, never as a list of integers."""

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from moss_runtime.graphs.requests import FrameDelta
from moss_runtime.state.pinned import pinned

# A request, the number of the first frame wanted, and how many.
Part = tuple[Hashable, int, int]


class Transport(Protocol):
    """Keeps the frames of each request from `send` until they are gathered, once and in order, or forgotten."""

    def send(self, delta: FrameDelta) -> None:
        """Take frames, in order for each request. The caller has ordered the current stream behind `ready_event`."""

    def gather(self, parts: Sequence[Part], length: int) -> Tensor:
        """Frames of several requests, on the current stream.

        Args:
            parts: requests and frames that were sent.
            length: T, at least the largest count.

        Returns:
            [B, T, Q] int16, on any device. Frames beyond a part's count hold anything that is a code.
        """

    def forget(self, request_id: Hashable) -> None:
        """No frame of a request will be gathered any more; unknown requests are none of its business."""


class InProcess:
    """Frames stay in the decode pool's history: a delta is a view of it, and a gather the only copy.

    The row of a request must not be released before the device is through with the last gather.
    """

    def __init__(self, history: Tensor):
        """Args: history: [S+1, max_frames, Q] int16. Of the decode pool."""
        self._frames = history.flatten(0, 1)
        self._first: dict[Hashable, int] = {}

    def send(self, delta: FrameDelta) -> None:
        if delta.request_id not in self._first:
            self._first[delta.request_id] = delta.history.storage_offset() // self._frames.shape[1]

    def gather(self, parts: Sequence[Part], length: int) -> Tensor:
        device = self._frames.device
        bounds = np.array([(self._first[name] + first, count - 1) for name, first, count in parts])
        # A surplus frame repeats the last one: what the history holds beyond may be no code.
        numbers = bounds[:, :1] + np.minimum(np.arange(length), bounds[:, 1:])
        return self._frames[pinned(numbers, torch.int64, device).to(device, non_blocking=True)]

    def forget(self, request_id: Hashable) -> None:
        self._first.pop(request_id, None)


class HostCopy:
    """Frames go through host memory, as they would to another process. It waits for the device."""

    def __init__(self):
        self._sent: dict[Hashable, deque[tuple[int, Tensor]]] = {}

    def send(self, delta: FrameDelta) -> None:
        self._sent.setdefault(delta.request_id, deque()).append((delta.first_frame, delta.codes.cpu().clone()))

    def gather(self, parts: Sequence[Part], length: int) -> Tensor:
        rows = []
        for name, first, count in parts:
            frames = self._take(name, first, count)
            rows.append(torch.cat((frames, frames[-1:].expand(length - count, -1))))
        return torch.stack(rows)

    def forget(self, request_id: Hashable) -> None:
        self._sent.pop(request_id, None)

    def _take(self, name: Hashable, first: int, count: int) -> Tensor:
        sent, wanted = self._sent[name], []
        while count:
            start, codes = sent[0]
            piece = codes[first - start :][:count]
            wanted.append(piece)
            first, count = first + len(piece), count - len(piece)
            if first == start + len(codes):
                sent.popleft()
        return torch.cat(wanted)
