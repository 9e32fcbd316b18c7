"""The free list of a pool's pages.

A page belongs to one request at a time. Sharing (a prefix cache) would count holders
here; page tables and programs would not change.
"""


class PageAllocator:
    """Hands out pages by number."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` pages, or None if there are not that many."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        """Frees `pages` and empties the list."""
        self._free.extend(reversed(pages))
        pages.clear()
        assert len(self._free) <= self.num_pages, "a page was given back twice"
