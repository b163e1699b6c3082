"""Token by token: a prompt, and what follows it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphc.errors import UsageError
from graphc.runtime.sampling import Sampler

if TYPE_CHECKING:
    from graphc.runtime.decoder import Sequence


@dataclass
class Timing:
    """Seconds and tokens of one generation."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """New tokens per second, the first one apart: prefill gives that."""
        return (self.new_tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0


def generate(
    sequence: Sequence,
    prompt: Many[int],
    *,
    max_new_tokens: int,
    sampler: Sampler | None = None,
    stop: frozenset[int] = frozenset(),
    timing: Timing | None = None,
) -> Iterator[int]:
    """The tokens that follow `prompt`, each as soon as it is known; a token of `stop` is the last.

    `timing` is filled while tokens are taken. The last token is not fed to the model: the
    sequence ends where another prompt may go on.

    Raises:
        UsageError: the prompt is empty, or it does not fit.
    """
    if max_new_tokens < 1:
        raise UsageError(f"expected at least one new token, found {max_new_tokens}")
    sampler = sampler or Sampler()
    timing = timing or Timing()
    begin = time.perf_counter()
    logits = sequence.prefill(prompt)
    timing.prompt_tokens = len(prompt)
    timing.prefill_seconds = time.perf_counter() - begin
    for count in range(max_new_tokens):
        token = sampler(logits)
        timing.new_tokens = count + 1
        yield token
        if token in stop or count + 1 == max_new_tokens:
            return
        begin = time.perf_counter()
        logits = sequence.decode(token)
        timing.decode_seconds += time.perf_counter() - begin
