"""`torch.compile(model, backend="graphc")`: the graphs that dynamo finds, as plans.

Inference only. The weights a graph reads are frozen into its plan, as they must be to be packed
once; a call with other tensors, or with tensors that changed in place since, builds another plan.
(A write through `.data` goes unseen by torch itself, and so by this.) Weights made under
torch.inference_mode() are not frozen, since torch does not count their changes. Options, by
`torch.compile(..., options={...})`:

    freeze     False: weights are ordinary inputs of the plan
    threads    threads of native steps [$GRAPHC_THREADS, else the CPUs this process may use]
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._guards
from torch import fx

from graphc.errors import GraphcError, InputRejectedError, UnsupportedError, UsageError
from graphc.garbage import rarely_collected
from graphc.runtime.session import Session, load

#: plans of one graph with weights frozen; past it they become inputs (a module that is called with
#: ever new weights)
_FROZEN_PLANS = 64


def graphc(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend: a callable with the signature and the effects of `graph`.

    Raises:
        UnsupportedError: gradients would be needed, autocast is on, or a tensor is not a plain one
            on the CPU.
        UsageError: an option that does not exist.
        GraphcError: the graph cannot be built.
    """
    options = dict(options or {})
    unknown = set(options) - {"freeze", "threads"}
    if unknown or mode not in (None, "default"):
        what = f"option {sorted(unknown)[0]!r}" if unknown else f"mode {mode!r}"
        raise UsageError(
            f"the backend graphc has no {what}", hint="its options are freeze and threads"
        )
    _check(graph, example_inputs)
    compiled = _Compiled(graph, bool(options.get("freeze", True)), options.get("threads"))
    compiled.plan_for(list(example_inputs))  # errors belong to the compilation
    return compiled


def _check(graph: fx.GraphModule, inputs: Sequence[Any]) -> None:
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise UnsupportedError(
            "the backend graphc has no gradients, and these inputs or weights require them",
            hint="call the model under torch.inference_mode() or torch.no_grad()",
        )
    if torch.is_autocast_enabled("cpu"):
        raise UnsupportedError(
            "the backend graphc does not take part in autocast",
            hint="convert the model once, model.to(torch.bfloat16), and leave autocast off",
        )
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise UnsupportedError(
                f"expected dense tensors on the CPU, found {tensor.layout} on {tensor.device}"
            )


@dataclass
class _Plan:
    """A plan for one set of frozen weights. `folder` removes itself with it."""

    session: Session
    folder: tempfile.TemporaryDirectory[str]
    weights: list[torch.Tensor]  # kept: their ids are the key


@dataclass(frozen=True)
class _Placeholder:
    """An input of dynamo's graph. kind: "tensor", "weight" (of a module), or "size"; a size is read
    off dimension `source[1]` of placeholder `source[0]`, or, where no tensor has it, is a constant
    of the plan. sizes: the symbolic shape."""

    kind: str
    source: tuple[int, int] | None = None
    sizes: tuple[Any, ...] = ()


@dataclass
class _Compiled:
    graph: fx.GraphModule
    freeze: bool
    threads: int | None
    plans: dict[Any, _Plan] = field(default_factory=dict)
    fixed: bool = False  # the graph is not proven for a range of lengths: one plan for each

    def __post_init__(self) -> None:
        nodes = [node for node in self.graph.graph.nodes if node.op == "placeholder"]
        self.placeholders = _placeholders(nodes)
        self.alias = _Aliases(self.graph.graph, nodes)
        self.written: frozenset[int] = frozenset()  # weights that the graph changes: inputs

    def __call__(self, *inputs: Any) -> Any:
        plan = self.plan_for(list(inputs))
        tensors = self._tensors(inputs)
        try:
            results = plan.session.run(*tensors, as_torch=True)
        except InputRejectedError:
            if self.fixed or not any(p.kind == "size" for p in self.placeholders):
                raise
            # lengths beyond what the plan is proven for, though dynamo's guards hold
            self.fixed = True
            results = self.plan_for(list(inputs)).session.run(*tensors, as_torch=True)
        return self.alias.restored(tuple(results), inputs)

    def _frozen(self, index: int) -> bool:
        weight = self.placeholders[index].kind == "weight"
        return weight and self.freeze and index not in self.written

    def _tensors(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        return [
            value
            for i, value in enumerate(inputs)
            if isinstance(value, torch.Tensor) and not self._frozen(i)
        ]

    def plan_for(self, inputs: list[Any]) -> _Plan:
        """The plan for these weights and lengths, built now if it is the first time."""
        if self.freeze and any(v.is_inference() for i, v in enumerate(inputs) if self._frozen(i)):
            self.freeze = False  # nothing tells when a tensor made in inference mode changes
        key = self._key(inputs)
        if key not in self.plans:
            weights = [v for i, v in enumerate(inputs) if self._frozen(i)]
            # plans of earlier versions of the same tensors
            same = {id(weight) for weight in weights}
            for old, plan in list(self.plans.items()):
                if same and same == {id(w) for w in plan.weights} and old[0] != key[0]:
                    del self.plans[old]
            if sum(bool(plan.weights) for plan in self.plans.values()) >= _FROZEN_PLANS:
                self.freeze = False
                self.plans.clear()
                return self.plan_for(inputs)
            built = self._build(inputs)
            key = self._key(inputs)  # what is frozen may have changed
            self.plans[key] = built
        return self.plans[key]

    def _key(self, inputs: Sequence[Any]) -> Any:
        weights = tuple(
            (id(value), value._version) for i, value in enumerate(inputs) if self._frozen(i)
        )
        lengths = tuple(
            int(value)
            for value, p in zip(inputs, self.placeholders, strict=True)
            if p.kind == "size" and p.source is None
        )
        shapes = tuple(tuple(t.shape) for t in self._tensors(inputs)) if self.fixed else ()
        return weights, lengths, shapes

    @rarely_collected()
    def _build(self, inputs: list[Any]) -> _Plan:
        from graphc.api import Options, build_captured
        from graphc.frontends.capture import capture
        from graphc.lowering.classify import native_operators

        constants = {
            i: int(inputs[i])
            for i, p in enumerate(self.placeholders)
            if p.kind == "size" and p.source is None
        }
        frozen = {i: v.detach() for i, v in enumerate(inputs) if self._frozen(i)}
        module = _Module(self.graph, self.placeholders, frozen, constants).eval()
        # fresh tensors: dynamo's are marked, and the capture must not see those marks
        examples = tuple(t.detach().clone() for t in self._tensors(inputs))
        shapes = None if self.fixed else self._dynamic()
        # the capture is one of its own: without this it takes part in dynamo's, lengths and all
        with torch._guards.tracing(None), torch.no_grad():
            try:
                captured = capture(module, examples, {}, shapes, keep=native_operators())
            except GraphcError:
                if self.fixed or shapes is None:
                    raise
                self.fixed = True
                return self._build(inputs)
        if captured.state_names:
            changed = {int(name.rpartition("_")[2]) for name in captured.state_names}
            self.written |= changed
            return self._build(inputs)
        folder = tempfile.TemporaryDirectory(prefix="graphc-dynamo-", ignore_cleanup_errors=True)
        place = Path(folder.name) / "plan"
        build_captured(captured, place, Options(), model="dynamo", source="dynamo")
        weights = [inputs[i] for i in frozen]
        return _Plan(load(place, threads=self.threads), folder, weights)

    def _dynamic(self) -> Any:
        """dynamic_shapes of the wrapped module, None if every length is fixed."""
        dims: dict[str, Any] = {}
        shapes: list[Any] = []
        for i, placeholder in enumerate(self.placeholders):
            if placeholder.kind == "size" or self._frozen(i):
                continue
            shapes.append(
                {
                    axis: _dim(size, dims)
                    for axis, size in enumerate(placeholder.sizes)
                    if isinstance(size, torch.SymInt)
                }
            )
        return {"tensors": tuple(s or None for s in shapes)} if any(shapes) else None


def _dim(size: torch.SymInt, dims: dict[str, Any]) -> Any:
    """torch.export's name for a symbolic length of dynamo, with the range that its guards leave."""
    expression = size.node.expr
    if not expression.is_symbol:
        return torch.export.Dim.AUTO
    name = str(expression)
    if name not in dims:
        limits = size.node.shape_env.var_to_range[expression]
        high = int(limits.upper) if limits.upper.is_number and limits.upper < 2**31 else None
        low = max(int(limits.lower), 0)
        dims[name] = torch.export.Dim(name, min=low, max=high)
    return dims[name]


def _placeholders(nodes: Sequence[fx.Node]) -> list[_Placeholder]:
    values = [node.meta["example_value"] for node in nodes]
    made: list[_Placeholder] = []
    for node, value in zip(nodes, values, strict=True):
        if isinstance(value, torch.Tensor):
            source = getattr(node, "_dynamo_source", None)
            owner = getattr(getattr(source, "guard_source", None), "name", "")
            weight = "NN_MODULE" in owner or isinstance(value, torch.nn.Parameter)
            kind = "weight" if weight else "tensor"
            made.append(_Placeholder(kind, None, tuple(value.shape)))
        elif isinstance(value, torch.SymInt | int):
            made.append(_Placeholder("size", _found(value, values)))
        else:
            raise UnsupportedError(
                f"expected tensors and lengths as inputs of a graph, found {type(value).__name__} "
                f"{node.name!r}",
                hint="a float of Python that changes from call to call: pass it as a tensor",
            )
    return made


def _found(value: Any, values: Sequence[Any]) -> tuple[int, int] | None:
    """The tensor and dimension that have this length."""
    if not isinstance(value, torch.SymInt):
        return None
    for position, other in enumerate(values):
        if isinstance(other, torch.Tensor):
            for axis, size in enumerate(other.shape):
                if isinstance(size, torch.SymInt) and size.node.expr == value.node.expr:
                    return position, axis
    return None


class _Module(torch.nn.Module):
    """dynamo's graph with the frozen weights inside and only tensors as inputs."""

    def __init__(
        self,
        graph: fx.GraphModule,
        placeholders: Sequence[_Placeholder],
        frozen: Mapping[int, torch.Tensor],
        constants: Mapping[int, int],
    ) -> None:
        super().__init__()
        self.graph = graph
        self.placeholders = placeholders
        self.frozen = frozenset(frozen)
        self.constants = constants
        for index, tensor in frozen.items():
            self.register_buffer(f"weight_{index}", tensor)

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        values: list[Any] = []
        for index, placeholder in enumerate(self.placeholders):
            if placeholder.kind == "size":
                values.append(self.constants.get(index))
            elif index in self.frozen:
                values.append(getattr(self, f"weight_{index}"))
            else:
                values.append(next(given))
        for index, placeholder in enumerate(self.placeholders):
            if placeholder.source is not None:
                position, axis = placeholder.source
                values[index] = values[position].shape[axis]
        return self.graph(*values)


class _Aliases:
    """Which results share memory with an input or with each other: a plan's results are tensors of
    their own, so the sharing is made again. Read off dynamo's fake tensors."""

    def __init__(self, graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
        owners = {
            _storage(node.meta["example_value"]): position
            for position, node in enumerate(nodes)
            if isinstance(node.meta["example_value"], torch.Tensor)
        }
        (leaves,) = graph.output_node().args
        assert isinstance(leaves, tuple | list)
        groups: dict[int, list[tuple[int, Any]]] = {}
        for position, node in enumerate(leaves):
            value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
            if isinstance(value, torch.Tensor):
                groups.setdefault(_storage(value), []).append((position, value))
        self.symbols = [
            node.meta["example_value"].node.expr
            if isinstance(node.meta["example_value"], torch.SymInt)
            else None
            for node in nodes
        ]
        #: (input or None, [(result, its fake tensor)])
        self.groups = [
            (owners.get(storage), members)
            for storage, members in groups.items()
            if storage in owners or len(members) > 1
        ]

    def restored(self, results: tuple[Any, ...], inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The results with their sharing."""
        if not self.groups:
            return results
        made = list(results)
        known = {
            symbol: int(value)
            for symbol, value in zip(self.symbols, inputs, strict=True)
            if symbol is not None
        }

        def number(size: Any) -> int:
            if isinstance(size, torch.SymInt):
                return int(size.node.expr.xreplace(known))
            return int(size)

        for owner, members in self.groups:
            places = [
                (
                    position,
                    tuple(number(s) for s in fake.shape),
                    tuple(number(s) for s in fake.stride()),
                    number(fake.storage_offset()),
                )
                for position, fake in members
            ]
            if owner is not None:
                base = inputs[owner].detach()
                for position, shape, stride, offset in places:
                    made[position] = base.as_strided(shape, stride, offset)
                continue
            if len({(shape, stride, offset) for _, shape, stride, offset in places}) == 1:
                for position, *_ in places:  # one tensor returned twice
                    made[position] = made[places[0][0]]
                continue
            length = max(
                offset + 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
                if all(shape)
                else offset
                for _, shape, stride, offset in places
            )
            base = torch.empty(length, dtype=members[0][1].dtype)
            for position, shape, stride, offset in places:
                view = base.as_strided(shape, stride, offset)
                made[position] = view.copy_(made[position])
        return tuple(made)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
