"""What a plan must know of a decoder besides its graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from graphc.frontends.decoder.book import StateSpec
from graphc.frontends.decoder.stateful import StatefulDecoder
from graphc.ir.types import torch_dtype


@dataclass(frozen=True)
class DecoderFacts:
    """page: tokens of a page. specs: the states. stop, begin: tokens that end a text, and that
    stand in front of one. bytes_are_tokens: token i is the byte i."""

    page: int
    specs: tuple[StateSpec, ...]
    stop: tuple[int, ...]
    begin: tuple[int, ...]
    bytes_are_tokens: bool

    @staticmethod
    def of(decoder: StatefulDecoder) -> DecoderFacts:
        """Those of a decoder."""
        return DecoderFacts(
            decoder.page, decoder.specs, decoder.stop, decoder.begin, decoder.bytes_are_tokens
        )

    def plain(self) -> dict[str, Any]:
        """As JSON; `of_plain` reads it back."""
        specs = [{**asdict(spec), "dtype": str(spec.dtype)[6:]} for spec in self.specs]
        return {**asdict(self), "specs": specs}

    @staticmethod
    def of_plain(data: Mapping[str, Any]) -> DecoderFacts:
        """The inverse of `plain`."""
        specs = (
            StateSpec(
                **{**spec, "shape": tuple(spec["shape"]), "dtype": torch_dtype(spec["dtype"])}
            )
            for spec in data["specs"]
        )
        return DecoderFacts(
            data["page"], tuple(specs), tuple(data["stop"]), tuple(data["begin"]),
            data["bytes_are_tokens"],
        )  # fmt: skip
