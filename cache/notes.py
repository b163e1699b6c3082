"""What a user should hear of the cache, once each."""

from __future__ import annotations

import threading


class Notes:
    """Collects notes from several threads, until somebody drains them."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._told: set[str] = set()
        self._waiting: list[str] = []
        self._minor: list[str] = []
        self._failing = False

    def add(self, text: str, once: str = "") -> None:
        """A note; of several with the same `once` (default: the text), the first is told."""
        with self._mutex:
            if (once or text) not in self._told:
                self._told.add(once or text)
                self._waiting.append(text)

    def failing(self, text: str) -> None:
        """The cache cannot be read or written as a whole; the first such note stands for all."""
        with self._mutex:
            if not self._failing:
                self._failing = True
                self._waiting.append(text)

    def minor(self, text: str) -> None:
        """Something that goes without saying when the whole cache fails."""
        with self._mutex:
            if text not in self._told:
                self._told.add(text)
                self._minor.append(text)

    def drain(self) -> list[str]:
        """The notes since the last time, oldest first."""
        with self._mutex:
            found = self._waiting + ([] if self._failing else self._minor)
            self._waiting, self._minor = [], []
        return found
