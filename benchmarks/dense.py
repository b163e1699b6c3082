"""Times the dense workloads (benchmarks/workloads) with graphc and with its peers.

    MINILM=checkpoint-folder MODELS=onnx-files python benchmarks/dense.py --json dense.json

prints the table that docs/benchmarks.md holds. Every row is one model at one precision and number
of threads; all runtimes of a row are timed in turn, each in a process of its own (cli.race). The
file of --json is written after each row and continued by the next run: what it holds is not
measured again (unless --again says so), so a run can be stopped, and one peer added later.
Artefacts of the peers are kept in --cache.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.dense_table import table, written, wrong  # noqa: E402
from benchmarks.workloads import Workload, workload  # noqa: E402
from cli.jobs import Inputs, Job, Unavailable, save_draws  # noqa: E402
from cli.peers import GRAPHC, PEERS, REFERENCE  # noqa: E402
from cli.race import cores, prepare, race  # noqa: E402

ROWS = (
    *(f"encoder:{length}" for length in (16, 64, 256)),
    *(f"prefill:{length}" for length in (128, 512, 2048, 8192)),
    *(f"{kind}:{n}" for n in (2048, 8192) for kind in ("step", "step_cat", "step_split")),
    *("softmax", "lnres"),
    *(f"mlp:{length}" for length in (1, 128, 2048)),
    *("resnet50", "det", "rec", "vad"),
    *(f"{kind}:{n}" for n in (2048, 8192) for kind in ("kda_prefill", "kda_prefill_operator")),
    *("kda_step", "kda_step_operator"),
    *(f"{kind}:{n}" for n in (2048, 8192) for kind in ("dsa_prefill", "dsa_prefill_blocks")),
    *(f"dsa_step{form}:8192" for form in ("", "_absorbed", "_split")),
)
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
#: to be raised when peers are driven in another way: their artefacts are made again
_PEERS_VERSION = 1
#: to be raised when the float64 results are made in another way
_REFERENCE_VERSION = 2


def main() -> int:
    """Measures what is asked for and prints the table; status 1 if a result was wrong."""
    options = _options()
    results: dict[str, Any] = {"rows": {}}
    if options.json and options.json.exists():
        results = json.loads(options.json.read_text())
    results |= {"machine": machine(), "versions": versions()}
    for threads in options.threads:
        for name in filter(re.compile(options.rows).search, ROWS):
            for dtype in options.dtype:
                row = _Row(name, dtype, threads, options)
                record = results["rows"].setdefault(row.key, {"runtimes": {}, "skipped": {}})
                if options.table or not row.measure(record):
                    if not record["runtimes"]:
                        del results["rows"][row.key]
                    continue
                if options.json:
                    temporary = options.json.with_suffix(".new")
                    temporary.write_text(json.dumps(results, indent=1))
                    temporary.replace(options.json)
    print(table(results))
    if options.markdown:
        old = options.markdown.read_text() if options.markdown.exists() else ""
        options.markdown.write_text(written(old, results))
    bad = [
        (name, f"{key} {name}: {item.get('mismatch') or item['error']}")
        for key, row in results["rows"].items()
        for name, item in row["runtimes"].items()
        if wrong(item)
    ]
    for _, line in bad:
        print(f"wrong result: {line}", file=sys.stderr)
    return 1 if any(name == GRAPHC for name, _ in bad) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    parser.add_argument("--rows", default="", metavar="REGEX", help="of " + " ".join(ROWS))
    parser.add_argument("--peers", type=names, default=list(PEERS), metavar=",".join(PEERS))
    parser.add_argument("--dtype", type=names, default=list(DTYPES), metavar="fp32,bf16")
    parser.add_argument("--threads", type=lambda t: [int(n) for n in names(t)], default=[1])
    parser.add_argument("--rounds", type=int, default=7, help="samples of each")
    parser.add_argument("--seconds", type=float, default=1.5, help="timed for each, about")
    parser.add_argument("--json", type=Path, help="results, written and continued")
    parser.add_argument("--again", action="store_true", help="measure what the JSON already has")
    parser.add_argument("--cold", action="store_true", help="build graphc with an empty cache")
    parser.add_argument("--table", action="store_true", help="measure nothing, print the JSON")
    parser.add_argument("--markdown", type=Path, help="write the table into this document")
    parser.add_argument("--cache", type=Path, default=_cache(), help="artefacts [%(default)s]")
    parser.add_argument("--lock", type=Path, help="file locked while timing: shared machines")
    return parser.parse_args()


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "graphc-bench"


class _Row:
    def __init__(self, name: str, dtype: str, threads: int, options: argparse.Namespace) -> None:
        self.name, self.dtype, self.threads, self.options = name, dtype, threads, options
        self.key = f"{name} {dtype} {threads}"

    def measure(self, record: dict[str, Any]) -> bool:
        """Adds what is missing to `record`; whether anything was measured."""
        options = self.options
        wanted = [
            name
            for name in (GRAPHC, *options.peers)
            if options.again or name not in record["runtimes"] | record["skipped"]
        ]
        if not wanted:
            return False
        try:
            made = workload(self.name)
        except FileNotFoundError as error:
            print(f"{self.key}: {error}", file=sys.stderr)
            return False
        if made.onnx and self.dtype != "fp32":
            return False  # its types are part of the file
        started = time.perf_counter()
        allowed = [name for name in wanted if not made.runtimes or name in made.runtimes]
        jobs, built, skipped = self._prepare(made, allowed)
        skipped |= {name: made.left_out for name in wanted if name not in allowed}
        entries, failed = race(
            jobs, rounds=options.rounds, seconds=options.seconds, hold=partial(hold, options.lock)
        )
        for name in (REFERENCE, *wanted):
            record["skipped"].pop(name, None)
        record["skipped"] |= skipped | failed
        for name, entry in entries.items():
            old = record["runtimes"].get(name, {})
            kept = {k: v for k, v in old.items() if k == "cold_cpu_s"}
            record["runtimes"][name] = kept | built[name] | entry.summary()
        record["flops"] = made.flops
        clock = "cpu_s" if self.threads == 1 else "wall_s"
        shown = [f"{n} {1e3 * e.summary()[clock]:.4g} ms" for n, e in entries.items()]
        shown += [f"{name}: {reason}" for name, reason in (skipped | failed).items()]
        seconds = time.perf_counter() - started
        print(f"{self.key} ({seconds:.0f} s): {', '.join(shown)}", file=sys.stderr, flush=True)
        return True

    def _prepare(
        self, made: Workload, wanted: list[str]
    ) -> tuple[dict[str, Job], dict[str, dict[str, Any]], dict[str, str]]:
        shared = self.options.cache.absolute() / self.name.replace(":", "-")
        folder = shared / self.dtype
        folder.mkdir(parents=True, exist_ok=True)
        inputs = save_draws(shared / "inputs", lambda number: _draw(self.name, number))
        key = f"{_PEERS_VERSION} {_digest(ROOT / 'benchmarks' / 'workloads', self.name)}"
        jobs: dict[str, Job] = {}
        built: dict[str, dict[str, Any]] = {}
        skipped: dict[str, str] = {}
        for name in (REFERENCE, *wanted):
            per_threads = name in ("compile", "compile_freeze", "aoti", "aoti_freeze")
            part = "load_reference" if name == REFERENCE else "load_module"
            job = Job(
                peer=name,
                folder=str(folder / (f"{name}-{self.threads}" if per_threads else name)),
                shared=str(shared), loader=f"benchmarks.workloads:{part}", model=self.name,
                dtype=None if made.onnx else DTYPES[self.dtype], threads=self.threads,
                cpus=cores(self.threads), inputs=inputs, onnx=made.onnx,
                reference=str(folder / "reference.npz"), path=[str(ROOT)],
                kept=list(made.kept), by_row=made.by_row,
            )  # fmt: skip
            try:
                built[name] = self._built(job, key)
            except Unavailable as error:
                skipped[name] = str(error)
                continue
            if name != REFERENCE:
                jobs[name] = job
        return jobs, built, skipped

    def _built(self, job: Job, key: str) -> dict[str, Any]:
        environment: dict[str, str] = {}
        with contextlib.ExitStack() as stack:
            if job.peer == REFERENCE:
                key += f" {_REFERENCE_VERSION}"
            if job.peer == GRAPHC:
                key += _digest(ROOT / "graphc") + _digest(ROOT / "passes")
                if self.options.cold:
                    key += str(time.time())
                    environment["GRAPHC_CACHE_DIR"] = stack.enter_context(
                        tempfile.TemporaryDirectory()
                    )
            made = prepare(job, key, nice=5, environment=environment)
        cpu = {"build_cpu_s": made.get("cpu_s", 0.0)}
        return cpu | ({"cold_cpu_s": made["cpu_s"]} if environment else {})


@contextlib.contextmanager
def hold(lock: Path | None) -> Iterator[None]:
    """Alone on the machine, as far as others ask for the same lock."""
    with contextlib.ExitStack() as stack:
        if lock is not None:
            fcntl.flock(stack.enter_context(lock.open("w")), fcntl.LOCK_EX)
        yield


def _draw(name: str, number: int) -> Inputs:
    """Arguments of a workload. Its inputs are drawn with a seed that is made of its name: zeros
    before the length give others of the same kind."""
    family, _, length = name.partition(":")
    inputs = workload(f"{family}:{'0' * number}{length}" if number else name).inputs
    first = _first(name)
    inputs |= {key: first.inputs[key] for key in first.alike if key in inputs}
    return Inputs(tuple(inputs.values()), {}, list(inputs))


@lru_cache(maxsize=1)
def _first(name: str) -> Workload:
    return workload(name)


def _digest(folder: Path, name: str = "") -> str:
    """Of all sources below `folder`; of those of workload `name` only."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix not in {".py", ".h", ".cpp", ".yaml"}:
            continue
        if name and path.stem != "__init__" and f"{path.stem}.py" != _source(name):
            continue
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _source(name: str) -> str:
    """The module of a workload."""
    family = name.partition(":")[0]
    if family == "prefill" or family.startswith("step"):
        return "decoder.py"
    if family in ("softmax", "lnres"):
        return "chains.py"
    if family.startswith(("kda_", "dsa_")):
        return f"{family[:3]}.py"
    if family in ("det", "rec", "vad"):
        return "onnx_files.py"
    return {"resnet50": "resnet.py"}.get(family, f"{family}.py")


def machine() -> dict[str, Any]:
    """The processor and its number of cores."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line for line in lines if line.startswith("model name")).partition(": ")[2]
    return {"processor": model, "cores": len(cores(1 << 20)), "system": platform.system()}


def versions() -> dict[str, str]:
    """Of the peers that are installed."""
    found: dict[str, str] = {"date": time.strftime("%Y-%m-%d")}
    for name in ("graphc", "torch", "onnxruntime", "openvino"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
