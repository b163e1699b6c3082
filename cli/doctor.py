"""`graphc doctor`: can this machine and this installation build and run plans?"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import msgspec

from cache.folder import default_root
from cache.store import Store
from cli.progress import progress
from cli.render import print_json, print_table, size
from graphc.errors import CompileError, GraphcError
from graphc.runtime.calibration import Peaks, Rates, measured
from graphc.toolchain.compiler import Compiler, NoCompilerError
from graphc.toolchain.isa import Isa

PACKAGES = ("graphc", "passes", "cache", "cli")
#: what a build needs, and what only makes it convenient
VERSIONS = ("torch", "numpy", "sympy", "onnx", "msgspec", "diskcache", "safetensors")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True)
class Finding:
    """One line of the report. state: "ok", "note" (works, could be better) or "bad"."""

    subject: str
    state: str
    text: str
    hint: str = ""


@click.command()
@click.option("--calibrate", is_flag=True, help="Measure the machine's peak rates (seconds).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor(ctx: click.Context, calibrate: bool, as_json: bool) -> None:
    """Check this machine and this installation; exit 1 if something is wrong.

    --calibrate measures instead what a core and all cores do at best: arithmetic in GFLOP/s, and
    reading, writing and copying in GB/s at each level of memory. The best of all calibrations is
    kept for this CPU in the cache folder; `graphc inspect --roofline` and `graphc run --profile`
    compare with it.
    """
    if calibrate:
        load = os.getloadavg()[0]
        peaks = measure(quiet=as_json)
        if as_json:
            print_json({"peaks": msgspec.to_builtins(peaks), "load": load})
        else:
            print_peaks(peaks, load)
        return
    findings = [finding for examine in EXAMINATIONS for finding in examine()]
    bad = any(finding.state == "bad" for finding in findings)
    if as_json:
        print_json({"ok": not bad, "findings": [asdict(finding) for finding in findings]})
    else:
        rows = [(f.state, f.subject, f.text + (f"; {f.hint}" if f.hint else "")) for f in findings]
        print_table(("", "what", "found"), rows)
    if bad:
        ctx.exit(1)


def measure(quiet: bool = False) -> Peaks:
    """Measures the machine's peaks and keeps them, with progress on a terminal."""
    from graphc import api

    with progress(quiet) as show:
        return api.calibrate(show)


def print_peaks(peaks: Peaks, load: float = 0.0) -> None:
    """The figures of one thread beside those of all."""
    click.echo(f"{peaks.cpu}, {peaks.key['architecture']}, {peaks.key['cpus']} CPUs")
    sides = [peaks.one] if peaks.all.threads == 1 else [peaks.one, peaks.all]
    headings = [f"{s.threads} thread{'s' if s.threads > 1 else ''}" for s in sides]
    rows = [
        [name, *(number(getattr(side, kind)) for side in sides), "GFLOP/s", text]
        for name, kind, text in (
            ("fp32", "fp32", "multiply-add, two operations each"),
            ("bf16", "bf16", "dot products with fp32 sums"),
            ("int8", "int8", "dot products with int32 sums"),
        )
    ]
    for index, level in enumerate(peaks.one.levels):
        text = f"{size(level.working_set)} a thread"
        text = f"{size(level.capacity)}, " * bool(level.capacity) + text
        for what in ("read", "write", "copy"):
            figures = [number(getattr(side.levels[index], what)) for side in sides]
            rows.append([f"{level.name} {what}", *figures, "GB/s", text])
            text = "bytes read and bytes written" if what == "write" else ""
    print_table(["peak", *headings, "", ""], rows, "l" + "r" * len(sides) + "ll")
    if load > 0.3:
        click.echo(f"note: the load was {load:.1f} before: the figures of all threads may be low")


def number(value: float) -> str:
    """Three digits; "-" for what the CPU has no instruction for."""
    return f"{value:.3g}" if 0 < value < 100 else f"{value:.0f}" if value else "-"


def packages() -> list[Finding]:
    """graphc's four packages have common names: another project's may stand in their place."""
    home = Path(__file__).resolve().parents[1]
    found = []
    for name in PACKAGES:
        module = importlib.import_module(name)
        places = [Path(place).resolve() for place in module.__path__]
        if places and places[0] == home / name:
            continue
        hint = f"another package of that name hides it; remove it, or start with {home} first"
        found.append(Finding(f"package {name}", "bad", f"from {places[0]}", hint))
    return found or [Finding("packages", "ok", f"{', '.join(PACKAGES)} from {home}")]


def versions() -> list[Finding]:
    """Python and the packages a build needs."""
    found = [Finding("python", "ok", f"{platform.python_version()} {sys.executable}")]
    for name in VERSIONS:
        try:
            found.append(Finding(name, "ok", importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            found.append(Finding(name, "bad", "not installed", f"pip install {name}"))
    return found


def compiler() -> list[Finding]:
    """The C++ compiler a build will use; running a plan needs none."""
    try:
        used = Compiler.discover()
    except NoCompilerError as error:
        made = [identity for identity, _ in _makers()]
        if not made:
            return [Finding("compiler", "bad", error.what, error.hint)]
        hint = f"builds need all their kernels in the cache; its are of {', '.join(made)}"
        return [Finding("compiler", "note", error.what, hint)]
    except CompileError as error:
        return [Finding("compiler", "bad", error.what, error.hint)]
    return [Finding("compiler", "ok", f"{used.identity}, {used.target}: {' '.join(used.command)}")]


def _makers() -> list[tuple[str, str]]:
    try:
        return Store().makers()
    except GraphcError:  # `kernel_cache` reports it
        return []


def instructions() -> list[Finding]:
    """The instruction set kernels are built for."""
    try:
        isa = Isa.detect()
    except GraphcError as error:
        return [Finding("instruction set", "bad", error.what, error.hint)]
    text = f"{isa.level} on {isa.architecture}: {' '.join(isa.features) or 'baseline only'}"
    if isa.level == "portable" and isa.architecture == "x86_64":
        hint = "kernels are several times faster with AVX2 or AVX-512"
        return [Finding("instruction set", "note", text, hint)]
    return [Finding("instruction set", "ok", text)]


def kernel_cache() -> list[Finding]:
    """The cache's folder and its state (`graphc cache verify` verifies every entry)."""
    try:
        store = Store()
    except GraphcError as error:
        return [Finding("cache", "bad", error.what, error.hint)]
    found = [Finding("cache", "note", note) for note in store.drain_notes()]
    if not store.writable:
        hint = "kernels are compiled on every start; set GRAPHC_CACHE_DIR"
        return [
            *found,
            Finding("cache", "note", f"{store.root} cannot be written: {store.obstacle}", hint),
        ]
    status = os.statvfs(store.root)
    free = status.f_bavail * status.f_frsize
    text = f"{store.root}, limit {size(store.limit)}, {size(free)} free on its disk"
    if free < 500 * 1000**2:
        return [*found, Finding("cache", "note", text, "little space: builds may fail")]
    return [*found, Finding("cache", "ok", text)]


def shared_cache() -> list[Finding]:
    """The shared tier of the cache, where one is named: whether it answers, and who is trusted."""
    if not os.environ.get("GRAPHC_REMOTE_CACHE"):
        return []
    from cache.remote import Remote
    from cache.remote_files import TierFailed

    try:
        return [Finding("shared cache", "ok", Remote().state())]
    except TierFailed as reason:
        return [Finding("shared cache", "note", str(reason), "builds go on without it")]


def processor() -> list[Finding]:
    """CPUs this process may use, and large pages for the arena."""
    usable, all_cpus = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    found = [Finding("threads", "ok", f"{usable} of {all_cpus} CPUs usable")]
    try:
        pages = _HUGE_PAGES.read_text(encoding="ascii")
    except OSError:
        return [*found, Finding("huge pages", "note", "not available")]
    chosen = pages.partition("[")[2].partition("]")[0]
    if chosen == "never":
        return [*found, Finding("huge pages", "note", "never", "large models start slower")]
    return [*found, Finding("huge pages", "ok", chosen)]


def peak_rates() -> list[Finding]:
    """What `--calibrate` found, if it ran."""
    peaks = measured(default_root())
    if peaks is None:
        hint = "graphc doctor --calibrate"
        return [Finding("peak rates", "note", "not measured yet: no rooflines", hint)]
    return [Finding("peak rates", "ok", f"{_line(peaks.one)} with one thread")]


def _line(rates: Rates) -> str:
    formats = [f"{kind} {number(value)}" for kind in ("fp32", "bf16", "int8")
               if (value := getattr(rates, kind))]  # fmt: skip
    return f"{', '.join(formats)} GFLOP/s, memory {number(rates.levels[-1].read)} GB/s"


EXAMINATIONS: tuple[Callable[[], list[Finding]], ...] = (
    packages,
    versions,
    compiler,
    instructions,
    kernel_cache,
    shared_cache,
    processor,
    peak_rates,
)
