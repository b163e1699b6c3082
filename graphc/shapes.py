"""The model of shapes.yaml: symbols with ranges, buckets, what to build for which model, and what
may be narrowed.

A `Symbol` is a length known only at run time; a bucket gives upper limits for some symbols. The
captured graph has the last word on a range: shapes.yaml may narrow it, never widen it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from graphc.errors import UsageError
from graphc.precision import DEFAULT, Precision
from graphc.shapes_reader import Reader, read_document

#: a captured upper bound at or above this is no bound: torch.export has several ways to say so
UNBOUNDED = 10**8

DEFAULT_FILE = "shapes.yaml"


@dataclass(frozen=True)
class SymbolRange:
    """Bounds of a symbol, both inclusive, and the length taken when none is given."""

    name: str
    minimum: int
    maximum: int
    default: int


@dataclass(frozen=True)
class Bucket:
    """A named set of upper limits, one for each symbol of the graph."""

    name: str
    limits: dict[str, int]


@dataclass(frozen=True)
class Phase:
    """One way a model is called: which buckets, and tighter ranges for some symbols."""

    name: str
    buckets: tuple[str, ...]
    symbols: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])


@dataclass(frozen=True)
class ModelShapes:
    """The phases of the models whose name matches a shell pattern."""

    match: str
    phases: Mapping[str, Phase]


@dataclass(frozen=True)
class Shapes:
    """A whole shapes.yaml. `buckets` maps a bucket's name to its limits by symbol name; `precision`
    says what may be narrowed."""

    path: Path
    symbols: Mapping[str, SymbolRange]
    buckets: Mapping[str, Mapping[str, int]]
    models: tuple[ModelShapes, ...]
    default_phase: str
    default_buckets: tuple[str, ...]
    default_max: int
    default_length: int
    precision: Precision = DEFAULT

    @staticmethod
    def load(path: Path | str | None = None) -> Shapes:
        """Reads `path`, else ./shapes.yaml, else the file inside the package.

        Raises:
            UsageError: the file is missing or malformed; `what` begins with file:line:column.
        """
        return _read(find_file(path))

    def phases_of(self, model: str) -> dict[str, Phase]:
        """The phases built for `model`; the default phase if no pattern matches its name."""
        names = {model, Path(model.split("::")[0]).name, model.rpartition(":")[2]}
        for entry in self.models:
            if any(fnmatchcase(name, entry.match) for name in names):
                return dict(entry.phases)
        return {self.default_phase: Phase(self.default_phase, self.default_buckets)}

    def default_phase_of(self, model: str) -> str:
        """The phase that is built when none is asked for: the first one listed."""
        return next(iter(self.phases_of(model)))

    def default_of(self, symbol: str, minimum: int, maximum: int) -> int:
        """The length `graphc run` takes for a symbol that was not given, inside [min, max]."""
        known = self.symbols.get(symbol)
        length = known.default if known else self.default_length
        return max(minimum, min(length, maximum))

    def buckets_for(
        self,
        model: str,
        phase: str | None,
        symbols: Mapping[str, tuple[int, int]],
        only: Sequence[str] = (),
    ) -> list[Bucket]:
        """The buckets to plan, smallest first, each with a limit for every symbol of the graph.

        Args:
            model: name of the model, matched against the patterns of `models`.
            phase: "prefill", "decode", ...; None for the model's first one.
            symbols: captured range (minimum, maximum) of each symbol of the graph.
            only: names given with --bucket instead of the phase's own; a plain number or
                "T=4096" is a bucket of its own.

        A symbol that a bucket does not name takes its own captured range. Buckets that differ in
        nothing after the captured ranges are applied are one bucket, the smallest; so a graph
        without symbols has exactly one.

        Raises:
            UsageError: unknown phase or bucket, or no bucket holds the captured minimum.
        """
        phases = self.phases_of(model)
        chosen = phases.get(phase or next(iter(phases)))
        if chosen is None:
            raise UsageError(
                f"expected a phase of {model}, found {phase!r}",
                where=str(self.path),
                hint=f"it has: {', '.join(phases)}",
            )
        wanted = [self._limits(name, symbols) for name in (only or chosen.buckets)]
        buckets: list[Bucket] = []
        for name, limits in wanted:
            made = {s: self._limit(s, r, limits, chosen) for s, r in symbols.items()}
            if any(made[s] < low for s, (low, _) in symbols.items()):
                continue
            buckets.append(Bucket(name, made))
        if not buckets:
            ranges = ", ".join(f"{s} in [{low}, {high}]" for s, (low, high) in symbols.items())
            raise UsageError(
                f"expected a bucket that holds {ranges}, found none",
                where=str(self.path),
                hint="give a larger one with --bucket",
            )
        buckets.sort(key=lambda b: tuple(b.limits[s] for s in sorted(b.limits)))
        return _distinct(buckets)

    def _limits(
        self, name: str, symbols: Mapping[str, tuple[int, int]]
    ) -> tuple[str, Mapping[str, int]]:
        """A bucket by its name, or one made up from "4096" or "T=4096,P=512"."""
        if name in self.buckets:
            return name, self.buckets[name]
        number = name.replace("_", "")
        if number.isdecimal():
            bounded = {s for limits in self.buckets.values() for s in limits}
            return name, {s: int(number) for s in bounded}
        if "=" in name:
            pairs = [item.partition("=") for item in name.split(",")]
            if all(s in symbols and value.isdecimal() for s, _, value in pairs):
                return name, {s: int(value) for s, _, value in pairs}
            raise UsageError(
                f"expected a limit by symbol, found {name!r}",
                hint=f"the graph has the symbols: {', '.join(symbols) or 'none'}",
            )
        raise UsageError(
            f"expected a bucket of {self.path.name}, found {name!r}",
            where=str(self.path),
            hint=f"it has: {', '.join(self.buckets)}; a number or T=4096 makes a new one",
        )

    def _limit(
        self, symbol: str, captured: tuple[int, int], limits: Mapping[str, int], phase: Phase
    ) -> int:
        bounds = [captured[1]] if captured[1] < UNBOUNDED else []
        if symbol in limits:
            bounds.append(limits[symbol])
        if symbol in phase.symbols:
            bounds.append(phase.symbols[symbol][1])
        if bounds:
            return min(bounds)
        known = self.symbols.get(symbol)
        return max(captured[0], known.maximum if known else self.default_max)


def find_file(path: Path | str | None) -> Path:
    """The shapes file that is used: `path`, else ./shapes.yaml, else the packaged one."""
    if path is not None:
        return Path(path)
    local = Path(DEFAULT_FILE)
    return local if local.is_file() else Path(__file__).with_name(DEFAULT_FILE)


def _distinct(buckets: Iterable[Bucket]) -> list[Bucket]:
    result: list[Bucket] = []
    for bucket in buckets:
        if all(bucket.limits != other.limits for other in result):
            result.append(bucket)
    return result


def _read(path: Path) -> Shapes:
    top = read_document(path)
    top.only("version", "symbols", "buckets", "defaults", "models", "precision")
    version = top.need("version")
    if version.integer("1, the version of this format") != 1:
        raise version.error("1, the version of this format")
    symbols = {name: _symbol(name, item) for name, item in top.items("symbols")}
    buckets = {
        name: {symbol: limit.integer("an upper limit", 1) for symbol, limit in item.items()}
        for name, item in top.items("buckets")
    }
    defaults = top.need("defaults")
    defaults.only("phase", "buckets", "max", "default")
    models: list[ModelShapes] = []
    for entry in top.sequence("models"):
        entry.only("match", "phases")
        phases = {name: _phase(name, item, buckets) for name, item in entry.items("phases")}
        if not phases:
            raise entry.need("phases").error("at least one phase")
        models.append(ModelShapes(entry.need("match").text("a shell pattern"), phases))
    precision = top.get("precision")
    return Shapes(
        path=path,
        symbols=symbols,
        buckets=buckets,
        models=tuple(models),
        default_phase=defaults.need("phase").text("the name of a phase"),
        default_buckets=_bucket_names(defaults, buckets),
        default_max=defaults.need("max").integer("an upper limit", 1),
        default_length=defaults.need("default").integer("a length", 1),
        precision=DEFAULT if precision is None else Precision.read(precision).over(DEFAULT),
    )


def _symbol(name: str, item: Reader) -> SymbolRange:
    item.only("min", "max", "default")
    low = item.need("min").integer("a minimum", 0)
    high = item.need("max").integer(f"a maximum of at least {low}", low)
    given = item.get("default")
    default = low if given is None else given.integer(f"a length in [{low}, {high}]", low, high)
    return SymbolRange(name, low, high, default)


def _phase(name: str, item: Reader, buckets: Mapping[str, Mapping[str, int]]) -> Phase:
    item.only("buckets", "symbols")
    ranges: dict[str, tuple[int, int]] = {}
    for symbol, bounds in item.items("symbols"):
        bounds.only("min", "max")
        low = bounds.need("min").integer("a minimum", 0)
        ranges[symbol] = (low, bounds.need("max").integer(f"a maximum of at least {low}", low))
    return Phase(name, _bucket_names(item, buckets), ranges)


def _bucket_names(item: Reader, buckets: Mapping[str, object]) -> tuple[str, ...]:
    known = ", ".join(buckets)
    names: list[str] = []
    for entry in item.sequence("buckets", required=True):
        name = entry.text("the name of a bucket")
        if name not in buckets:
            raise entry.error(f"one of the buckets {known}")
        names.append(name)
    if not names:
        raise item.need("buckets").error(f"at least one of the buckets {known}")
    return tuple(names)
