"""What a step of `Runtime` enqueues: frames of running rows, prefill passes, and both at once."""

import contextlib
from collections.abc import Callable, Collection, Iterator

import torch

from moss_runtime.graphs.frame import FrameGraph
from moss_runtime.graphs.mixed import MixedStep
from moss_runtime.graphs.prefill import Piece, Prefill
from moss_runtime.graphs.requests import Flights, Request
from moss_runtime.observe import Range, annotate
from moss_runtime.state.decode_pool import RowLease
from moss_runtime.state.kv_cache import OutOfPages, PagedKV


class Launcher:
    """Enqueues the work of requests on one stream. An exception ends the requests whose work raised it."""

    def __init__(
        self,
        frame: FrameGraph,
        prefill: Prefill,
        mixed: MixedStep,
        kv: PagedKV,
        flights: Flights,
        *,
        frames_per_launch: int,
        abort: Callable[[RowLease], None],
    ):
        """Args: flights: takes the report of each launch; abort: ends a request; the others as in `Runtime`."""
        self._frame, self._prefill, self._mixed, self._kv, self._flights = frame, prefill, mixed, kv, flights
        self._stream = frame.graphs.stream
        self._frames_per_launch, self._abort = frames_per_launch, abort

    def step(self, requests: Collection[Request]) -> OutOfPages | None:
        """Enqueue the next frames of all rows that have frames to make and find pages for them, with a prefill pass.

        While no row can make frames prompts are prefilled alone.

        Returns:
            Why rows were left out, if any were for want of pages.
        """
        with torch.cuda.stream(self._stream):
            return self._step(requests)

    def _step(self, requests: Collection[Request]) -> OutOfPages | None:
        batch, shortage = self._batch(requests)
        waiting = [request for request in requests if request.pieces]
        # Whoever has only now been prefilled gets the first frame before others are.
        along = waiting if batch else []
        while waiting and not batch:
            self._pass(waiting)
            batch, shortage = self._batch(requests)
            waiting = [request for request in requests if request.pieces]
        if batch:
            self._launch(batch, along)
        return shortage

    def _batch(self, requests: Collection[Request]) -> tuple[list[Request], OutOfPages | None]:
        """Requests that are prefilled and have frames to make, with pages for them; and why some were left out."""
        batch, shortage = [], None
        for request in requests:
            left = request.max_frames - request.launched
            if left <= 0 or request.paused or request.ended or request.pieces:
                continue
            tokens = request.tokens + request.launched + min(self._frames_per_launch, left)
            if tokens > request.covered:
                try:
                    request.covered = self._kv.reserve(request.lease.row, tokens)
                except OutOfPages as error:
                    shortage = error
                    continue
            batch.append(request)
        return batch, shortage

    def _pass(self, waiting: list[Request]) -> None:
        requests, pieces = self._next_pass(waiting)
        with annotate(Range.PREFILL), self._aborting(requests):
            self._prefill.run(pieces)
        for request in requests:
            request.pieces.popleft()

    def _launch(self, batch: list[Request], waiting: list[Request]) -> None:
        requests, pieces = self._next_pass(waiting)
        rows = [request.lease.row for request in batch]
        with annotate(Range.FRAME), self._aborting(batch + requests):
            report = self._mixed.launch(rows, pieces) if pieces else self._frame.launch(rows, self._frames_per_launch)
            self._flights.add(batch, report)
        for request in requests:
            request.pieces.popleft()
        for request in batch:
            request.launched += self._frames_per_launch

    def _next_pass(self, waiting: list[Request]) -> tuple[list[Request], list[Piece]]:
        owners = {request.pieces[0].row: request for request in waiting}
        pieces = self._prefill.next_pass([request.pieces[0] for request in waiting])
        return [owners[piece.row] for piece in pieces], pieces

    @contextlib.contextmanager
    def _aborting(self, requests: list[Request]) -> Iterator[None]:
        try:
            yield
        except Exception:
            for request in requests:
                self._abort(request.lease)
            raise
