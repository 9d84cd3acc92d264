"""What a step of `Runtime` enqueues: prefill passes, and launches of frames."""

import contextlib
from collections.abc import Callable, Collection, Iterator

import torch

from moss_runtime.graphs.frame import FrameGraph
from moss_runtime.graphs.prefill import Prefill
from moss_runtime.graphs.requests import Flights, Request
from moss_runtime.observe import Range, annotate
from moss_runtime.state.decode_pool import RowLease
from moss_runtime.state.kv_cache import OutOfPages, PagedKV


class Launcher:
    """Enqueues the work of requests, each kind on its stream. An exception ends the requests whose work raised it."""

    def __init__(
        self,
        frame: FrameGraph,
        prefill: Prefill,
        kv: PagedKV,
        flights: Flights,
        *,
        frames_per_launch: int,
        abort: Callable[[RowLease], None],
    ):
        """Args: flights: takes the report of each launch; abort: ends a request; the others as in `Runtime`."""
        self._frame, self._prefill, self._kv, self._flights = frame, prefill, kv, flights
        self._frames_per_launch, self._abort = frames_per_launch, abort

    def prefill(self, requests: Collection[Request]) -> None:
        """Enqueue one pass, or as many as it takes until some row can make frames."""
        while waiting := [request for request in requests if request.pieces]:
            self._pass(waiting)
            if any(not request.pieces and not request.ended for request in requests):
                return

    def frames(self, requests: Collection[Request]) -> OutOfPages | None:
        """Enqueue the next frames of all rows that are prefilled, have frames to make, and find pages for them.

        Returns:
            Why rows were left out, if any were for want of pages.
        """
        live = [
            request
            for request in requests
            if not (request.pieces or request.ended or request.paused) and request.launched < request.max_frames
        ]
        # A prompt in flight delays nobody, unless nobody else is there.
        ready = [request for request in live if request.prefilled is None or request.prefilled.query()] or live
        batch, shortage = [], None
        with torch.cuda.stream(self._frame.graphs.stream):
            for request in ready:
                frames = min(request.launched + self._frames_per_launch, request.max_frames)
                try:
                    self._kv.reserve(request.lease.row, request.tokens + frames)
                except OutOfPages as error:
                    shortage = error
                else:
                    batch.append(request)
        if batch:
            self._launch(batch)
        return shortage

    def _pass(self, waiting: list[Request]) -> None:
        owners = {request.pieces[0].row: request for request in waiting}
        pieces = self._prefill.next_pass([request.pieces[0] for request in waiting])
        requests = [owners[piece.row] for piece in pieces]
        stream = self._prefill.graphs.stream
        with annotate(Range.PREFILL), self._aborting(requests), torch.cuda.stream(stream):
            if stream is not None:
                # Rows were reset, and their pages entered in the table, on the stream of the frames.
                stream.wait_stream(self._frame.graphs.stream)
            self._prefill.run(pieces)
            event = None if stream is None else stream.record_event()
        for request in requests:
            request.pieces.popleft()
            request.prefilled = event

    def _launch(self, batch: list[Request]) -> None:
        stream = self._frame.graphs.stream
        with annotate(Range.FRAME), self._aborting(batch), torch.cuda.stream(stream):
            for request in batch:
                if request.prefilled is not None:
                    stream.wait_event(request.prefilled)
                    request.prefilled = None
            report = self._frame.launch([request.lease.row for request in batch], self._frames_per_launch)
            self._flights.add(batch, report)
        for request in batch:
            request.launched += self._frames_per_launch

    @contextlib.contextmanager
    def _aborting(self, requests: list[Request]) -> Iterator[None]:
        try:
            yield
        except Exception:
            for request in requests:
                self._abort(request.lease)
            raise
