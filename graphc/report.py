"""What a build did, as data: the text, the JSON and the charts of the commands are views of it.

Written to `report.json` of a plan. Fields are only added, never renamed; `BuildReport.format`
counts the changes that a reader must know of.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from graphc.errors import DamagedError

FORMAT = 1


class Match(msgspec.Struct, frozen=True):
    """A place where a rule applied: the rule, the graph node, the user's source line, the bytes
    of the node's results, and what else there is to say of it."""

    rule: str
    node: str
    where: str = ""
    nbytes: int = 0
    detail: str = ""


class Refusal(msgspec.Struct, frozen=True):
    """A place where a rule's pattern fitted and its check said no, and why."""

    rule: str
    node: str
    reason: str
    where: str = ""


class PassRecord(msgspec.Struct, frozen=True):
    """One pass on one phase. `kind` is the sort of pass it is (folder of passes/).
    `launches_removed` counts operators that no longer run on their own; `bytes_removed` is what
    they no longer write, `reads_removed` what they no longer read of each other's results, both at
    the largest bucket; `weight_bytes_removed` is what the weights take less (negative: more).
    max_abs/max_rel are the largest differences of any output against the graph before the pass
    (max_rel relative to the output's largest value); None when not verified."""

    name: str
    phase: str
    seconds: float
    nodes_before: int
    nodes_after: int
    options: dict[str, object] = {}
    matches: list[Match] = []
    refusals: list[Refusal] = []
    launches_removed: int = 0
    bytes_removed: int = 0
    weight_bytes_removed: int = 0
    reads_removed: int = 0
    kind: str = ""
    max_abs: float | None = None
    max_rel: float | None = None


class KernelRecord(msgspec.Struct, frozen=True):
    """One kernel symbol. `steps` counts its uses over all programs; `source` is the file under
    sources/; `cached` says that its object came from the cache."""

    symbol: str
    source: str
    steps: int
    cached: bool
    label: str = ""
    nodes: list[str] = []
    where: list[str] = []
    seconds: float = 0.0


class FallbackRecord(msgspec.Struct, frozen=True):
    """An operator that runs through torch because nothing native takes it."""

    target: str
    node: str
    reason: str
    where: str = ""
    phase: str = ""


class Interval(msgspec.Struct, frozen=True):
    """A buffer in the arena: live from Step `first` to Step `last`, both inclusive, at bytes
    [offset, offset + nbytes) when every symbol is at the bucket's limit."""

    name: str
    first: int
    last: int
    offset: int
    nbytes: int


class MemoryRecord(msgspec.Struct, frozen=True):
    """The arena of one phase and bucket, in bytes. `lower_bound` is the largest sum of buffers
    alive at one Step; `naive_bytes` the sum of all buffers."""

    phase: str
    bucket: str
    arena_bytes: int
    lower_bound: int
    naive_bytes: int
    steps: int
    intervals: list[Interval] = []


class BucketRecord(msgspec.Struct, frozen=True):
    """One program of the plan: its limits by symbol and what it consists of."""

    phase: str
    name: str
    limits: dict[str, int]
    steps: int
    kernels: int
    fallbacks: int


class LayerRecord(msgspec.Struct, frozen=True):
    """What became of one kind of part of the model (class of its modules) in one program, at the
    program's `limits`.

    modules: how many there are. captured: operators of graphc that stood in the model from the
    start, by the hooks of its family; operators: those that Steps are of. launches, bytes and
    largest are of the model as it is written in torch (`_before`) and of the plan (`_after`):
    operators that compute and Steps; bytes read and written of what the run itself makes; and the
    largest tensor of that, in bytes and as text.
    """

    kind: str
    phase: str
    bucket: str
    modules: int
    launches_before: int
    launches_after: int
    bytes_before: int
    bytes_after: int
    largest_before: int
    largest_after: int
    tensor_before: str = ""
    tensor_after: str = ""
    captured: dict[str, int] = {}
    operators: dict[str, int] = {}
    limits: dict[str, int] = {}


class SymbolRecord(msgspec.Struct, frozen=True):
    """A length known only at run time, with its captured range."""

    name: str
    minimum: int
    maximum: int


class CompileRecord(msgspec.Struct, frozen=True):
    """Translation units: all that the plan needs, those found in the cache, those compiled.
    `keys` are the cache's entries that the plan is made of, "bucket/digest"; `remote_hits` those of
    the hits that came from the shared tier."""

    units: int
    hits: int
    compiled: int
    seconds: float
    compiler: str = ""
    isa: str = ""
    keys: list[str] = []
    remote_hits: int = 0


class TuningRecord(msgspec.Struct, frozen=True):
    """A choice between tile sizes or kernels that `--tune` decided: its name, the sizes it was
    measured for, default and winner, and seconds by candidate. `cached`: measured by an earlier
    build."""

    choice: str
    sizes: str
    default: str
    winner: str
    seconds: dict[str, float] = {}
    cached: bool = False


class StageRecord(msgspec.Struct, frozen=True):
    """Wall-clock seconds of one stage of the build: capture, passes, lowering, compile, write."""

    name: str
    seconds: float


class TargetRecord(msgspec.Struct, frozen=True):
    """What one target of a plan took: translation units, those out of the cache (remote_hits: out
    of the shared tier) and those compiled, wall-clock seconds of the compiles. weights_bytes: what
    it reads of weights.bin; own_weights_bytes: the part of it that no other target reads."""

    name: str
    isa: str
    features: list[str]
    units: int
    hits: int
    compiled: int
    seconds: float
    weights_bytes: int
    own_weights_bytes: int
    remote_hits: int = 0


class RoleRecord(msgspec.Struct, frozen=True):
    """What a role may be narrowed to (none: it is kept), and who said so."""

    role: str
    formats: list[str]
    origin: str


class TensorClassRecord(msgspec.Struct, frozen=True):
    """Tensors of one class that go one way.

    kind: "projection weights", "KV cache pages", ... path: the formats they are in on their way
    through the plan. place: "weights", "states", "arena" or "registers". tensors: how many there
    are, in all phases together. nbytes: what the plan holds of them; of activations the arena of
    `phase` and `bucket`, its largest, and of the residual stream one of its values there.
    token_nbytes: of states that grow, for a token of one sequence, and plain_token_nbytes what it
    would be if nothing was narrowed; bucket_nbytes: of states, for one sequence as long as the
    largest bucket holds. narrowed: formats that a policy judges;
    allowed: the rule that let them pass.
    """

    kind: str
    path: str
    place: str
    tensors: int
    nbytes: int
    token_nbytes: float = 0.0
    bucket_nbytes: int = 0
    phase: str = ""
    bucket: str = ""
    narrowed: list[str] = []
    allowed: str = ""
    plain_token_nbytes: float = 0.0


class PrecisionReport(msgspec.Struct, frozen=True):
    """The policy of mixed precision in force, and the path of every class of tensors."""

    policy: list[RoleRecord]
    classes: list[TensorClassRecord]


class BuildReport(msgspec.Struct, frozen=True):
    """Everything `graphc inspect` shows that the plan's own tables don't hold.

    model: the MODEL argument. source: "python", "pt2", "onnx", "huggingface" or "module".
    """

    model: str
    source: str
    version: str
    symbols: list[SymbolRecord]
    stages: list[StageRecord]
    passes: list[PassRecord]
    buckets: list[BucketRecord]
    memory: list[MemoryRecord]
    kernels: list[KernelRecord]
    fallbacks: list[FallbackRecord]
    compile: CompileRecord
    weights_bytes: int = 0
    weights: int = 0
    notes: list[str] = []
    tuning: list[TuningRecord] = []
    layers: list[LayerRecord] = []
    precision: PrecisionReport | None = None
    targets: list[TargetRecord] = []
    format: int = FORMAT

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of the whole build."""
        return sum(stage.seconds for stage in self.stages)

    def to_json(self) -> bytes:
        """Indented JSON, the same bytes for the same report."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    def to_dict(self) -> dict[str, object]:
        """Plain dicts, lists and scalars: what `--json` prints."""
        result: dict[str, object] = msgspec.to_builtins(self)
        return result

    @staticmethod
    def from_json(data: bytes, where: str = "report.json") -> BuildReport:
        """Reads what `to_json` wrote.

        Raises:
            DamagedError: the bytes are no report of this format.
        """
        try:
            report = msgspec.json.decode(data, type=BuildReport)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise DamagedError(
                f"expected a build report, found damaged JSON: {error}",
                where=where,
                hint="build the plan again",
            ) from None
        if report.format != FORMAT:
            raise DamagedError(
                f"expected a report of format {FORMAT}, found {report.format}",
                where=where,
                hint="build the plan again",
            )
        return report

    @staticmethod
    def load(path: Path) -> BuildReport:
        """Reads `report.json`; raises DamagedError if it's missing or damaged."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DamagedError(
                f"expected a build report, found: {error.strerror}",
                where=str(path),
                hint="build the plan again",
            ) from None
        return BuildReport.from_json(data, str(path))


class BisectRecord(msgspec.Struct, frozen=True):
    """The first pass, and the first node in it, that breaks the tolerance (`verify --bisect`).

    output is the first graph output that differs; expected/found its worst element.
    """

    pass_name: str
    node: str
    where: str
    output: str
    max_abs: float
    max_rel: float
    expected: float | None = None
    found: float | None = None


def matches_by_rule(matches: Iterable[Match]) -> dict[str, int]:
    """How often each rule applied, most frequent first."""
    counts: dict[str, int] = {}
    for match in matches:
        counts[match.rule] = counts.get(match.rule, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
