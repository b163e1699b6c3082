"""How narrowed index keys rank on made-up sequences with known relevant keys.

    python benchmarks/ranking.py [--length 16384] [--json FILE]

An indexer of 64 heads of 128 over hidden rows of 256 numbers, keys behind a LayerNorm, as in
DeepSeek-V3.2, its weights drawn.

random   normal rows, nothing to find
topics   rows are 0.6 x one of 200 topics + 0.8 x noise, topics change every 64 rows; queries of
         all heads resemble the keys (the key's projection + 0.7 x noise), head weights are
         positive, and nothing is rotated: a content match, as a trained indexer makes it. Relevant
         are the rows of the query's own topic
needle   the same, and 32 rows planted before each query that are 0.8 x its row + 0.6 x noise.
         Relevant are those

48 queries at 55 to 100 % of a sequence; as many sequences as give 20,000 relevant keys. Queries
and keys in bfloat16 are the reference, and what is narrowed; float32 is the control. Measures are
those of `graphc.quality.ranking`; mass is that of the softmax of scores in units of their
deviation, since there is no attention here.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from graphc.quality.ranking import Asked, Form, Ranks, choice, noise, predicted_loss
from graphc.quantization import RESCORE

HEADS, DIM, HIDDEN = 64, 128, 256
TOPICS, SEGMENT, PLANTED, QUERIES = 200, 64, 32, 48
KINDS = ("random", "topics", "needle")
SAMPLES = 20_000
#: the control is not narrowed; the others are made of numbers in bfloat16
CONTROL = Form("float32")
FORMS = (
    Form("mxfp8_floor", "mxfp8_floor"),
    Form("mxfp8_ceil", "mxfp8_ceil"),
    Form("mxfp8_even", "mxfp8_even"),
    Form("mxfp8_floor+rescore", "mxfp8_floor", RESCORE),
    Form("mxfp8_ceil+rescore", "mxfp8_ceil", RESCORE),
)
BASE = Form("bfloat16")


@dataclass(frozen=True)
class Made:
    """Queries of one sequence, and which keys are relevant to each, bool [Q, S]."""

    asked: Asked
    relevant: Tensor | None


def made(kind: str, length: int, count: int, seed: int) -> Made:
    """A sequence with its queries."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    places = torch.linspace(0.55 * length, length - 1, QUERIES).long()
    to_key = drawn(DIM, HIDDEN) / HIDDEN**0.5
    rows, relevant = drawn(length, HIDDEN), None
    if kind == "random":
        to_query = drawn(HEADS, DIM, HIDDEN) / HIDDEN**0.5
        weights = rows[places] @ drawn(HIDDEN, HEADS) / HIDDEN**0.5
    else:
        to_query = to_key + 0.7 * drawn(HEADS, DIM, HIDDEN) / HIDDEN**0.5
        weights = (drawn(HEADS).abs() + 0.1).expand(QUERIES, HEADS)
        pieces = torch.randint(TOPICS, [length // SEGMENT + 1], generator=generator)
        topic = pieces.repeat_interleave(SEGMENT)[:length]
        rows = 0.6 * drawn(TOPICS, HIDDEN)[topic] + 0.8 * rows
        rows[:, 0] = 1  # what head weights are made of
        seen = torch.arange(length) <= places.unsqueeze(1)
        relevant = (topic == topic[places].unsqueeze(1)) & seen
        if kind == "needle":
            relevant = torch.zeros_like(relevant)
            for q, place in enumerate(places.tolist()):
                planted = torch.randperm(place, generator=generator)[:PLANTED]
                rows[planted] = 0.8 * rows[place] + 0.6 * drawn(PLANTED, HIDDEN)
                rows[planted, 0] = 1
                relevant[q, planted] = True
    key = torch.nn.functional.layer_norm(rows @ to_key.T, [DIM])
    query = (rows[places] @ to_query.flatten(0, 1).T).view(QUERIES, HEADS, DIM)
    asked = Asked(
        position=places, query=query, weights=weights * (HEADS * DIM) ** -0.5, key=key,
        attention=query, rows=key, count=count, scale=1.0,
    )  # fmt: skip
    return Made(asked, relevant)


def measure(sequence: Made, into: dict[str, Ranks]) -> None:
    """Adds a sequence's sums to those of each form."""
    asked, relevant = sequence.asked, sequence.relevant
    rounded = replace(asked, query=asked.query.bfloat16(), key=asked.key.bfloat16())
    plain, scored = choice(rounded, BASE)
    units = torch.stack([row[row > -torch.inf].std() for row in scored]).unsqueeze(1)
    mass = torch.softmax((scored / units).masked_fill(~plain, -torch.inf), -1)
    for form in (CONTROL, BASE, *FORMS):
        chosen, noisy = choice(asked if form == CONTROL else rounded, form)
        rho = noise(noisy, scored)
        sums = {
            "rho": float(rho.sum()),
            "predicted": float(predicted_loss(rho, asked.count, asked.position + 1).sum()),
            "lost": float((1 - (chosen & plain).sum(-1) / asked.count).double().sum()),
            "mass": float((mass * chosen).sum(-1).double().sum()),
        }
        samples = 0
        if relevant is not None:
            samples = int(relevant.sum())
            sums["found"] = float((chosen & relevant).sum())
        into.setdefault(form.name, Ranks()).add(len(rho), samples, **sums)


def report(kind: str, ranks: dict[str, Ranks]) -> list[dict[str, object]]:
    """A row for each form, shares in percent."""
    rows: list[dict[str, object]] = []
    base = ranks[BASE.name]
    for name, found in ranks.items():
        means = found.means()
        row: dict[str, object] = {
            "data": kind, "keys": name, "queries": found.queries, "samples": found.relevant,
            "rho": means["rho"], "predicted": 100 * means["predicted"],
            "lost": 100 * means["lost"], "mass": 100 * means["mass"],
        }  # fmt: skip
        if found.relevant:
            recall = 100 * found.sums["found"] / found.relevant
            row |= {"recall": recall}
            row |= {"drop": 100 * base.sums["found"] / base.relevant - recall}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--length", type=int, default=16384, help="tokens of a sequence")
    parser.add_argument("--count", type=int, default=2048, help="keys that are chosen")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="relevant keys, at least")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    print("| data | keys | samples | ρ | predicted loss % | lost % | mass % | recall % | drop |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for kind in KINDS:
        ranks: dict[str, Ranks] = {}
        seed = 0
        while seed == 0 or (kind != "random" and ranks[BASE.name].relevant < options.samples):
            measure(made(kind, options.length, options.count, seed), ranks)
            seed += 1
        for row in report(kind, ranks):
            rows.append(row)
            recall = f"{row['recall']:.3f} | {row['drop']:+.3f}" if "recall" in row else "|"
            print(
                f"| {kind} | {row['keys']} | {row['samples']} | {row['rho']:.4f} | "
                f"{row['predicted']:.3f} | {row['lost']:.3f} | {row['mass']:.4f} | {recall} |",
                flush=True,
            )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
