"""Which pages of a pool are in use, and by how many sequences and snapshots."""

from __future__ import annotations

from graphc.errors import UsageError


class PagePool:
    """Pages 1 to count - 1 (page 0 is never handed out); the lowest free one comes first, so that
    a pool touches no more memory than it needs."""

    def __init__(self, count: int) -> None:
        self._users = [0] * count
        self._free = list(range(count - 1, 0, -1))

    @property
    def free(self) -> int:
        """Pages that nobody uses."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Free pages for one user.

        Raises:
            UsageError: there are too few; nothing was taken.
        """
        if count > len(self._free):
            raise UsageError(
                f"expected {count} free pages, found {len(self._free)} of {len(self._users) - 1}",
                hint="close sequences and snapshots that are not needed any more, or build with "
                "room for more sequences",
            )
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._users[page] = 1
        return taken

    def share(self, pages: list[int]) -> list[int]:
        """The same pages for one more user."""
        for page in pages:
            self._users[page] += 1
        return list(pages)

    def shared(self, page: int) -> bool:
        """Whether writing into the page would change it for somebody else."""
        return self._users[page] > 1

    def give_back(self, pages: list[int]) -> None:
        """One user less for each; a page without users is free."""
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)
