"""Numbers 0 .. n-1 that are handed out and come back, some only when the device is done with them."""

from collections.abc import Iterable
from typing import Protocol


class Event(Protocol):
    """What is asked of a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device has passed the event; never waits."""


class FreeList:
    """The numbers that nobody holds. Who holds which is the caller's to know."""

    def __init__(self, count: int):
        self._free = list(reversed(range(count)))
        self._returning: list[tuple[Event, list[int]]] = []

    @property
    def available(self) -> int:
        """How many can be taken now."""
        waiting = []
        for event, numbers in self._returning:
            if event.query():
                self._free += numbers
            else:
                waiting.append((event, numbers))
        self._returning = waiting
        return len(self._free)

    @property
    def returning(self) -> int:
        """How many were given back and wait for an event."""
        return sum(len(numbers) for _, numbers in self._returning)

    def take(self, count: int) -> list[int]:
        """`count` numbers, at most `available`."""
        assert count <= len(self._free)
        return [self._free.pop() for _ in range(count)]

    def give(self, numbers: Iterable[int], event: Event | None = None) -> None:
        """Take numbers back; with an event they stay out of reach until it has completed."""
        if event is None:
            self._free += numbers
        else:
            self._returning.append((event, list(numbers)))
