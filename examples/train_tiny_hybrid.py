"""Trains graphc's embedded default: a hybrid of 5 M parameters over bytes, on one CPU core.

    python examples/train_tiny_hybrid.py train runs/tiny
    python examples/train_tiny_hybrid.py train runs/tiny --steps 6000 --resume level.pt
    python examples/train_tiny_hybrid.py train runs/long --longer runs/model
    python examples/train_tiny_hybrid.py save runs/long graphc/models/embedded
    python examples/train_tiny_hybrid.py evaluate graphc/models/embedded

The text is the standard library of the Python that runs this. Every draw comes from the seed and
the number of the step: a run that goes on from another's level.pt is the longer run from its start.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import lzma
import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from graphc.models import chunked_delta_rule, embedded, functional
from graphc.models.alignment import Alignment, align
from graphc.models.embedded.text import corpus
from graphc.models.hybrid import Hybrid
from graphc.models.hybrid_config import EMBEDDED
from graphc.models.kda import KimiDeltaAttention
from graphc.models.long_alignment import LongAlignment
from graphc.models.moe import Router
from graphc.models.states import States


@dataclasses.dataclass(frozen=True)
class Stage:
    """Steps up to `until`: sequences of `length` tokens, in each of which `repeats` pieces come
    twice; `cycles`: half of the sequences are a piece of shuffled bytes over and over.
    sparse: attention reads the chosen keys only, not all of them. long: it does, and is trained
    as in `graphc.models.long_alignment`, which has noise and coverage, with so many steps of the
    indexers alone behind each step as `again` says."""

    until: int
    length: int
    sparse: bool = False
    repeats: int = 0
    cycles: bool = False
    rate: float = 2e-3
    long: bool = False
    again: int = 0
    noise: float = 0.1
    coverage: float = 0.5


@dataclasses.dataclass(frozen=True)
class Recipe:
    steps: int = 1500
    tokens: int = 2048  # of a step
    stages: tuple[Stage, ...] = (
        Stage(750, 1024),
        Stage(754, 2048, sparse=True),
        Stage(1088, 1024, repeats=2),
        Stage(1195, 512, repeats=4, rate=3e-3),
        Stage(1287, 512, repeats=4, cycles=True, rate=3e-3),
        Stage(1370, 1024, repeats=1),
        Stage(1 << 30, 2048, sparse=True, repeats=1),
    )
    warm_up: int = 100
    decay: int = 100  # steps at the end, along a cosine, to a hundredth
    weight_decay: float = 0.1
    clip: float = 1.0
    balance: float = 5e-3  # of the routers' bias, a step
    shuffled: bool = True  # the order of the files
    seed: int = 0

    def stage(self, step: int) -> Stage:
        return next(stage for stage in self.stages if step < stage.until)


#: goes on from a model of `Recipe`: up to 32,768 tokens, then a little of 2,048 again
LONGER = Recipe(
    steps=77,
    stages=(
        Stage(11, 8192, long=True, rate=1e-3),
        Stage(12, 32768, long=True, rate=1e-3),
        Stage(23, 8192, long=True, rate=1e-3),
        Stage(24, 32768, long=True, rate=1e-3),
        Stage(33, 32768, long=True, rate=1e-3, again=16),
        Stage(37, 32768, long=True, rate=1e-3, again=24, noise=0.2, coverage=2.0),
        Stage(1 << 30, 2048, sparse=True, rate=5e-4),
    ),
    warm_up=10, decay=40, shuffled=False,
)  # fmt: skip


# Text


def stream(texts: list[bytes], seed: int | None) -> Tensor:
    """int16: all texts in a drawn order (None: in theirs, where neighbours have much in common),
    each behind the token that begins one."""
    order = torch.arange(len(texts))
    if seed is not None:
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))
    parts = []
    for i in order.tolist():
        text = torch.frombuffer(bytearray(texts[i]), dtype=torch.uint8)
        parts += [torch.tensor([embedded.BEGIN], dtype=torch.int16), text.to(torch.int16)]
    return torch.cat(parts)


def windows(tokens: Tensor, count: int, length: int, seed: int, repeats: int = 0) -> Tensor:
    """int64 [count, length + 1], drawn with replacement; so many times in each a piece is written
    over a later one, at any distance, which only a memory of the exact text foretells."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(tokens.shape[0] - length, [count], generator=generator)
    rows = torch.stack([tokens[i : i + length + 1] for i in first.tolist()]).long()
    for row in rows:
        for _ in range(repeats):
            repeat(row, generator)
    return rows


def repeat(row: Tensor, generator: torch.Generator) -> tuple[int, int]:
    """Writes a piece of a row over a later one; (place, length) of that one."""

    def draw(a: int, b: int) -> int:
        return int(torch.randint(a, b, [], generator=generator))

    size = draw(32, row.shape[0] // 4)
    source = draw(0, row.shape[0] - 2 * size)
    place = draw(source + size, row.shape[0] - size + 1)
    row[place : place + size] = row[source : source + size].clone()
    return place, size


def cycle(rows: Tensor, seed: int) -> None:
    """Makes of each row a piece of its bytes, shuffled, over and over: nothing foretells them but
    what came before. This teaches attention to look things up within a hundred steps."""
    generator = torch.Generator().manual_seed(seed + 12345)
    for row in rows:
        size = row.shape[0]
        period = int(torch.randint(16, 160, [], generator=generator))
        piece = row[torch.randperm(size, generator=generator)[:period]]
        row[:] = piece.repeat(size // period + 1)[:size]


# Training

#: tokens of a sequence whose insides are all kept
KEPT = 8192


def slope(step: int, recipe: Recipe) -> float:
    """Of the full learning rate: up along a line, level, down along a cosine."""
    done = max(0.0, 1 - (recipe.steps - step) / recipe.decay)
    return min(1.0, (step + 1) / recipe.warm_up) * (0.505 + 0.495 * math.cos(math.pi * done))


class Balance:
    """Moves each router's bias against the load of its experts (DeepSeek-V3)."""

    def __init__(self, model: Hybrid) -> None:
        self.load: dict[Router, Tensor] = {}
        for module in model.modules():
            if isinstance(module, Router):
                module.register_forward_hook(self._count)

    def _count(self, router: Router, _: Any, out: tuple[Tensor, Tensor]) -> None:
        self.load[router] = torch.bincount(out[0].flatten(), minlength=router.weight.shape[0])

    def step(self, by: float) -> float:
        """The largest share of an expert, in units of an equal one."""
        worst = 0.0
        for router, load in self.load.items():
            share = load / load.sum() * load.shape[0]
            router.e_score_correction_bias += by * torch.sign(1 - share)
            worst = max(worst, share.max().item())
        return worst


def forget(model: Hybrid) -> None:
    """Makes linear attention of long sequences compute its insides again on the way back, which
    are most of what a step keeps: 32,768 tokens need 9 GB so."""

    def forward(module: KimiDeltaAttention, x: Tensor, states: States) -> Tensor:
        if x.shape[1] <= KEPT:
            return KimiDeltaAttention.forward(module, x, states)
        again: Tensor = checkpoint(
            KimiDeltaAttention.forward, module, x, states, use_reentrant=False
        )
        return again

    for module in model.modules():
        if isinstance(module, KimiDeltaAttention):
            module.forward = partial(forward, module)  # type: ignore[method-assign]


class Trainer:
    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe, self.folder, self.step = recipe, folder, 0
        torch.manual_seed(recipe.seed)
        self.model = Hybrid(EMBEDDED).train()
        self.alignments: list[Alignment] = align(self.model)
        self.long = [LongAlignment(alignment.layer) for alignment in self.alignments]
        forget(self.model)
        self.balance = Balance(self.model)
        named = list(self.model.named_parameters())
        self.indexer = [p for name, p in named if ".indexer." in name]
        self.main = [p for name, p in named if ".indexer." not in name]
        matrices = [p for name, p in named if p.dim() > 1 and "embed" not in name]
        others = [p for name, p in named if p.dim() < 2 or "embed" in name]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": recipe.weight_decay},
             {"params": others, "weight_decay": 0.0}],
            lr=recipe.stages[0].rate, betas=(0.9, 0.95), fused=True,
        )  # fmt: skip

    def train_step(self, tokens: Tensor) -> dict[str, float]:
        recipe = self.recipe
        stage, seed = recipe.stage(self.step), (recipe.seed << 32) + self.step
        count = max(1, recipe.tokens // stage.length)
        batch = windows(tokens, count, stage.length, seed, stage.repeats)
        if stage.cycles:
            cycle(batch[count // 2 :], seed)
        torch.manual_seed(seed)  # the indexer's sample of queries
        alignments = self._choose(stage)
        for group in self.optimizer.param_groups:
            group["lr"] = stage.rate * slope(self.step, recipe)
        logits = self.model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        apart = torch.stack([alignment.loss for alignment in alignments]).sum()
        torch.autograd.backward(loss + apart)
        norm = torch.nn.utils.clip_grad_norm_(self.main, recipe.clip)
        torch.nn.utils.clip_grad_norm_(self.indexer, recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        worst = self.balance.step(recipe.balance * slope(self.step, recipe))
        for _ in range(stage.again):
            apart = self._again()
        self.step += 1
        found = {
            "bits": loss.item() / math.log(2), "indexer": apart.item(), "norm": norm.item(),
            "load": worst,
        }  # fmt: skip
        if stage.long:
            found |= {f"covered {a.layer.layer}": a.covered for a in self.long}
        return found

    def _choose(self, stage: Stage) -> Sequence[Alignment]:
        """What stands in the sparse layers during a stage."""
        for long in self.long:
            long.noise, long.coverage = stage.noise, stage.coverage
        alignments: Sequence[Alignment] = self.long if stage.long else self.alignments
        for alignment in alignments:
            alignment.sparse = stage.sparse or stage.long
            alignment.layer.forward = alignment  # type: ignore[method-assign]
        return alignments

    def _again(self) -> Tensor:
        """A step of the indexers alone: what has no gradient stays as it is."""
        apart = torch.stack([alignment.again() for alignment in self.long]).sum()
        torch.autograd.backward(apart)
        torch.nn.utils.clip_grad_norm_(self.indexer, self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return apart

    def run(self, every: float) -> None:
        """To the last step; a checkpoint each `every` seconds, and one where the rate still is
        level, from which a longer run goes on."""
        kept, _, digest = corpus()
        tokens = stream(kept, self.recipe.seed if self.recipe.shuffled else None)
        print(f"{tokens.numel()} tokens, digest {digest}", flush=True)
        level = self.recipe.steps - self.recipe.decay
        saved = began = time.monotonic()
        while self.step < self.recipe.steps:
            found = self.train_step(tokens)
            text = " ".join(f"{name} {value:.4f}" for name, value in found.items())
            seconds = time.monotonic() - began
            print(f"step {self.step} {text} seconds {seconds:.0f}", flush=True)
            if self.step == level:
                self.save("level.pt")
            if time.monotonic() - saved > every:
                self.save("last.pt")
                saved = time.monotonic()
        self.save("last.pt")

    def save(self, name: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "step": self.step,
        }  # fmt: skip
        torch.save(content, self.folder / (name + ".new"))
        (self.folder / (name + ".new")).replace(self.folder / name)

    def resume(self, name: str) -> None:
        content = torch.load(self.folder / name, weights_only=True)
        self.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        self.step = content["step"]


# Evaluation


def held_out(count: int, length: int) -> Tensor:
    """int64 [count, length + 1]: windows inside of held-out files, at drawn places."""
    long = [text for text in corpus()[1] if len(text) > length]
    generator = torch.Generator().manual_seed(1)
    weights = torch.tensor([float(len(text) - length) for text in long])
    rows = []
    for i in torch.multinomial(weights, count, replacement=True, generator=generator).tolist():
        first = int(torch.randint(len(long[i]) - length, [], generator=generator))
        rows.append(list(long[i][first : first + length + 1]))
    return torch.tensor(rows)


def copies(tokens: Tensor, size: int = 192, known: int = 32) -> tuple[Tensor, Tensor]:
    """(windows whose second half has a piece of the first one again, bool [windows, length]: the
    targets inside of the copy, behind as many bytes as it takes to know where one is)."""
    generator = torch.Generator().manual_seed(2)
    rows, half = tokens.clone(), tokens.shape[1] // 2
    inside = torch.zeros(rows.shape[0], rows.shape[1] - 1, dtype=torch.bool)
    for row, mask in zip(rows, inside, strict=True):
        source, place = torch.randint(half - size, [2], generator=generator).tolist()
        row[half + place : half + place + size] = row[source : source + size].clone()
        mask[half + place + known - 1 : half + place + size - 1] = True
    return rows, inside


def random_scores(
    query: Tensor, weights: Tensor, key: Tensor, first: int, start: Tensor | None
) -> Tensor:
    generator = torch.Generator().manual_seed(first)
    drawn = torch.rand(*query.shape[:2], key.shape[1], generator=generator)
    return drawn.tril(first) + torch.full_like(drawn, -torch.inf).triu(first + 1)


def recent_scores(
    query: Tensor, weights: Tensor, key: Tensor, first: int, start: Tensor | None
) -> Tensor:
    place = torch.arange(key.shape[1], dtype=torch.float32).expand(query.shape[1], -1)
    return (place + torch.full_like(place, -torch.inf).triu(first + 1)).expand(len(query), -1, -1)


def bits(model: Hybrid, tokens: Tensor) -> Tensor:
    """Of each byte, [windows, length]."""
    found = []
    with torch.inference_mode():
        for row in tokens:
            logits = model(row[None, :-1])
            found.append(F.cross_entropy(logits[0], row[1:], reduction="none") / math.log(2))
    return torch.stack(found)


def by_choice(model: Hybrid, tokens: Tensor) -> dict[str, Tensor]:
    """`bits` with the keys that the indexer chooses and with as many others."""
    scores, indexer = functional.index_scores, functional.lightning_indexer
    found = {"indexer": bits(model, tokens)}
    functional.index_scores = recent_scores
    found["most recent"] = bits(model, tokens)
    functional.index_scores = random_scores
    found["random"] = bits(model, tokens)
    functional.index_scores = scores
    functional.lightning_indexer = lambda *_, **__: None  # type: ignore[assignment]
    found["all keys"] = bits(model, tokens)
    functional.lightning_indexer = indexer
    return found


def evaluate(folder: Path, count: int, length: int) -> None:
    """Prints the figures of the card."""
    kept, held, digest = corpus()
    model = embedded.load(folder)
    print(f"corpus: {len(kept)} files, {sum(map(len, kept))} bytes to train on; "
          f"{len(held)} files, {sum(map(len, held))} bytes held out; sha256 {digest}")  # fmt: skip
    packed = 8 * sum(len(lzma.compress(text)) for text in held) / sum(map(len, held))
    print(f"xz, each held-out file by itself: {packed:.3f} bits per byte")
    tokens = held_out(count, length)
    ends = [0] + [1 << n for n in range(6, length.bit_length())]
    print(f"{count} windows of {length} bytes; bits per byte at positions")
    print("| keys | all |" + "".join(f" {a}-{b - 1} |" for a, b in itertools.pairwise(ends)))
    print("|---|" + "---|" * len(ends))
    found = by_choice(model, tokens)
    for name, values in found.items():
        parts = [values[:, a:b].mean() for a, b in itertools.pairwise(ends)]
        row = "".join(f" {part:.3f} |" for part in [values.mean(), *parts])
        print(f"| {name} |{row}")
    for name, values in found.items():
        gap = (values - found["indexer"]).mean(1)
        error = gap.std() / count**0.5
        print(f"{name} - indexer: {gap.mean():+.4f}, standard error {error:.4f}")
    rows, inside = copies(tokens)
    print("bits per byte inside of a copy of 192 bytes, 193 to 1855 bytes behind the original")
    for name, values in by_choice(model, rows).items():
        each = torch.stack([row[mask].mean() for row, mask in zip(values, inside, strict=True)])
        print(f"{name}: {each.mean():.3f}, standard error {each.std() / count**0.5:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train, with checkpoints in a folder")
    train.add_argument("folder", type=Path)
    train.add_argument("--steps", type=int, help="in place of the recipe's")
    text = "long sequences, from a model in a folder as `save` writes it"
    train.add_argument("--longer", type=Path, metavar="MODEL", help=text)
    train.add_argument("--resume", metavar="NAME", help="checkpoint in the folder to go on from")
    train.add_argument("--every", type=float, default=240.0, help="seconds between checkpoints")
    save = commands.add_parser("save", help="write a checkpoint's weights as safetensors")
    save.add_argument("folder", type=Path)
    save.add_argument("to", type=Path)
    save.add_argument("--checkpoint", default="last.pt")
    judge = commands.add_parser("evaluate", help="the figures of the card, on held-out files")
    judge.add_argument("folder", type=Path, nargs="?", default=embedded.FOLDER)
    judge.add_argument("--windows", type=int, default=64)
    judge.add_argument("--length", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.command == "evaluate":
        evaluate(options.folder, options.windows, options.length)
        return
    chunked_delta_rule.decays_are_bounded = lambda g: True  # this model's gates end at -5
    longer: Path | None = getattr(options, "longer", None)
    recipe = LONGER if longer else Recipe()
    steps = getattr(options, "steps", None) or recipe.steps
    trainer = Trainer(dataclasses.replace(recipe, steps=steps), options.folder)
    if options.command == "save":
        trainer.resume(options.checkpoint)
        embedded.save(trainer.model, options.to)
        return
    if longer:
        trainer.model.load_state_dict(embedded.load(longer).state_dict())
    if options.resume:
        trainer.resume(options.resume)
    trainer.run(options.every)


if __name__ == "__main__":
    main()
