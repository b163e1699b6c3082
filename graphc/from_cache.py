"""What a build takes out of the cache before it captures anything: the finished plan of an earlier
build of the same, or its captured graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from graphc.options import Options
from graphc.report import BuildReport

if TYPE_CHECKING:
    import torch

    from cache.store import Store
    from graphc.frontends.capture import Captured
    from graphc.warm.builds import Warm
    from graphc.warm.captures import Kept

#: bytes of weights that are kept with captured graphs, those that no checkpoint holds
MOST_COPIED = 512 << 20


def build_or_take(
    model: str | torch.nn.Module, output: Path, options: Options, store: Store,
    decides: Mapping[str, object], build: Callable[[Warm | None], BuildReport],
) -> BuildReport:  # fmt: skip
    """What `build` gives, which is told what the cache has of the model (None for a module, and
    where all is to be fresh); without it, where an earlier build of just this made the plan, which
    then stands in `output`."""
    if not isinstance(model, str) or options.fresh:
        return build(None)
    from graphc.warm.builds import Warm
    from graphc.warm.identity import FileDigests

    memory = store.root / "digests-v1.json" if store.writable else None
    warm = Warm(model, store, FileDigests(memory), min(store.limit // 4, MOST_COPIED))
    # asked to work, not only for the plan
    worked = options.verify or options.dump_passes or options.tune or options.lookups_only
    found = None if worked or store.fills_shared else warm.plan(output, decides)
    if found is not None:
        return replace(found, notes=[*found.notes, *store.drain_notes()])
    report = build(warm)
    warm.keep_plan(output, decides, report.compile.compiler)
    return report


def captured_graphs(
    warm: Warm | None, front: Mapping[str, object],
    capture: Callable[[], tuple[Sequence[Captured], Any]],
) -> Kept:  # fmt: skip
    """The captures that `capture` gives, and what it tells of them (plain JSON), out of the cache
    where an earlier build with the same options of the frontend, `front`, left them there."""
    from graphc.warm.captures import Kept

    if warm is None:
        captures, extra = capture()
        return Kept(tuple(captures), extra)
    from graphc.frontends.capture import noted
    from graphc.lowering.classify import native_operators

    key = {**front, "kept whole": sorted(native_operators())}
    kept = warm.captures(key)
    if kept is not None:
        return kept
    start = time.perf_counter()
    with warm.observing():
        captures, extra = capture()
    warm.keep_captures(key, captures, extra, time.perf_counter() - start)
    first, *rest = captures
    if warm.reason:
        first = noted(first, f"captured anew each time: {warm.reason}")
    return Kept((first, *rest), extra)
