"""What a build takes out of the cache before it captures anything: the finished plan of an earlier
build of the same, or its captured graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from msgspec.structs import replace

from graphc.options import Options
from graphc.report import BuildReport

if TYPE_CHECKING:
    import torch

    from cache.store import Store
    from graphc.frontends.capture import Captured
    from graphc.warm.builds import Warm

#: a model captured: for most lengths, for others, the kind of source, the name
Captures: TypeAlias = "tuple[Captured, list[Captured], str, str]"
AFRESH = "captured anew each time: {}"
#: bytes of weights that are kept with captured graphs, those that no checkpoint holds
MOST_COPIED = 512 << 20


def warm_build(
    model: str | torch.nn.Module, output: Path, options: Options, store: Store,
    decides: Mapping[str, object],
) -> tuple[Warm | None, BuildReport | None]:  # fmt: skip
    """What the cache has of a model, and the report of its plan if an earlier build of just this
    made one, which then stands in `output`. None for a module, and where all is to be fresh."""
    if not isinstance(model, str) or options.fresh:
        return None, None
    from graphc.warm.builds import Warm
    from graphc.warm.identity import FileDigests

    memory = store.root / "digests-v1.json" if store.writable else None
    warm = Warm(model, store, FileDigests(memory), min(store.limit // 4, MOST_COPIED))
    worked = options.verify or options.dump_passes or options.tune or options.lookups_only
    if worked or store.fills_shared:
        return warm, None  # asked to work, not only for the plan
    report = warm.plan(output, decides)
    if report is not None and (notes := store.drain_notes()):
        report = replace(report, notes=[*report.notes, *notes])
    return warm, report


def captured_graphs(
    warm: Warm | None, capture: Callable[[], Captures], front: Mapping[str, object]
) -> Captures:
    """What `capture` gives, out of the cache where an earlier build with the same options of the
    frontend left it."""
    if warm is None:
        return capture()
    from graphc.frontends.capture import noted
    from graphc.lowering.classify import native_operators

    key = {**front, "kept whole": sorted(native_operators())}
    kept = warm.captures(key)
    if kept is not None:
        return kept.captures[0], list(kept.captures[1:]), *kept.extra
    start = time.perf_counter()
    with warm.observing():
        captured, variants, kind, name = capture()
    seconds = time.perf_counter() - start
    warm.keep_captures(key, (captured, *variants), (kind, name), seconds)
    if warm.reason:
        captured = noted(captured, AFRESH.format(warm.reason))
    return captured, variants, kind, name
