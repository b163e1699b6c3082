"""Contexts of 2 K, 32 K and 128 K tokens through the reference hybrid: does cost follow length?

    python benchmarks/long_context.py --json long.json --markdown docs/benchmarks.md

builds `k31_mini` (226 M parameters, random weights, bf16) as `graphc build --generate` does, into
--plan if that is no plan yet, and runs it as `graphc generate` does, in a fresh process for each
context: a prompt in pieces of the plan's chunk, then the last 32 tokens one by one. Times are set
against the operations counted from the configuration (benchmarks/hybrid_arithmetic.py). Another
process times prompts on both sides of an edge, in turn: one token more than the keys that are
chosen, one more than a chunk, than two.

The file of --json is written after each process and continued by the next run with as many threads,
so that a context can be measured apart (--contexts 131072 --edges). --table measures nothing. At
one thread CPU time counts, which other work on the machine disturbs least; at more, wall time.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from benchmarks.dense import hold, machine, versions  # noqa: E402
from benchmarks.long_context_table import short, table, written  # noqa: E402
from cli.race import cores  # noqa: E402

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from graphc.runtime.decoder import Decoder

CONTEXTS, EDGES = (2048, 32768, 131072), (512, 2048, 4096)
BUCKETS = ("2K", "32K", "128K")
DECODES, ROUNDS = 32, 7
#: contexts up to so many tokens are filled ROUNDS times
REPEATED = 8192
#: prompts, and their tokens, before anything is timed: weights move after three runs
WARM, SHORT = 3, 64


def build(place: str) -> None:
    """The plan, unless there is one."""
    from graphc import decoders
    from graphc.api import Options
    from graphc.models.hybrid import hybrid

    if not (Path(place) / "plan.json").is_file():
        decoders.build(hybrid("k31_mini"), Path(place), Options(buckets=BUCKETS), dtype="bfloat16")


def measure(place: str, context: int, threads: int) -> dict[str, Any]:
    """Seconds and memory of a prompt and of the tokens behind it that fill its context."""
    decoder, ids, before = _ready(place, context - DECODES, threads)
    prefill, decode = [], []
    for _ in range(ROUNDS if context <= REPEATED else 1):
        with decoder.sequence() as sequence:
            prefill.append(_timed(sequence.prefill, ids))
            facts = decoder.session.describe()
            decode += [_timed(sequence.decode, 5) for _ in range(DECODES)]
            held = len(sequence.pages) * decoder.page_bytes + decoder.slot_bytes
    peak = _resident("VmHWM") - _weights(decoder)
    return {
        "prompt": len(ids), "bucket": facts["bucket"], "fallbacks": facts["fallback_steps"],
        "prefill": _medians(prefill), "decode": _medians(decode),
        "peak": peak, "pages": held, "activations": peak - before - held,
        "planned": facts["arena_bytes"] + facts["scratch_bytes"],
    }  # fmt: skip


def edges(place: str, lengths: Sequence[int], threads: int) -> dict[str, Any]:
    """Seconds (wall, CPU) of prompts of n and of n + 1 tokens, in turn."""
    decoder, ids, _ = _ready(place, max(lengths) + 1, threads)
    found: dict[int, list[tuple[float, float]]] = {m: [] for n in lengths for m in (n, n + 1)}
    for _ in range(ROUNDS):
        for length, times in found.items():
            with decoder.sequence() as sequence:
                times.append(_timed(sequence.prefill, ids[:length]))
    return {str(n): [_medians(found[m]) for m in (n, n + 1)] for n in lengths}


def _ready(place: str, length: int, threads: int) -> tuple[Decoder, NDArray[np.int64], int]:
    """A decoder whose weights lie where they stay, a prompt, and what was resident above the
    weights before the first run."""
    from graphc.runtime.decoder import load

    decoder = load(place, threads=threads)
    before = _resident("VmRSS") - _weights(decoder)
    high = min(high for _, low, high, _ in decoder.session.plan.ranges if low <= 0 < high)
    ids = np.random.default_rng(0).integers(0, high, length)
    for _ in range(WARM):
        with decoder.sequence() as sequence:
            sequence.prefill(ids[:SHORT])
            sequence.decode(5)
    if decoder.session._mover is not None:
        decoder.session._mover.join()
    return decoder, ids, before


def _timed(run: Callable[[Any], object], given: Any) -> tuple[float, float]:
    """Seconds of the wall, and of the CPU in all threads."""
    cpu, wall = time.process_time(), time.perf_counter()
    run(given)
    return time.perf_counter() - wall, time.process_time() - cpu


def _medians(times: Sequence[tuple[float, float]]) -> list[float]:
    return [median(one) for one in zip(*times, strict=True)]


def _resident(field: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def _weights(decoder: Decoder) -> int:
    """Bytes of the weights that are resident, in the file or moved out of it."""
    mapped = decoder.session._weights
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(mapped.address // mmap.PAGESIZE * 8)
        pages = np.frombuffer(file.read(-(-mapped.nbytes // mmap.PAGESIZE) * 8), np.uint64)
    return int(np.count_nonzero(pages >> np.uint64(63))) * mmap.PAGESIZE


def _child(task: Callable[..., Any], arguments: Sequence[Any], out: Any) -> None:
    out.put(task(*arguments))


def apart(task: Callable[..., Any], *arguments: Any) -> Any:
    """The answer of a task in a fresh process."""
    context = multiprocessing.get_context("spawn")
    out = context.SimpleQueue()
    child = context.Process(target=_child, args=(task, arguments, out))
    child.start()
    child.join()
    if child.exitcode:
        raise SystemExit(f"{task.__name__}{arguments}: the process failed")
    return out.get()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", type=int, nargs="*", default=list(CONTEXTS))
    parser.add_argument("--edges", type=int, nargs="*", default=list(EDGES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--plan", type=Path, help="kept there and used again; else made anew")
    parser.add_argument("--json", type=Path, help="results, written and continued")
    parser.add_argument("--table", action="store_true", help="measure nothing, print the JSON")
    parser.add_argument("--markdown", type=Path, help="write the table into this document")
    parser.add_argument("--lock", type=Path, help="file locked while timing: shared machines")
    return parser.parse_args()


def _measured(options: argparse.Namespace, results: dict[str, Any]) -> Iterator[None]:
    """Adds what is asked for to `results`; pauses where they are worth to be kept."""
    with tempfile.TemporaryDirectory() as scratch:
        place = str(options.plan or Path(scratch) / "plan")
        apart(build, place)
        os.sched_setaffinity(0, cores(options.threads))
        for context in options.contexts:
            with hold(options.lock):
                found = apart(measure, place, context, options.threads)
            results.setdefault("contexts", {})[str(context)] = found
            yield
        if options.edges:
            with hold(options.lock):
                found = apart(edges, place, options.edges, options.threads)
            results.setdefault("edges", {}).update(found)
            yield


def main() -> int:
    """Prints the table; status 1 if something grows faster than it should."""
    options = _options()
    results: dict[str, Any] = {}
    if options.json and options.json.exists():
        results = json.loads(options.json.read_text())
    if not options.table:
        if results.get("threads") != options.threads:
            results = {"threads": options.threads}
        results |= {"machine": machine(), "versions": versions()}
        for _ in _measured(options, results):
            if options.json:
                options.json.write_text(json.dumps(results, indent=1))
    print(table(results))
    if options.markdown:
        options.markdown.write_text(written(options.markdown.read_text(), results))
    return 1 if short(results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
