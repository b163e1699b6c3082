"""Plans of tiny decoders, each built once in a run of the tests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from graphc import decoders
from graphc.api import Options
from graphc.models.hybrid import Hybrid
from graphc.models.hybrid_config import TINY
from graphc.report import BuildReport
from tests.tiny_decoders import make

CONTEXT = 512
#: what a prompt is cut into; drafted tokens that are verified at once
CHUNK, DRAFTS = 96, 5


@dataclass(frozen=True)
class Tiny:
    """A transformers' model of a family (`tests.tiny_decoders`), or the reference hybrid
    ("hybrid"), with random weights that are rounded to dtype. settled: all experts and keys are
    chosen, not the best of them. quant: what the plan narrows."""

    family: str
    dtype: torch.dtype = torch.float32
    settled: bool = False
    quant: str = ""

    def model(self) -> Any:
        """The same weights at every call."""
        if self.family != "hybrid":
            return make(self.family, settled=self.settled).to(self.dtype)
        config = TINY
        if self.settled:
            config = replace(TINY, experts_per_token=TINY.experts, index_topk=4096)
        torch.manual_seed(0)
        return Hybrid(config).eval().to(self.dtype)

    def tokens(self, count: int, seed: int = 1) -> NDArray[np.int64]:
        """Drawn from its vocabulary."""
        generator = torch.Generator().manual_seed(seed)
        high = TINY.vocab_size if self.family == "hybrid" else 500
        ids: NDArray[np.int64] = torch.randint(3, high, (count,), generator=generator).numpy()
        return ids


class Plans:
    """Plan folders and build reports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reports: dict[Tiny, BuildReport] = {}

    def place(self, tiny: Tiny) -> Path:
        """The plan's folder; it is built if need be."""
        kind = "-settled" if tiny.settled else ""
        kind += f"-{tiny.quant}" if tiny.quant else ""
        place = self.folder / f"{tiny.family}-{str(tiny.dtype).removeprefix('torch.')}{kind}"
        if tiny not in self.reports:
            quant = (tiny.quant,) if tiny.quant else ()
            options = Options(buckets=("128", str(CONTEXT)), jobs=1, quant=quant)
            self.reports[tiny] = decoders.build(
                tiny.model(), place, options, chunk=CHUNK, batch=3, sequences=4, drafts=DRAFTS
            )
        return place

    def report(self, tiny: Tiny) -> BuildReport:
        """What the build found."""
        self.place(tiny)
        return self.reports[tiny]
