"""Long contexts with narrowed states beside plain ones: memory, prompts and decoding.

    python benchmarks/quantized_context.py --contexts 131072 --json narrow.json

builds `k31_mini` (226 M parameters, random weights, bf16) plain and with each --quant, and runs
each as benchmarks/long_context.py does, in a fresh process for each context. The table goes to
stdout in Markdown; --json keeps the figures and continues them. At one thread CPU time counts, else
wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.dense import hold, machine, versions  # noqa: E402
from benchmarks.long_context import BUCKETS, DECODES, apart, measure  # noqa: E402
from cli.race import cores  # noqa: E402

FORMS = ("index=mxfp8,kv=fp8",)
MIB = 1 << 20


def build(place: str, quant: str) -> None:
    """The plan, unless there is one."""
    from graphc import decoders
    from graphc.api import Options
    from graphc.models.hybrid import hybrid

    if not (Path(place) / "plan.json").is_file():
        options = Options(buckets=BUCKETS, quant=(quant,) if quant else ())
        decoders.build(hybrid("k31_mini"), Path(place), options, dtype="bfloat16", sequences=1)


def table(results: dict[str, Any]) -> str:
    """Markdown: a line a context and form."""
    clock = 1 if results["threads"] == 1 else 0
    lines = [
        "| context | states | peak above the weights | pages | prompt | decode |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    for context, forms in results["contexts"].items():
        for form, found in forms.items():
            prompt, each = found["prefill"][clock], found["decode"][clock]
            lines.append(
                f"| {int(context):,} | {form or 'bf16'} | {found['peak'] / MIB:.0f} MiB | "
                f"{found['pages'] / MIB:.1f} MiB | {prompt:.1f} s, {found['prompt'] / prompt:.0f} "
                f"tokens/s | {1 / each:.1f} tokens/s |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", type=int, nargs="*", default=[32768, 131072])
    parser.add_argument("--quant", nargs="*", default=list(FORMS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--plans", type=Path, help="plans are kept there and used again")
    parser.add_argument("--json", type=Path, help="results, written and continued")
    parser.add_argument("--lock", type=Path, help="file locked while timing: shared machines")
    options = parser.parse_args()
    results: dict[str, Any] = {"threads": options.threads, "contexts": {}}
    if options.json and options.json.exists():
        results = json.loads(options.json.read_text())
    results |= {"machine": machine(), "versions": versions(), "decodes": DECODES}
    with tempfile.TemporaryDirectory() as scratch:
        plans = options.plans or Path(scratch)
        forms = ["", *options.quant]
        for form in forms:
            apart(build, str(plans / (form or "plain")), form)
        os.sched_setaffinity(0, cores(options.threads))
        for context in options.contexts:
            for form in forms:
                with hold(options.lock):
                    found = apart(measure, str(plans / (form or "plain")), context, options.threads)
                results["contexts"].setdefault(str(context), {})[form] = found
                if options.json:
                    options.json.write_text(json.dumps(results, indent=1))
    print(table(results))


if __name__ == "__main__":
    main()
