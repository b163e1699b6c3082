"""Prefill and decode of language models, in CPU seconds at one thread (wall time at more).

    python benchmarks/generation.py CHECKPOINT... [--lengths 512 2048] [--threads 1] [--bucket 32K]
        [--plans DIR] [--json FILE] [--lock FILE]

CHECKPOINT is whatever `graphc build --generate` takes; its plan is built into --plans once and
reused. For each length: a prompt of that many random tokens is prefilled into a fresh sequence
(least of three), then 16 tokens are decoded behind it (median). Peak memory is the process's own
high-water mark after each length, weights and all: lengths run in ascending order, each model in a
process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

PREFILLS, DECODES = 3, 16


@contextlib.contextmanager
def locked(path: Path | None) -> Iterator[None]:
    """Alone on the machine, as far as others ask for the same lock."""
    if path is None:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def seconds(threads: int) -> float:
    """The clock that counts: of the process at one thread, of the wall at more."""
    return time.process_time() if threads == 1 else time.perf_counter()


def build(model: str, place: Path, bucket: list[str], dtype: str | None) -> None:
    from graphc import decoders
    from graphc.api import Options

    if not (place / "plan.json").is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        decoders.build(model, place, Options(buckets=tuple(bucket)), dtype=dtype)


def measure(place: Path, lengths: list[int], threads: int, lock: Path | None) -> dict[str, Any]:
    """Figures of one plan, by length."""
    from graphc.runtime.decoder import load

    decoder = load(place, threads=threads)
    vocabulary = min(
        (high for _, low, high, _ in decoder.session.plan.ranges if low <= 0 < high), default=256
    )
    ids = np.random.default_rng(0).integers(3, vocabulary, max(lengths))
    rows: dict[str, Any] = {}
    for length in sorted(lengths):
        with locked(lock):
            prefill = []
            for _ in range(PREFILLS if length <= 8192 else 1):
                with decoder.sequence() as sequence:
                    begin = seconds(threads)
                    sequence.prefill(ids[:length])
                    prefill.append(seconds(threads) - begin)
            with decoder.sequence() as sequence:
                sequence.prefill(ids[:length])
                decode = []
                for token in range(DECODES + 2):
                    begin = seconds(threads)
                    sequence.decode(5 + token)
                    decode.append(seconds(threads) - begin)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        facts = decoder.session.describe()
        rows[str(length)] = {
            "prefill_s": min(prefill),
            "prefill_tokens_per_s": length / min(prefill),
            "decode_ms": 1e3 * median(decode[2:]),
            "peak_mib": peak,
            "arena_mib": facts["arena_bytes"] / 2**20,
            "fallbacks": facts["fallback_steps"],
        }
    return rows


def _child(place: Path, lengths: list[int], threads: int, lock: Path | None, out: Any) -> None:
    out.put(measure(place, lengths, threads, lock))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bucket", action="append", default=[])
    parser.add_argument("--dtype")
    parser.add_argument("--plans", type=Path, default=Path.home() / ".cache/graphc-bench/plans")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lock", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    context = multiprocessing.get_context("spawn")
    for model in args.models:
        name = Path(model).parent.name if Path(model).name == "hf" else Path(model).name
        place = args.plans / f"{name}-{args.dtype or 'own'}-{'-'.join(args.bucket) or 'all'}"
        builder = context.Process(target=build, args=(model, place, args.bucket, args.dtype))
        builder.start()
        builder.join()
        if builder.exitcode:
            print(f"{name}: the build failed", file=sys.stderr)
            continue
        out = context.Queue()
        child = context.Process(
            target=_child, args=(place, args.lengths, args.threads, args.lock, out)
        )
        child.start()
        found[name] = out.get()
        child.join()
        for length, row in found[name].items():
            print(
                f"{name:24} {length:>7} prefill {row['prefill_s']:8.3f} s "
                f"{row['prefill_tokens_per_s']:8.1f}/s  decode {row['decode_ms']:7.2f} ms  "
                f"peak {row['peak_mib']:7.0f} MiB  fallbacks {row['fallbacks']}",
                flush=True,
            )
        if args.json:
            args.json.write_text(json.dumps({"threads": args.threads, "models": found}, indent=1))


if __name__ == "__main__":
    main()
