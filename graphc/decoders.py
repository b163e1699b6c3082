"""Decoders with state: `build` makes a plan of phases from a checkpoint.

One capture holds for any number of sequences and tokens. The phases are that graph for other
ranges: prefill (one sequence, up to `chunk` tokens), decode (one token for each of up to `batch`
sequences), and where it is asked for verify (2 to `drafts` tokens for each, and what follows each
of them).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from msgspec import structs
from torch.export import Dim
from torch.utils._sympy.functions import Min

from graphc.api import (
    NO_CODES,
    Options,
    build_captured,
    checked,
    pipeline,
    precision_policy,
    targets_of,
)
from graphc.builder import Side
from graphc.errors import CaptureError, UsageError
from graphc.from_cache import captured_graphs
from graphc.frontends.capture import Captured, capture
from graphc.frontends.decoder.facts import DecoderFacts
from graphc.frontends.decoder.resolve import opened_decoder
from graphc.frontends.decoder.stateful import StatefulDecoder
from graphc.frontends.huggingface import tokenizer_text
from graphc.garbage import rarely_collected
from graphc.ir.graph import Graph, Value
from graphc.ir.specialise import specialise
from graphc.lowering.classify import native_operators
from graphc.options import shapes_digest
from graphc.plan import DecoderPlan
from graphc.quantization import quantization
from graphc.report import BuildReport, PassRecord, StageRecord
from graphc.rewrite import run_passes
from graphc.shapes import Bucket, Shapes

if TYPE_CHECKING:
    from cache.store import Store
    from graphc.warm.builds import Warm
    from graphc.warm.captures import Kept

#: what a state holds while the model is traced; the plan's own sizes come afterwards
TRACED_PAGES, TRACED_SLOTS = 13, 5

#: a piece of a prompt long enough for products at the machine's rate, short enough that what a
#: layer makes of it stays small
CHUNK = 2048
BATCH = 8
TOKENIZER = "tokenizer.json"
#: lengths that a phase has for good: sequences B, new tokens of each T, scores of each K
FIXED: dict[str, dict[str, int]] = {
    "prefill": {"B": 1, "K": 1}, "decode": {"T": 1, "K": 1}, "verify": {}, "score": {"B": 1},
}  # fmt: skip
CAPTURES = 3  # at most, to cover all lengths of a sequence
#: values of a captured graph, the passes behind it, that a plan is to give besides the scores
Watch = Callable[[Graph], Mapping[str, Value]]
#: what a capture says of its range where another capture holds for the rest
_OWN_NOTES = ("M is proven for", "the model is not proven for the whole range")


@dataclass(frozen=True)
class Limits:
    """chunk: tokens of a prompt in one run; batch: sequences of one decode; context: tokens of a
    sequence; sequences: how many the states have room for at full length; drafts: tokens of a
    sequence in one verify, 0 where there is no such phase. score: the one phase scores every token
    of a piece of one sequence."""

    chunk: int
    batch: int
    context: int
    sequences: int
    drafts: int = 0
    score: bool = False


@dataclass(frozen=True)
class Phases:
    """The graphs by phase, each with what it was captured as, and how sequences live in their
    states."""

    captured: Captured
    graphs: tuple[tuple[str, Graph], ...]
    origins: tuple[Graph, ...]
    decoder: DecoderPlan


@dataclass(frozen=True)
class Traced:
    """A model that is captured for all lengths, for any number of builds. `text` says how text
    becomes tokens, `files` are those it takes."""

    name: str
    decoder: DecoderFacts
    captures: tuple[Captured, ...]
    limits: Limits
    buckets: Mapping[str, int]
    seconds: float
    text: str
    files: Mapping[str, str]

    @staticmethod
    def of(kept: Kept, seconds: float) -> Traced:
        """What `_trace` told, now or in an earlier build."""
        data = kept.extra
        return Traced(
            data["name"], DecoderFacts.of_plain(data["decoder"]), kept.captures,
            Limits(**data["limits"]), data["buckets"], seconds, data["text"], data["files"],
        )  # fmt: skip


@rarely_collected()
def build(
    model: str | torch.nn.Module,
    output: Path,
    options: Options | None = None,
    *,
    dtype: str | None = None,
    chunk: int | None = None,
    batch: int | None = None,
    sequences: int | None = None,
    drafts: int | None = None,
    warm: Warm | None = None,
    store: Store | None = None,
) -> BuildReport:
    """Builds a causal language model with its states into the plan folder `output`.

    Args:
        model: a checkpoint folder, a factory, or a module (`graphc.frontends.decoder.resolve`).
        options: their buckets name contexts; the largest is the most tokens of a sequence.
        dtype: weights are converted to it.
        chunk: the most tokens of a prompt in one run [2048].
        batch: the most sequences of one decode [8].
        sequences: how many at full length the states have room for [batch].
        drafts: the most tokens whose successors one verify scores, 2 and more [no such phase].
        warm: what the cache has of the model (`graphc.api.build_decoder` looks there).
        store: the cache, if it is open.

    Raises GraphcError: one of graphc.errors, with what, where and what to do.
    """
    options = options or Options()
    # wrong words: before any work
    precision_policy(Shapes.load(options.shapes), options)
    targets_of(options.target, options.tune)
    if isinstance(model, str) and sequences is None:
        given = {"--dtype": dtype, "--chunk": chunk, "--batch": batch, "--drafts": drafts}
        words = [word for name, value in given.items() if value for word in (name, str(value))]
        options = replace(options, command=(model, "--generate", *words, *options.words()))
    most = batch or BATCH
    limits = Limits(chunk or CHUNK, most, 0, sequences or most, drafts or 0)
    traced = trace(model, options, limits, dtype=dtype, warm=warm)
    return build_traced(traced, output, options, store=store)


@rarely_collected()
def trace(
    model: str | torch.nn.Module, options: Options, limits: Limits, *, dtype: str | None = None,
    warm: Warm | None = None,
) -> Traced:  # fmt: skip
    """The model's captures, out of the cache where they are there. limits: a context, unless it is
    0, bounds the buckets that are taken where `options` asks for none; it becomes that of the
    largest bucket, and a chunk is no longer than that. Arguments and errors otherwise as `build`.
    """
    clock = time.perf_counter()
    if options.progress is not None:
        options.progress("capture", 0, 0)
    front = {
        "kind": "decoder", "limits": asdict(limits), "dtype": dtype,
        "buckets": options.buckets, "shapes": shapes_digest(options),
    }  # fmt: skip
    kept = captured_graphs(warm, front, lambda: _trace(model, options, limits, dtype))
    return Traced.of(kept, time.perf_counter() - clock)


def _trace(
    model: str | torch.nn.Module, options: Options, limits: Limits, dtype: str | None
) -> tuple[Sequence[Captured], dict[str, Any]]:
    """The captures, and the rest of a Traced as JSON."""
    table = Shapes.load(options.shapes)
    with opened_decoder(model, dtype=dtype, pages=TRACED_PAGES, slots=TRACED_SLOTS) as found:
        decoder, longest = found
        most = min(longest, limits.context or longest)
        buckets = contexts(table, options.buckets, longest if options.buckets else most)
        context = max(buckets.values())
        limits = replace(limits, chunk=min(limits.chunk, context), context=context)
        if limits.score:
            limits = replace(limits, batch=1, drafts=limits.chunk)
        _check(limits)
        captures = _captures(decoder, limits, native_operators())
        text, files = _text(model, decoder)
        facts = DecoderFacts.of(decoder).plain()
    return captures, {
        "name": Path(model).name if isinstance(model, str) else type(model).__name__,
        "decoder": facts, "limits": asdict(limits), "buckets": buckets, "text": text,
        "files": files,
    }  # fmt: skip


@rarely_collected()
def build_traced(
    traced: Traced, output: Path, options: Options, watch: Watch | None = None,
    store: Store | None = None,
) -> BuildReport:  # fmt: skip
    """Builds a plan of what `trace` captured, for the same buckets. watch: the plan also gives the
    values that it names, beside the scores. store: the cache, if it is open. Errors as `build`."""
    asked = quantization(options.quant)
    policy = precision_policy(Shapes.load(options.shapes), options)
    decoder = traced.decoder
    records: list[PassRecord] = []
    watched: list[Mapping[str, Value]] = []

    def prepare(graph: Graph) -> Graph:
        # several graphs read the weights, some of them for many rows; how states are read is
        # known when a phase's lengths are
        wanted = [NO_CODES, *asked.of_weights().pass_options(), *options.pass_options]
        made, found = run_passes(
            checked(graph, policy, "decoder"), pipeline(options.disable_pass, wanted),
            verify=options.verify, dump=options.dump_passes, phase="all",
            progress=options.progress,
        )  # fmt: skip
        records.extend(found)
        if watch is not None:
            watched.append(watch(made))
            made = replace(made, results=(*made.results, *watched[-1].values()))
        return made

    clock = time.perf_counter()
    phases = _phase_graphs(traced.captures, decoder, traced.limits, prepare)
    asked.of_weights().check(records)
    seconds = traced.seconds + time.perf_counter() - clock
    stages = (*options.stages, StageRecord("capture", seconds))
    return build_captured(
        _with_results(phases.captured, watched), Path(output), replace(options, stages=stages),
        model=traced.name, source="decoder",
        asked=asked.of_states([spec.buffer for spec in decoder.specs if spec.index]),
        sides=phase_sides(phases, traced.buckets),
        decoder=structs.replace(
            phases.decoder, stop=list(decoder.stop), begin=list(decoder.begin), text=traced.text
        ),
        files=traced.files,
        records=records,
        policy=policy,
        store=store,
    )  # fmt: skip


def _with_results(captured: Captured, watched: Sequence[Mapping[str, Value]]) -> Captured:
    """Captured as a plan that also gives what is watched, by name."""
    if not watched:
        return captured
    names = list(watched[0])
    if any(list(found) != names for found in watched):
        raise CaptureError(
            "the decoder is captured in parts for different lengths, which cannot be watched alike",
            hint="build for a smaller bucket",
        )
    graph, first = captured.graph, len(captured.graph.results)
    tree = [*captured.results["dict"], *([n, {"leaf": first + i}] for i, n in enumerate(names))]
    return replace(
        captured,
        graph=replace(graph, results=(*graph.results, *watched[0].values())),
        results={"dict": tree},
        result_names=(*captured.result_names, *names),
    )


def _check(limits: Limits) -> None:
    if limits.drafts and not 2 <= limits.drafts <= limits.chunk:
        raise UsageError(
            f"expected 2 to {limits.chunk} drafted tokens (a chunk of a prompt has as many), found "
            f"{limits.drafts}"
        )


def _text(model: str | torch.nn.Module, decoder: StatefulDecoder) -> tuple[str, dict[str, str]]:
    """How text becomes tokens, and the files that takes."""
    if decoder.bytes_are_tokens:
        return "bytes", {}
    text = tokenizer_text(Path(model)) if isinstance(model, str) else None
    return ("", {}) if text is None else ("tokenizer", {TOKENIZER: text})


def capture_decoder(
    decoder: StatefulDecoder, limits: Limits, *, keep: frozenset[str],
    prepare: Callable[[Graph], Graph] = lambda graph: graph,
) -> Phases:  # fmt: skip
    """Captures a decoder and makes the graphs of its phases.

    Args:
        keep: operator names that must reach the passes undecomposed.
        prepare: what is done once to a captured graph, so that its phases share it.

    Raises:
        CaptureError: it cannot be traced for all lengths.
    """
    captures = _captures(decoder, limits, keep)
    return _phase_graphs(captures, DecoderFacts.of(decoder), limits, prepare)


def _phase_graphs(
    captures: Sequence[Captured], decoder: DecoderFacts, limits: Limits,
    prepare: Callable[[Graph], Graph],
) -> Phases:  # fmt: skip
    """The graphs of a decoder's phases."""
    captured, page, columns = captures[0], decoder.page, _columns(decoder, limits)
    pages = 1 + columns * limits.sequences
    slots = limits.sequences
    kinds = {spec.buffer: spec.kind for spec in decoder.specs}
    rows = [i for i, s in enumerate(captured.graph.states) if kinds[s.name] == "rows"]
    fixed = [i for i in range(len(captured.graph.states)) if i not in rows]
    graphs: list[tuple[str, Graph]] = []
    origins: list[Graph] = []
    room: list[tuple[int, int]] = []
    for origin in (made.graph for made in captures):
        graph = prepare(origin)
        sizes = {
            state.name: (pages if kinds[state.name] == "rows" else slots, *content.shape[1:])
            for state, content in graph.states.items()
        }
        for stretch in _stretches(graph, page):
            for phase, ranges in _phases(limits).items():
                single = {name: low for name, (low, high) in ranges.items() if low == high}
                several = {name: ends for name, ends in ranges.items() if name not in single}
                fixed_sizes = {**FIXED[phase], **single}
                own = {**several, "M": stretch}
                graphs.append((phase, specialise(graph, fixed_sizes, own, sizes)))
                origins.append(origin)
            room.append(stretch)
    facts = DecoderPlan(
        page, pages, slots, limits.chunk, limits.batch, limits.context, rows, fixed, columns=room,
        drafts=limits.drafts,
    )  # fmt: skip
    return Phases(captured, tuple(graphs), tuple(origins), facts)


def _phases(limits: Limits) -> dict[str, dict[str, tuple[int, int]]]:
    """The ranges of each phase's symbols."""
    if limits.score:
        return {"score": {"T": (1, limits.chunk), "K": (1, limits.chunk)}}
    made: dict[str, dict[str, tuple[int, int]]] = {
        "prefill": {"T": (1, limits.chunk)},
        "decode": {"B": (1, limits.batch)},
    }
    if limits.drafts:
        some = (1, limits.drafts)
        made["verify"] = {"B": (1, limits.batch), "T": some, "K": some}
    return made


def _columns(decoder: DecoderFacts, limits: Limits) -> int:
    """The most pages of a sequence; at least as an example has."""
    return max(3, -(-limits.context // decoder.page))


def _captures(
    decoder: StatefulDecoder, limits: Limits, keep: frozenset[str]
) -> tuple[Captured, ...]:
    """Captures that hold for all lengths together: where a model takes the least of a number and
    the length, one holds below it and another beyond it."""
    columns = _columns(DecoderFacts.of(decoder), limits)
    batch = Dim("B", min=1, max=max(2, limits.batch))
    length = Dim("T", min=1, max=max(5, limits.chunk))  # five, as an example has
    shapes = {
        "input_ids": {0: batch, 1: length},
        "start": {0: batch},
        "table": {0: batch, 1: Dim("M", min=1, max=columns)},
        "slots": {0: batch},
        "kept": {0: Dim("K", min=1, max=max(2, limits.drafts))},
    }
    made: list[Captured] = []
    low = 1
    while low <= columns and len(made) < CAPTURES:
        example = decoder.example(columns=min(columns, max(3, low + 1)))
        found = capture(decoder, (), example, shapes, keep=keep)
        pages = found.graph.symbols["M"]
        if pages.maximum < low:
            break
        kept = tuple(note for note in found.notes if not note.startswith(_OWN_NOTES))
        made.append(replace(found, notes=kept))
        low = pages.maximum + 1
    if low <= columns:
        raise CaptureError(
            f"the decoder is not shown to hold for sequences of more than {(low - 1)} pages",
            hint="build for a smaller bucket",
        )
    return tuple(made)


def _stretches(graph: Graph, page: int) -> list[tuple[int, int]]:
    """Ranges of the pages of a sequence within which the choice of keys is of one kind: up to
    top-k tokens all are chosen, beyond it the best."""
    cuts: set[int] = set()
    for node in graph.nodes:
        if "indexer" in node.target:
            tokens = int(node.argument("pool")) if "pooled" in node.target else 1
            cuts.add(int(node.argument("count")) * tokens // page)
    for dim in (d for n in graph.nodes for v in n.outputs for d in getattr(v.type, "shape", ())):
        if not isinstance(dim, int):
            for least in dim.atoms(Min):
                counts = [int(a) for a in least.args if a.is_Integer]
                cuts |= {count // page for count in counts}
    pages = graph.symbols["M"]
    low, high = pages.minimum, pages.maximum
    ends = [*sorted(cut for cut in cuts if low <= cut < high), high]
    return list(zip([low, *(end + 1 for end in ends)], ends, strict=False))


def contexts(table: Shapes, names: Sequence[str], longest: int) -> dict[str, int]:
    """Tokens of a sequence by bucket, smallest first: those asked for (a name, or a number of
    tokens), else all of shapes.yaml that the model has positions for.

    Raises:
        UsageError: no such bucket, or it is longer than the model's positions.
    """
    known = {name: max(limits.values()) for name, limits in table.buckets.items() if limits}
    if not names:
        fits = {name: n for name, n in known.items() if n <= longest}
        return fits or {str(longest): longest}
    made: dict[str, int] = {}
    for name in names:
        tokens = int(name) if name.isdigit() else known.get(name, 0)
        if not tokens:
            raise UsageError(
                f"expected a bucket, found {name!r}",
                hint=f"one of {', '.join(known)}, or a number of tokens",
            )
        if tokens > longest:
            raise UsageError(
                f"expected at most {longest} tokens, the positions that the model has, found the "
                f"bucket {name} with {tokens}"
            )
        made[name] = tokens
    return dict(sorted(made.items(), key=lambda item: item[1]))


def phase_sides(phases: Phases, asked: Mapping[str, int]) -> list[Side]:
    """What to build: every phase's graph, planned for every context by its bucket."""
    facts = phases.decoder
    lengths = {"T": facts.chunk, "B": facts.batch, "K": facts.drafts}

    def buckets(ranges: Mapping[str, tuple[int, int]]) -> list[Bucket]:
        made: list[Bucket] = []
        for name, tokens in asked.items():
            limits = {s: min(lengths.get(s, high), high) for s, (_, high) in ranges.items()}
            if "M" in limits:
                limits["M"] = -(-tokens // facts.page)
            if "T" in limits:
                limits["T"] = min(limits["T"], tokens)
            made.append(Bucket(name, limits))
        return made

    return [
        Side(graph, phase, buckets, FIXED[phase], origin)
        for (phase, graph), origin in zip(phases.graphs, phases.origins, strict=True)
    ]
