"""From process start to the first output of a ready artefact, in CPU seconds, and peak memory.

    python benchmarks/coldstart.py PLAN --onnx FILE [--length T=64] [--rounds 21] [--json FILE]

Fresh processes, interleaved, one thread each, medians of user + system time: `graphc.load` in a
Python program, the command `graphc run`, ONNX Runtime on the same model, and the floor of all
three: Python, numpy and the inputs read from files. Outputs of graphc and ONNX Runtime are compared
first. Peak memory is the most that was resident after six runs, above that floor, and above the
weights too: the bytes of the ONNX file and of what it keeps beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from cli.inputs import make_inputs  # noqa: E402
from graphc.plan_io import read_plan  # noqa: E402
from graphc.runtime.binding import build_results  # noqa: E402
from graphc.runtime.session import load  # noqa: E402

_FLOOR = """
import numpy as np
feeds = {{name: np.load(file) for name, file in {files!r}.items()}}
"""
_GRAPHC = (
    """
import sys; sys.path.insert(0, {root!r})
import graphc
"""
    + _FLOOR
    + """
session = graphc.load({plan!r}, threads=1)
for _ in range({runs}):
    session.run(**feeds)
"""
)
_ORT = (
    _FLOOR
    + """
import onnxruntime
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = options.inter_op_num_threads = 1
session = onnxruntime.InferenceSession({onnx!r}, options, providers=["CPUExecutionProvider"])
feeds = {{i.name: feed for i, feed in zip(session.get_inputs(), feeds.values())}}
for _ in range({runs}):
    session.run(None, feeds)
"""
)
_PEAK = """
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""
_CODES = {"onnxruntime": _ORT, "graphc.load": _GRAPHC, "python + numpy": _FLOOR}
_RUNS = 6  # before peak memory is read


def child(command: list[str], environment: dict[str, str]) -> float:
    """CPU milliseconds of a fresh process."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} failed with status {process.returncode}")
    return 1e3 * (usage.ru_utime + usage.ru_stime)


def peaks(values: dict[str, Any], environment: dict[str, str]) -> dict[str, float]:
    """MiB that were resident at most in fresh processes of several runs. Linux only."""
    values = values | {"runs": _RUNS}
    found = {}
    for name, code in _CODES.items():
        command = [sys.executable, "-c", code.format(**values) + _PEAK]
        done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
        found[name] = int(done.stdout.split()[-1]) / 1024
    return found


def weights(onnx: Path) -> float:
    """MiB of an ONNX file and of its external data."""
    return sum(file.stat().st_size for file in onnx.parent.glob(f"{onnx.name}*")) / 2**20


def difference(plan: str, onnx: str, feeds: list[np.ndarray[Any, Any]]) -> float:
    """Largest difference of an output from ONNX Runtime's, relative to its largest value."""
    import onnxruntime as ort

    session = load(plan, threads=1)
    arguments = build_results(session.plan.arguments, feeds) or ()
    keywords = build_results(session.plan.keywords, feeds) or {}
    result = session.run(*arguments, **keywords)
    found = list(result.values()) if isinstance(result, dict) else result
    found = list(found) if isinstance(found, tuple | list) else [found]
    peer = ort.InferenceSession(onnx, providers=["CPUExecutionProvider"])
    names = [node.name for node in peer.get_inputs()]
    wanted = peer.run(None, dict(zip(names, feeds, strict=True)))
    return max(
        float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))
        for a, b in zip(found, wanted, strict=False)
    )


def main() -> int:
    """Prints the table; exit status 1 if results differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("--onnx", type=Path, required=True, help="the same model for ONNX Runtime")
    parser.add_argument("--length", action="append", default=[], metavar="T=64")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    plan, onnx = str(options.plan.resolve()), str(options.onnx.resolve())
    manifest = read_plan(plan)
    feeds, _, _ = make_inputs(manifest, (), options.length, None)
    error = difference(plan, onnx, feeds)
    print(f"largest difference {error:.1e} of the largest value")
    if not error < 0.02:
        return 1
    with tempfile.TemporaryDirectory() as scratch:
        files = {}
        for tensor, feed in zip(manifest.inputs, feeds, strict=True):
            files[tensor.name] = f"{scratch}/{len(files)}.npy"
            np.save(files[tensor.name], feed)
        values = {"root": str(ROOT), "plan": plan, "onnx": onnx, "files": files, "runs": 1}
        command = [sys.executable, "-m", "graphc", "run", plan, "--threads", "1"]
        command += ["--iters", "0", "--warmup", "0"]
        for name, file in files.items():
            command += ["--input", f"{name}=@{file}"]
        commands = {
            name: [sys.executable, "-c", code.format(**values)] for name, code in _CODES.items()
        } | {"graphc run": command}
        # all with their modules compiled, as installed packages are
        environment = os.environ | {"PYTHONPYCACHEPREFIX": f"{scratch}/modules"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        figures: dict[str, list[float]] = {name: [] for name in commands}
        for words in commands.values():
            child(words, environment)
        for _ in range(options.rounds):
            for name, words in commands.items():
                figures[name].append(child(words, environment))
        resident = peaks(values, environment)
    rows = {name: median(found) for name, found in figures.items()}
    for name, row in rows.items():
        print(f"{name:<16}{row:9.1f} ms CPU {row / rows['onnxruntime']:6.2f} x")
    floor, stored = resident.pop("python + numpy"), weights(options.onnx)
    for name, row in resident.items():
        more = row - floor
        print(f"{name:<16}{more:9.1f} MiB above the floor {more - stored:9.1f} above the weights")
    if options.json is not None:
        report = {"cpu_ms": rows, "peak_mib": resident, "floor_mib": floor, "weights_mib": stored}
        options.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
