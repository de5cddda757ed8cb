"""`Listing`: the items of a resource, as an async iterator that reads page after page, or as one list."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Sequence
from typing import Any, Generic, TypeVar

__all__ = ["Listing"]

T = TypeVar("T")


class Listing(Generic[T]):
    """The items of a resource. It reads nothing before the caller iterates over it or awaits it.

        async for letter in client.dead_letters.list(): ...  # reads a page at a time

        letters = await client.dead_letters.list(limit=20)  # a list

    Each iteration and each `await` reads anew, and raises `BusUnavailable`, `BusRefused` and `ClientClosed` as a method
    of the client does.
    """

    def __init__(self, pages: Callable[[], AsyncIterator[Sequence[T]]]) -> None:
        self._pages = pages

    async def __aiter__(self) -> AsyncIterator[T]:
        async for page in self._pages():
            for item in page:
                yield item

    def __await__(self) -> Generator[Any, None, list[T]]:
        return self._all().__await__()

    async def _all(self) -> list[T]:
        return [item async for item in self]

    def __repr__(self) -> str:
        return "<Listing: iterate over it with `async for`, or await it>"
