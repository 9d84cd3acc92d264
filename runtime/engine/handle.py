"""What `submit` returns: the audio of one request as it comes, for a thread or for asyncio, and its result."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable

from moss_runtime.engine.request import AudioChunk, Request, Result


class Handle:
    """One request's audio chunks and its result. Iterate over it, or `async for`; one reader at a time.

    Iteration ends with the audio; of a request that ended with an error it raises that. `result` never does.

    Attributes:
        request: as submitted.
        read_frames: frames of audio that the reader has taken.
    """

    def __init__(self, request: Request, on_change: Callable[[], None]):
        """Args: on_change: called, from any thread, when the engine should look at this request."""
        self.request = request
        self.read_frames = 0
        self.submitted = time.perf_counter()
        self._on_change = on_change
        self._changed = threading.Condition()
        self._chunks: deque[AudioChunk] = deque()
        self._result: Result | None = None
        self._aborted = self._unbounded = False
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future] | None = None

    @property
    def done(self) -> bool:
        """The request has ended; unread audio may be left."""
        return self._result is not None

    @property
    def aborted(self) -> bool:
        """The reader wants no more."""
        return self._aborted

    @property
    def unbounded(self) -> bool:
        """Audio may be left unread: somebody waits for the end."""
        return self._unbounded

    @property
    def unread(self) -> int:
        """Chunks that are there and not taken."""
        return len(self._chunks)

    def abort(self) -> None:
        """End the request as soon as possible. What it has handed out stays; one that has ended stays as it is."""
        self._aborted = True
        self._on_change()

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end; audio that nobody reads meanwhile is kept, all of it.

        Args:
            timeout: in seconds; None waits without a limit.

        Raises:
            TimeoutError: it has not ended by then.
        """
        self._unbounded = True
        self._on_change()
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"the request has not ended within {timeout} s")
        return self._result

    def __iter__(self) -> "Handle":
        return self

    def __next__(self) -> AudioChunk:
        with self._changed:
            self._changed.wait_for(lambda: self._chunks or self.done)
            chunk = self._take()
        if chunk is None:
            raise StopIteration
        return self._taken(chunk)

    def __aiter__(self) -> "Handle":
        return self

    async def __anext__(self) -> AudioChunk:
        while True:
            with self._changed:
                if self._chunks or self.done:
                    chunk = self._take()
                    break
                loop = asyncio.get_running_loop()
                future = loop.create_future()
                self._waiter = loop, future
            await future
        if chunk is None:
            raise StopAsyncIteration
        return self._taken(chunk)

    def put(self, chunk: AudioChunk) -> None:
        """The engine's side: the next audio."""
        self._announce(lambda: self._chunks.append(chunk))

    def finish(self, result: Result) -> None:
        """The engine's side: the end, once."""

        def end() -> None:
            assert self._result is None
            self._result = result

        self._announce(end)

    def _take(self) -> AudioChunk | None:
        """The next chunk, or None at the end."""
        if self._chunks:
            return self._chunks.popleft()
        if self._result.error is not None:
            raise self._result.error
        return None

    def _taken(self, chunk: AudioChunk) -> AudioChunk:
        self.read_frames += chunk.frames
        self._on_change()
        return chunk

    def _announce(self, change: Callable[[], None]) -> None:
        with self._changed:
            change()
            waiter, self._waiter = self._waiter, None
            self._changed.notify_all()
        if waiter is not None:
            loop, future = waiter
            try:
                loop.call_soon_threadsafe(lambda: future.done() or future.set_result(None))
            except RuntimeError:
                # The reader's loop has ended, and the reader with it.
                self._aborted = True
