"""Text and tokens, as the plan says."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from pathlib import Path
from typing import Any

from graphc.errors import UsageError
from graphc.plan import DecoderPlan


class Tokens:
    """Turns prompts into tokens, and tokens into text as they come.

    Raises:
        UsageError: (from `encode`) the plan does not know how.
    """

    def __init__(self, folder: Path, facts: DecoderPlan) -> None:
        self._kind, self._begin = facts.text, facts.begin
        self._known: Any = None
        if self._kind == "tokenizer":
            try:
                from tokenizers import Tokenizer
            except ImportError as error:
                raise UsageError(
                    "the plan's tokenizer needs the package tokenizers, which is not installed",
                    hint="pip install 'graphc[hf]', or give tokens with --ids",
                ) from error
            self._known = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt."""
        if self._kind == "bytes":
            return [*self._begin, *text.encode()]
        if self._known is None:
            raise UsageError(
                "expected tokens, found a text: this plan has no tokenizer",
                hint="give tokens with --ids, or build from a folder that holds tokenizer.json",
            )
        return list(self._known.encode(text).ids)

    def stream(self) -> Callable[[int], str]:
        """A function that takes one token after the other and gives the text that has become
        certain: half a character is held back until its rest comes."""
        if self._kind == "bytes":
            decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
            return lambda token: decoder.decode(bytes([token])) if token < 256 else ""
        if self._known is None:
            return lambda token: f"{token} "
        from tokenizers.decoders import DecodeStream

        known, decoded = self._known, DecodeStream(skip_special_tokens=True)
        return lambda token: decoded.step(known, token) or ""
