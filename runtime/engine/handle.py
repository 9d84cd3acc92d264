"""What `submit` returns: the audio of one request as it comes, for a thread or for asyncio, and its result."""

import asyncio
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from moss_runtime.engine.request import AudioChunk, Request, Result


def check_timeout(timeout: float | None) -> None:
    """Raise ValueError for what a condition would wait for without an end, or not at all: NaN, infinity, no number."""
    if timeout is None:
        return
    if not isinstance(timeout, (int, float)) or not timeout <= threading.TIMEOUT_MAX:
        most = int(threading.TIMEOUT_MAX)
        raise ValueError(f"`timeout` must be None or a number of seconds, at most {most}, got {timeout!r}")


class Waiter(NamedTuple):
    """A reader in asyncio that waits for the next audio of a channel, and the future that ends its wait."""

    channel: "Channel"
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future


def tell(waiters: Iterable[Waiter | None]) -> None:
    """Let readers go on, those of a loop together: to wake its thread takes a system call and turns of the lock."""
    loops: dict[asyncio.AbstractEventLoop, list[Waiter]] = defaultdict(list)
    for waiter in filter(None, waiters):
        loops[waiter.loop].append(waiter)
    for loop, readers in loops.items():
        try:
            loop.call_soon_threadsafe(_go_on, readers)
        except RuntimeError:
            # The readers' loop has ended, and the readers with it.
            for reader in readers:
                reader.channel.aborted = True


def _go_on(readers: Iterable[Waiter]) -> None:
    for reader in readers:
        if not reader.future.done():
            reader.future.set_result(None)


class Channel:
    """What the engine and the reader of one request share.

    Attributes:
        submitted: when, on the clock of `time.perf_counter`.
        changed: guards the chunks and the result, and tells of new ones.
        chunks: audio that the reader has not taken.
        read_frames: frames of audio that it has taken.
        awaited: the engine waits until it takes more.
        result: of a request that has ended.
        aborted: the reader wants no more.
        unbounded: audio may be left unread: somebody waits for the end.
        waiter: who waits in asyncio.
    """

    def __init__(self, on_change: Callable[[], None]):
        """Args: on_change: called, from any thread, when the engine should look at this request."""
        self.on_change = on_change
        self.submitted = time.perf_counter()
        self.changed = threading.Condition()
        self.chunks: deque[AudioChunk] = deque()
        self.read_frames = 0
        self.result: Result | None = None
        self.aborted = self.unbounded = self.awaited = False
        self.waiter: Waiter | None = None

    def put(self, chunk: AudioChunk) -> Waiter | None:
        """The engine's side: the next audio. Returns who has to be told of it."""
        with self.changed:
            self.chunks.append(chunk)
            return self._announce()

    def finish(self, result: Result) -> Waiter | None:
        """The engine's side: the end, once. Returns who has to be told of it."""
        with self.changed:
            assert self.result is None
            self.result = result
            return self._announce()

    def _announce(self) -> Waiter | None:
        waiter, self.waiter = self.waiter, None
        self.changed.notify_all()
        return waiter


class Handle:
    """One request's audio chunks and its result. Iterate over it, or `async for`; one reader at a time.

    Iteration ends with the audio; of a request that ended with an error it raises that. `result` never does. A request
    whose handle nobody holds any more is aborted: its audio would wait for a reader for ever.

    Attributes:
        request: as submitted.
    """

    def __init__(self, request: Request, channel: Channel):
        self.request, self._channel = request, channel

    def __del__(self):
        # The engine looks now and then. Locks are out of the question: this may run in the middle of anything.
        self._channel.aborted = True

    @property
    def submitted(self) -> float:
        """When, on the clock of `time.perf_counter`."""
        return self._channel.submitted

    @property
    def read_frames(self) -> int:
        """Frames of audio that the reader has taken."""
        return self._channel.read_frames

    @property
    def done(self) -> bool:
        """The request has ended; unread audio may be left."""
        return self._channel.result is not None

    def abort(self) -> None:
        """End the request as soon as possible. What it has handed out stays; one that has ended stays as it is."""
        self._channel.aborted = True
        self._channel.on_change()

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end; audio that nobody reads meanwhile is kept, all of it.

        Args:
            timeout: in seconds; None waits without a limit.

        Raises:
            TimeoutError: it has not ended by then.
            ValueError: the timeout is no number of seconds.
        """
        check_timeout(timeout)
        channel = self._channel
        channel.unbounded = True
        channel.on_change()
        with channel.changed:
            if not channel.changed.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"the request has not ended within {timeout} s")
        return channel.result

    def __iter__(self) -> "Handle":
        return self

    def __next__(self) -> AudioChunk:
        with self._channel.changed:
            self._channel.changed.wait_for(self._is_ready)
            chunk = self._take()
        if chunk is None:
            raise StopIteration
        return self._taken(chunk)

    def __aiter__(self) -> "Handle":
        return self

    async def __anext__(self) -> AudioChunk:
        channel = self._channel
        while True:
            with channel.changed:
                if self._is_ready():
                    chunk = self._take()
                    break
                if channel.waiter is not None and not channel.waiter.future.done():
                    raise RuntimeError("Handle: somebody else waits for its next chunk; it has one reader at a time")
                loop = asyncio.get_running_loop()
                future = loop.create_future()
                channel.waiter = Waiter(channel, loop, future)
            await future
        if chunk is None:
            raise StopAsyncIteration
        return self._taken(chunk)

    def _is_ready(self) -> bool:
        return bool(self._channel.chunks) or self.done

    def _take(self) -> AudioChunk | None:
        """The next chunk, or None at the end."""
        if self._channel.chunks:
            return self._channel.chunks.popleft()
        if self._channel.result.error is not None:
            raise self._channel.result.error
        return None

    def _taken(self, chunk: AudioChunk) -> AudioChunk:
        self._channel.read_frames += chunk.frames
        # The engine looks at every request when it wakes; for each chunk of readers who keep up that adds up.
        if self._channel.awaited:
            self._channel.on_change()
        return chunk
