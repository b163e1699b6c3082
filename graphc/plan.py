"""The Plan on disk: what `graphc build` writes and a Session runs.

A plan is a folder:

    plan.json          manifest (this module's `Manifest`), JSON, no pickle
    weights.bin        all weights, each at a 4096-byte aligned offset, mapped at load
    program.json       the Steps (this module's `Plan`)
    kernels.so         the kernels of every bucket and the native executor
    report.json        what the passes did (graphc.report)
    work.json          what each Step has to do (this module's `PlanWork`), for the views only
    graph.txt          the graph after all passes, canonical text
    sources/*.cpp      the generated kernel sources

Where a plan has several targets, each has its files (all behind weights.bin) in a folder of its
name; weights.bin has the weights of all of them, what is equal once.

Every file but plan.json itself is listed in `Manifest.files` with its SHA-256; plan.json is written
last and carries a digest of its own payload, so a half-written plan is never taken for a plan.

Every integer that may depend on a length is an index into `Program.expressions`: a postfix
program over int64, whose items are an int (constant), "s<k>" (value of symbol k) or an operator
(`OPERATORS`). Constants are expressions too.
"""

# without `from __future__ import annotations`: msgspec would evaluate each text at every load, 1 ms

import msgspec

FORMAT_VERSION = 3
ABI_VERSION = 2  # must equal GC_ABI_VERSION in graphc/kernels/abi.h

#: postfix operators of expressions; floor division and modulo follow Python's sign rules.
#: Comparisons and logic give 0 or 1. "select" takes (condition, a, b).
OPERATORS = ("+", "-", "*", "//", "%", "min", "max", "==", "!=", "<", "<=", "and", "or", "not",
             "neg", "abs", "pow", "select")  # fmt: skip

Expression = list[int | str]


class Symbol(msgspec.Struct, frozen=True):
    """A named length. `input`/`dim` say which input's dimension binds it; -1 for a symbol bound by
    a fallback Step's result (a size that depends on data)."""

    name: str
    minimum: int
    maximum: int
    input: int = -1
    dim: int = -1


class Tensor(msgspec.Struct, frozen=True):
    """A boundary tensor (input, output or state).

    dtype is torch's name without the prefix ("float32", "bfloat16", "int64", "bool", ...).
    shape holds expression indices; text is the same for people, e.g. ["1", "T", "384"].
    """

    name: str
    dtype: str
    shape: list[int]
    text: list[str]


class State(msgspec.Struct, frozen=True):
    """A buffer that lives across runs. `weight` is the index of its initial value in
    `Plan.weights` (-1: zeros)."""

    tensor: Tensor
    weight: int


class Weight(msgspec.Struct, frozen=True):
    """A constant in weights.bin: byte offset and size; shape/dtype as stored; `layout` names a
    packed form ("" for plain row-major)."""

    name: str
    dtype: str
    shape: list[int]
    offset: int
    nbytes: int
    layout: str = ""
    origin: str = ""


class Buffer(msgspec.Struct, frozen=True):
    """Memory of one value.

    kind: "input" | "output" | "weight" | "state" (index = position in that table),
    "arena" (offset = byte offset in the arena), "external" (made by a fallback Step and owned by
    it), "dynamic" (its size depends on a data-dependent symbol: allocated when known).
    nbytes is an expression index. first/last are the Step indices between which it is live.
    """

    kind: str
    index: int
    offset: int
    nbytes: int
    first: int = 0
    last: int = 0
    name: str = ""


class Kernel(msgspec.Struct, frozen=True):
    """A Step that calls one native kernel over [0, range)."""

    symbol: str
    pointers: list[tuple[int, int]]  # (buffer, expression index of the byte offset)
    immediates: list[int]  # expression indices
    range: int  # expression index
    grain: int  # smallest range worth handing to a thread
    scratch: int  # expression index: bytes per thread
    reads: list[int]  # buffers
    writes: list[int]
    label: str = ""
    source: str = ""  # file under sources/
    nodes: list[str] = []  # graph nodes it computes


class Fallback(msgspec.Struct, frozen=True):
    """A Step that calls one ATen operator through torch.

    arguments/keywords are JSON trees whose tensor leaves are
    {"buffer": b, "dtype": d, "shape": [e..], "strides": [e..], "offset": e}, integers that depend
    on a length {"expr": e}, special values {"dtype": name}, {"device": "cpu"},
    {"memory_format": name}, {"layout": name}, {"float": "inf"|"-inf"|"nan"},
    {"complex": [re, im]}; all else is literal JSON.
    outputs[i] is the external buffer that receives result i (-1: result not needed), with its
    dtype in output_dtypes[i] and the strides the graph expects (expression indices; the runtime
    copies if torch answers with others). binds lists (symbol, output, dim) to read off after the
    call; an entry with dim -1 reads the value of a one-element integer output.
    """

    target: str  # "aten.nonzero.default"
    arguments: list[object]
    keywords: dict[str, object]
    outputs: list[int]
    output_dtypes: list[str]
    output_shapes: list[list[int]]
    output_strides: list[list[int]]
    binds: list[tuple[int, int, int]] = []
    label: str = ""
    nodes: list[str] = []
    reason: str = ""
    reads: list[int] = []


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """Exactly one of the two is set."""

    kernel: Kernel | None = None
    fallback: Fallback | None = None


class Output(msgspec.Struct, frozen=True):
    """How result leaf i is made: kind "buffer" (index = buffer of kind output or external),
    "input" (the caller's own object, untouched), "constant" (value is a JSON scalar or null),
    "expression" (a Python int: expression index)."""

    tensor: Tensor | None
    kind: str
    index: int = -1
    value: object = None


class Program(msgspec.Struct, frozen=True):
    """The step table of one phase and bucket. `limits` gives the largest value of each symbol."""

    phase: str
    bucket: str
    limits: dict[str, int]
    expressions: list[Expression]
    input_shapes: list[list[int]]  # expression indices per input, in this program's table
    output_shapes: list[list[int]]
    guards: list[tuple[int, str]]  # (expression that must be non-zero, text for people)
    buffers: list[Buffer]
    steps: list[Step]
    arena_bytes: int
    lower_bound: int  # max over steps of live arena bytes
    naive_bytes: int  # sum of all arena buffers


class Machine(msgspec.Struct, frozen=True):
    """What a plan needs of a machine: architecture and cpuinfo flag names."""

    architecture: str
    features: list[str]
    isa: str


class DecoderPlan(msgspec.Struct, frozen=True):
    """How sequences live in a plan's states.

    `rows` are the states of pages [pages, page, W] (page 0 is never handed out; fewer rows a page
    where one stands for several tokens), `fixed` those with one entry for each of `slots`
    sequences, as indices into `Plan.states`. `chunk` is the longest piece of a prompt that one run
    takes, `batch` the most sequences of a decode, `context` the most tokens of a sequence,
    `drafts` the most tokens of one verify (0: the plan has none).
    `columns` are the ranges of table widths that programs take. `stop` are the tokens that end a
    text, `begin` those that stand in front of one; `text` says how text becomes tokens: "bytes"
    (a token is a byte), "tokenizer" (tokenizer.json of the plan), "" (unknown).
    """

    page: int
    pages: int
    slots: int
    chunk: int
    batch: int
    context: int
    rows: list[int]
    fixed: list[int]
    columns: list[tuple[int, int]] = []
    stop: list[int] = []
    begin: list[int] = []
    text: str = ""
    drafts: int = 0


class Target(msgspec.Struct, frozen=True):
    """One kind of CPU that a plan was built for: its name as the build was told, what it needs, and
    the folder of its files ("": beside the manifest)."""

    name: str
    machine: Machine
    folder: str = ""


class Manifest(msgspec.Struct, frozen=True):
    """Contents of plan.json.

    command: what followed `graphc build`, but -o and --target; empty if the plan was not built from
    a model that a command can name. targets: the most demanding first. files: SHA-256 by name.
    """

    format: int
    abi: int
    version: str  # graphc version
    model: str
    command: list[str]
    targets: list[Target]
    files: dict[str, str]


class Plan(msgspec.Struct, frozen=True):
    """The Steps for one target, and all that a Session needs of them. `files` are those of the
    manifest that belong to it, by name in the plan's folder; what its own are called there says
    `graphc.plan_io.own`. Trees of inputs and outputs are JSON: {"tuple": [..]}, {"list": [..]},
    {"dict": [[key, tree], ..]}, {"leaf": i} (input or output i), {"const": scalar} (inputs: a
    Python scalar fixed at capture; another value is rejected), null for None."""

    format: int
    abi: int
    version: str  # graphc version
    model: str
    machine: Machine
    symbols: list[Symbol]
    inputs: list[Tensor]  # shape indices refer to programs[0].expressions
    outputs: list[Output]
    arguments: object  # {"tuple": [..]} of positional inputs
    keywords: object  # {"dict": [[name, tree], ..]}
    results: object
    mutated_inputs: list[int]
    states: list[State]
    weights: list[Weight]
    programs: list[Program]
    files: dict[str, str]
    uses_torch: bool  # some Step is a fallback
    positional_names: list[str] = []  # parameter name of each positional argument
    ranges: list[tuple[int, int, int, str]] = []  # (integer input, lowest value, one past the
    # highest, what it is): inputs used as indices, checked at the boundary
    decoder: DecoderPlan | None = None
    target: str = "host"
    folder: str = ""  # as of `Target`


class StepWork(msgspec.Struct, frozen=True, array_like=True):
    """What a Step has to do, as indices into `SideWork.expressions` (-1: unknown).

    flops: operations, a multiply-add being two. kept: bytes read of weights, states and inputs;
    read: bytes read of what the run made; written: bytes written; each byte counted once.
    arithmetic: "fp32", "fp64", or "bf16" and "int8" for dot products of these. place: index into
    `PlanWork.places`, the line of the user's model.
    """

    flops: int = -1
    kept: int = -1
    read: int = -1
    written: int = -1
    arithmetic: str = "fp32"
    place: int = -1


class SideWork(msgspec.Struct, frozen=True):
    """The Steps of one captured graph; all buckets of it share them."""

    expressions: list[Expression]  # over Plan.symbols, as those of a Program
    steps: list[StepWork]


class PlanWork(msgspec.Struct, frozen=True):
    """Contents of work.json. `programs` gives the side of each program of the plan."""

    places: list[str]
    sides: list[SideWork]
    programs: list[int]
