"""Start-up and steady latency of an encoder against eager torch, torch.compile and ONNX Runtime.

    python benchmarks/encoder.py CHECKPOINT_FOLDER [--lengths 16,256] [--rounds 9] [--json FILE]

All at one thread, in one run, interleaved; medians of CPU time (user + system), which is what an
idle core would take even while other work shares the machine. Start-up is a fresh process from its
start to the first output, artefacts ready, imports included. Numerics are checked first.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

_GRAPHC = """
import sys; sys.path.insert(0, {root!r})
import numpy as np
from graphc.runtime.session import load
ids = np.load({ids!r}); mask = np.ones_like(ids)
out = load({plan!r}, threads=1).run(input_ids=ids, attention_mask=mask)
"""
_ORT = """
import numpy as np, onnxruntime as ort
ids = np.load({ids!r}); mask = np.ones_like(ids)
options = ort.SessionOptions()
options.intra_op_num_threads = options.inter_op_num_threads = 1
session = ort.InferenceSession({onnx!r}, options, providers=["CPUExecutionProvider"])
out = session.run(None, {{"input_ids": ids, "attention_mask": mask}})
"""


def child_cpu(code: str) -> float:
    """CPU seconds of a fresh Python process that runs `code`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)


def interleaved(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median CPU milliseconds of each call; one sample of each per round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            call()  # the caches hold this one's data, as they would in a service
            start = time.process_time()
            call()
            times[name].append(time.process_time() - start)
    return {name: 1e3 * median(values) for name, values in times.items()}


def export_onnx(module: Any, path: Path) -> None:
    """The same module as an ONNX file with a free length."""
    import torch

    ids = torch.randint(0, 1000, (1, 16))
    length = torch.export.Dim("T", min=2, max=512)
    torch.onnx.export(
        module, (ids, torch.ones_like(ids)), path, dynamo=True, opset_version=18,
        input_names=["input_ids", "attention_mask"], output_names=["hidden", "pooled"],
        dynamic_shapes=({1: length}, {1: length}), external_data=False,
    )  # fmt: skip


def main() -> int:
    """Prints the table; exit status 1 if results differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--lengths", default="16,256")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    import onnxruntime as ort
    import torch

    from graphc.api import build, reference
    from graphc.runtime.session import load

    torch.set_num_threads(1)
    results: dict[str, Any] = {"startup_cpu_ms": {}, "latency_cpu_ms": {}}
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        folder = Path(scratch)
        plan, onnx = folder / "plan", folder / "model.onnx"
        build(str(options.checkpoint), plan)
        module = reference(str(options.checkpoint))
        inner = _Plain(module)
        export_onnx(inner, onnx)
        session = load(plan, threads=1)
        setting = ort.SessionOptions()
        setting.intra_op_num_threads = setting.inter_op_num_threads = 1
        peer = ort.InferenceSession(str(onnx), setting, providers=["CPUExecutionProvider"])
        compiled = torch.compile(inner, dynamic=False)
        for length in map(int, options.lengths.split(",")):
            ids = np.random.default_rng(length).integers(0, 30000, (1, length))
            mask = np.ones_like(ids)
            tids, tmask = torch.from_numpy(ids), torch.from_numpy(mask)
            wanted = inner(tids, tmask)[0].numpy()
            outputs = session.run(input_ids=ids, attention_mask=mask, as_torch=False)
            leaves = list(outputs.values()) if isinstance(outputs, dict) else list(outputs)
            worst = float(np.abs(leaves[0] - wanted).max())
            if worst > 1e-4:
                print(f"T={length}: results differ by {worst}")
                return 1
            feeds = {"input_ids": ids, "attention_mask": mask}
            calls: dict[str, Callable[[], object]] = {
                "graphc": lambda feeds=feeds: session.run(**feeds),
                "onnxruntime": lambda feeds=feeds: peer.run(None, feeds),
                "eager": lambda a=tids, b=tmask: inner(a, b),
                "torch.compile": lambda a=tids, b=tmask: compiled(a, b),
            }
            latency = interleaved(calls, options.rounds)
            results["latency_cpu_ms"][length] = latency
            np.save(folder / f"{length}.npy", ids)
            names = {"root": str(ROOT), "plan": str(plan), "onnx": str(onnx)}
            codes = {
                name: code.format(ids=str(folder / f"{length}.npy"), **names)
                for name, code in (("graphc", _GRAPHC), ("onnxruntime", _ORT))
            }
            starts: dict[str, list[float]] = {name: [] for name in codes}
            for _ in range(options.rounds):
                for name, code in codes.items():
                    starts[name].append(child_cpu(code))
            startup = {name: 1e3 * median(values) for name, values in starts.items()}
            results["startup_cpu_ms"][length] = startup
            print(f"T={length}: largest difference from eager {worst:.1e}")
            for name, value in latency.items():
                print(f"  latency  {name:<14}{value:9.3f} ms  {value / latency['graphc']:6.2f} x")
            for name, value in startup.items():
                print(f"  startup  {name:<14}{value:9.1f} ms  {value / startup['graphc']:6.2f} x")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))
    return 0


def _Plain(module: Any) -> Any:
    """(input_ids, attention_mask) -> tuple, for peers that take positions and give tuples."""
    import torch

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
            result = self.module(input_ids=ids, attention_mask=mask)
            values = result.values() if isinstance(result, dict) else result
            return tuple(values)

    return Plain().eval()


if __name__ == "__main__":
    raise SystemExit(main())
