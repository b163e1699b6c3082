"""What a cache survives: random damages, and kills at any moment of a build.

    python benchmarks/cache_faults.py [--damages 1000] [--kills 200] [--kernels 20] [--seed 0]

Damages: the cache of a model of many little kernels is damaged in several places at once, then the
model is built. Whatever the damage, that build must give the same library and the same results bit
for bit, make again what was damaged and nothing else, with one warning each, and leave a cache in
which `graphc cache verify` finds nothing.

Kills: entries are damaged, and the build that makes them again is ended by `kill -9`, at a random
moment or at a random one of the places below, inside publishing for example. The build after it
must do all of the above; what the killed one had finished need not be made again.

Exit status 1 if anything else happens.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import cache_damage  # noqa: E402
from benchmarks.cache_damage import DAMAGES, ENTRY_DAMAGES, OTHER_DAMAGES, Target  # noqa: E402
from benchmarks.cache_model import Outcome, Place, Subject  # noqa: E402
from benchmarks.documents import aligned  # noqa: E402
from cache import entry, index, locks, manifest, quarantine, store  # noqa: E402
from graphc.store import KERNELS, LINKS, PCH  # noqa: E402

Damage = Callable[[Target], None]

#: where a build may be killed: an object, the name of a function in it
PLACES: tuple[tuple[object, str], ...] = (
    (entry, "_copy_synced"), (entry, "write_synced"),
    (entry, "own_folder"), (entry, "_into_place"), (entry, "remove_at"), (entry.Payload, "copy"),
    (manifest, "encode"), (quarantine, "move"), (quarantine, "trim"),
    (locks, "acquire"), (locks.Lock, "release"), (index.Index, "put"), (index.Index, "used"),
    (index.Index, "_open"), (store.Store, "_make"), (store.Store, "_publish"),
)  # fmt: skip


class Campaign:
    """A cache under damage, and what was seen."""

    def __init__(self, subject: Subject, folder: Path, rng: random.Random) -> None:
        self.subject, self.rng = subject, rng
        self.root = folder / "beside" / "cache"
        self.root.parent.mkdir()
        self.problems: list[str] = []
        self.damages: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.kills: Counter[str] = Counter()
        self.made = self.warnings = 0
        first = subject.build(self.root)
        again = subject.build(self.root)
        if wrong := subject.differences(first):
            raise SystemExit(wrong[0])
        self.reference, self.seconds = first, first.seconds
        self.places = list(first.origins)
        self.judge("the first build", again, set())

    def damage(self, count: int, kinds: tuple[Damage, ...] = DAMAGES) -> tuple[int, set[Place]]:
        """Does about `count` random damages; how many they were, and which entries they cost."""
        free = [place for place in self.places if place[0] == KERNELS]
        if self.rng.random() < 0.2:
            free += [place for place in self.places if place[0] == LINKS]
        if self.rng.random() < 0.04:
            free += [place for place in self.places if place[0] == PCH]
        target = Target(self.root, self.rng, free)
        done = 0
        for _ in range(count):
            kind = self._kind(kinds if len(target.free) > 2 else OTHER_DAMAGES)
            before = len(target.lost)
            try:
                kind(target)
            except (sqlite3.Error, FileNotFoundError):
                if kind in ENTRY_DAMAGES:
                    raise
                continue  # the index is damaged already
            self.damages[kind.__name__] += 1
            self.lost[kind.__name__] += len(target.lost) - before
            done += 1
        if any(bucket == PCH for bucket, _ in target.lost) and not any(
            bucket == KERNELS for bucket, _ in target.lost
        ):
            cache_damage.empty(target)  # the header is looked at when something is compiled
            self.damages["empty"] += 1
            self.lost["empty"] += 1
        return done, target.lost

    def _kind(self, kinds: tuple[Damage, ...]) -> Damage:
        """Each kind once, before any comes again; then mostly those that cost entries."""
        new = [kind for kind in kinds if not self.damages[kind.__name__]]
        entries = [kind for kind in kinds if kind in ENTRY_DAMAGES]
        likely = entries if entries and self.rng.random() < 0.5 else kinds
        return self.rng.choice(new or likely)

    def judge(self, what: str, outcome: Outcome, lost: set[Place], *, killed: bool = False) -> None:
        """Notes whatever a build did that it should not have."""

        def wrong(text: str) -> None:
            self.problems.append(f"{what}: {text}")

        if outcome.status:
            wrong(f"ended with {outcome.status}: {outcome.error[-2000:]}")
            return
        if outcome.output != self.reference.output:
            wrong("other results")
        if outcome.library != self.reference.library:
            wrong("another library")
        made = {place for place, origin in outcome.origins.items() if origin != "hit"}
        private = [place for place, origin in outcome.origins.items() if origin == "private"]
        if made - lost:
            wrong(f"made without need: {sorted(made - lost)}")
        if not killed and lost - made:
            wrong(f"not made again: {sorted(lost - made)}")
        if private:
            wrong(f"not kept: {private}")
        groups: Counter[tuple[str, str]] = Counter()
        for bucket, digest in lost:
            said = sum(f"{bucket}/{digest[:12]} is made again" in n for n in outcome.notes)
            groups[bucket, digest[:2]] += said
            if said > 1:
                wrong(f"{said} warnings of {bucket}/{digest}: {outcome.notes}")
        # where the folder around entries is damaged, one warning is for all of them
        if not killed and 0 in groups.values():
            wrong(f"no warnings of {[g for g, n in groups.items() if not n]}: {outcome.notes}")
        self.warnings += sum(groups.values())
        self.made += len(made)
        for finding in store.Store(self.root).check():
            wrong(f"left damaged: {finding.what}")
        for text in cache_damage.violations(self.root):
            wrong(text)
        held = len(quarantine.cells(self.root))
        if held > quarantine.KEPT:
            wrong(f"{held} things in quarantine")

    def damage_round(self, count: int) -> int:
        """Damages, builds and judges; gives the number of damages."""
        done, lost = self.damage(count)
        self.judge(f"after {done} damages", self.subject.build(self.root), lost)
        return done

    def kill_round(self) -> None:
        """Damages, kills the build, builds and judges."""
        _, lost = self.damage(self.rng.randint(1, 3), ENTRY_DAMAGES)
        before, where = None, "at a random moment"
        if self.rng.random() < 0.5:
            before, where = self._trap()
        build = self.subject.start(self.root, before)
        if before is None:
            time.sleep(self.rng.random() * self.seconds / 3)
            build.kill()
        status = build.outcome().status
        if status == 0 and before is None:
            where = "too late"
        elif status == 0:
            where = "the place was not reached"
        elif status != -signal.SIGKILL:
            self.problems.append(f"killed {where}: ended with {status}")
        self.kills[where] += 1
        self.judge(f"killed {where}", self.subject.build(self.root), lost, killed=True)

    def _trap(self) -> tuple[Callable[[], None], str]:
        owner, name = self.rng.choice(PLACES)
        after, times = self.rng.random() < 0.5, self.rng.choice((1, 1, 1, 2, 3))

        def set_trap() -> None:
            original, left = getattr(owner, name), times

            def trapped(*arguments: object, **options: object) -> object:
                nonlocal left
                left -= 1
                if left == 0 and not after:
                    os.kill(os.getpid(), signal.SIGKILL)
                result = original(*arguments, **options)
                if left <= 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            setattr(owner, name, trapped)

        place = f"{getattr(owner, '__module__', '') or getattr(owner, '__name__', '')}"
        return set_trap, f"{'after' if after else 'before'} {place.removeprefix('cache.')}.{name}"

    def table(self) -> Iterator[str]:
        """What was done and seen."""
        rows = [
            (kind.__name__, str(self.damages[kind.__name__]), str(self.lost[kind.__name__]))
            for kind in DAMAGES
        ]
        total = (str(sum(self.damages.values())), str(sum(self.lost.values())))
        yield from aligned(("damage", "times", "entries lost"), [*rows, ("all", *total)])
        yield ""
        yield from aligned(
            ("killed", "times"), [(where, str(n)) for where, n in sorted(self.kills.items())]
        )
        killed = sum(n for where, n in self.kills.items() if not _missed(where))
        yield ""
        yield f"{killed} builds killed, {self.made} entries made again, {self.warnings} warnings"
        yield f"{len(self.problems)} violations"
        yield from self.problems[:20]


def _missed(where: str) -> bool:
    return where in ("too late", "the place was not reached")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--damages", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--kernels", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="graphc-faults-") as folder:
        subject = Subject(options.kernels, Path(folder))
        rng = random.Random(options.seed)
        campaign = Campaign(subject, Path(folder), rng)
        print(f"{len(campaign.places)} entries, seed {options.seed}", flush=True)
        done = 0
        while done < options.damages:
            done += campaign.damage_round(rng.randint(2, 8))
            _tell(done, options.damages, "damages", campaign, started)
        killed = 0
        while killed < options.kills:
            campaign.kill_round()
            killed = sum(n for where, n in campaign.kills.items() if not _missed(where))
            _tell(killed, options.kills, "kills", campaign, started)
    print("\n".join(campaign.table()))
    print(f"{time.perf_counter() - started:.0f} s")
    raise SystemExit(1 if campaign.problems else 0)


def _tell(done: int, of: int, what: str, campaign: Campaign, started: float) -> None:
    seconds, problems = time.perf_counter() - started, len(campaign.problems)
    print(f"{done} of {of} {what}, {problems} violations, {seconds:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
