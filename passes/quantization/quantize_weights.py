"""quantize_weights: weights of projections and experts in 8 or 4 bits, where it is asked for.

Rounding to the nearest code needs no data, and activations keep their dtype: products are summed in
float32 with weights that are spelled out in registers. What a weight became is reported with its
error. What decides keeps its precision: routers, what a model computes in float32 among narrower
products, the last product (unless `head` asks for it), embeddings and everything small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from graphc.errors import UsageError
from graphc.ir.graph import Builder, Graph, Node, Value
from graphc.ir.types import product, same
from graphc.ops.experts import decode_experts, encode_experts, experts
from graphc.ops.quantized_linear import quantized_grouped_mm, quantized_linear
from graphc.ops.weight_forms import FORMS, decode, encode
from graphc.rewrite import Facts, Log, Refused, Rule, apply_rules
from graphc.rewrite.facts import operand, packet_of

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_CHOICES = ("aten.topk", "aten.sort", "graphc.route")
#: what hands a value on as it is
_SAME = frozenset(
    f"aten.{name}"
    for name in ("view", "_unsafe_view", "reshape", "permute", "transpose", "slice", "select",
                 "unsqueeze", "squeeze", "expand", "_to_copy", "clone")
)  # fmt: skip
_PAGES = frozenset(("graphc.read_pages", "graphc.read_records"))


@dataclass(frozen=True)
class QuantizeWeights:
    """Off unless `form` says how: int8, int4_g32, int4_g128 or mxfp4 (which keeps what was MXFP4
    exactly). projections, experts, head: which of them; least: elements of the smallest."""

    form: str = ""
    projections: bool = True
    experts: bool = True
    head: bool = False
    least: int = 1 << 16
    name: ClassVar[str] = "quantize_weights"
    narrows: ClassVar[bool] = True  # results may change by more than rounding

    def __post_init__(self) -> None:
        if self.form and self.form not in FORMS:
            raise UsageError(
                f"expected a form of weights, found {self.form!r}",
                hint=f"one of {', '.join(FORMS)}",
            )

    def run(self, graph: Graph, log: Log) -> Graph:
        rules: list[Rule[_Found]] = []
        if self.form and self.projections:
            rules.append(_Projection(self, graph))
        if self.form and self.experts:
            rules += [_Experts(self, graph), _Grouped(self, graph)]
        return apply_rules(graph, rules, log) if rules else graph


@dataclass(frozen=True)
class _Coded:
    """A weight in its form, and the relative root mean square error of it."""

    data: tuple[torch.Tensor, ...]
    before: int
    error: float


@dataclass(frozen=True)
class _Found:
    weights: tuple[Value, ...]
    coded: _Coded


class _Quantized(Rule[_Found]):
    def __init__(self, options: QuantizeWeights, graph: Graph) -> None:
        self.options = options
        self.coded: dict[tuple[Value, ...], _Coded] = {}
        self.made: dict[tuple[Value, ...], list[Value]] = {}
        self.narrow = any(
            w.dtype in (torch.bfloat16, torch.float16) and w.numel() >= options.least
            for w in graph.weights.values()
        )

    def refusal(self, weights: tuple[torch.Tensor, ...]) -> Refused | None:
        if any(w.dtype not in _FLOATS for w in weights):
            return Refused(f"its weight is {weights[0].dtype}".replace("torch.", ""))
        if any(w.numel() < self.options.least for w in weights):
            return Refused(f"its weight has fewer than {self.options.least} elements")
        if self.narrow and any(w.dtype == torch.float32 for w in weights):
            return Refused("it is computed in float32 among narrower products")
        if not all(bool(w.isfinite().all()) for w in weights):
            return Refused("its weight holds NaN or infinity")
        return None

    def values(self, builder: Builder, found: _Found) -> list[Value]:
        """The coded weights, made once however many nodes read them."""
        if found.weights not in self.made:
            self.made[found.weights] = [
                builder.weight(f"{value.name}_{self.options.form}", data)
                for value, data in zip(found.weights, found.coded.data, strict=True)
            ]
        return self.made[found.weights]

    def detail(self, found: _Found) -> str:
        coded, after = found.coded, sum(data.nbytes for data in found.coded.data)
        return (
            f"{', '.join(value.name for value in found.weights)}: {self.options.form}, "
            f"{after} of {coded.before} bytes, relative rms error {coded.error:.3g}"
        )


class _Projection(_Quantized):
    name = "quantized_linear"
    roots = frozenset(("aten.linear",))

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Found | Refused]:
        weight = node.args[1]
        data = facts.weight(weight)
        if data is None or data.ndim != 2:
            yield Refused("its weight is not a constant matrix")
            return
        refused = self.refusal((data,)) or self._role(node, facts)
        if refused is not None:
            yield refused
            return
        if (weight,) not in self.coded:
            self.coded[(weight,)] = _coded(data, self.options.form)
        yield _Found((weight,), self.coded[(weight,)])

    def _role(self, node: Node, facts: Facts) -> Refused | None:
        """Why the product is one whose weight stays as it is."""
        if why := _decides(node, facts):
            return Refused(why)
        head = _leaves(node.outputs[0], facts)
        if head and not self.options.head:
            return Refused("it is the head: head=yes narrows it too")
        if _of_pages(node.args[0]):
            return Refused("attention absorbs it where it reads the rows of its cache")
        weight = node.args[1]
        others = any(r.target != "aten.linear.default" for r in facts.readers(weight))
        if (others or weight in facts.kept) and not head:
            return Refused("its weight is also read otherwise")
        return None

    def rewrite(self, builder: Builder, found: _Found, node: Node) -> Sequence[Value]:
        (coded,) = self.values(builder, found)
        features = int(found.weights[0].type.shape[0])
        bias = node.argument("bias")
        return builder.call(
            quantized_linear, node.args[0], coded, self.options.form, features, bias
        )


class _Experts(_Quantized):
    name = "quantized_experts"
    roots = frozenset(("graphc.experts",))

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Found | Refused]:
        if node.argument("form"):
            return
        weights = (node.argument("gate_up"), node.argument("down"))
        known = tuple(data for w in weights if (data := facts.weight(w)) is not None)
        if len(known) != 2:
            yield Refused("its weights are not constants")
            return
        refused = self.refusal(known)
        if refused is not None:
            yield refused
            return
        if weights not in self.coded:
            self.coded[weights] = _coded_experts(*known, self.options.form)
        yield _Found(weights, self.coded[weights])

    def rewrite(self, builder: Builder, found: _Found, node: Node) -> Sequence[Value]:
        gate_up, down = self.values(builder, found)
        rest = [node.argument(n) for n in ("activation", "gate_cap", "up_cap", "limit")]
        hidden = int(found.weights[1].type.shape[2])
        return builder.call(
            experts, *node.args[:3], gate_up, down, *rest, self.options.form, hidden
        )


class _Grouped(_Quantized):
    """Experts whose activation is not one of graphc.experts': two products over sorted rows."""

    name = "quantized_grouped_mm"
    roots = frozenset(("aten._grouped_mm", "transformers.grouped_mm_fallback"))

    def pattern(self, node: Node, facts: Facts) -> Iterator[_Found | Refused]:
        x, weight = node.args[0], node.args[1]
        data = facts.weight(weight)
        if data is None or data.ndim != 3 or node.argument("offs") is None:
            yield Refused("its weights are not constants [E, K, N]")
            return
        names = {argument.name for argument in node.op._schema.arguments}
        if "bias" in names and node.argument("bias") is not None:
            yield Refused("it has a bias")
            return
        if node.outputs[0].type.dtype != x.type.dtype:
            yield Refused("its result has another dtype")
            return
        refused = self.refusal((data,))
        if refused is None and (weight in facts.kept or not self._alone(weight, facts)):
            refused = Refused("its weight is also read otherwise")
        if refused is not None:
            yield refused
            return
        if (weight,) not in self.coded:
            self.coded[(weight,)] = _coded(data.transpose(1, 2), self.options.form)
        yield _Found((weight,), self.coded[(weight,)])

    def _alone(self, weight: Value, facts: Facts) -> bool:
        return all(r.target.rpartition(".")[0] in self.roots for r in facts.readers(weight))

    def rewrite(self, builder: Builder, found: _Found, node: Node) -> Sequence[Value]:
        (coded,) = self.values(builder, found)
        features = int(found.weights[0].type.shape[2])
        offs = node.argument("offs")
        return builder.call(
            quantized_grouped_mm, node.args[0], coded, offs, self.options.form, features
        )


def _coded(data: torch.Tensor, form: str) -> _Coded:
    """[N, K] or [E, N, K]."""
    matrices = data[None] if data.ndim == 2 else data
    made: list[torch.Tensor] = []
    square = whole = 0.0
    for matrix in matrices:
        made.append(encode(matrix, form))
        square += _distance(decode(made[-1], form, *matrix.shape), matrix) ** 2
        whole += _length(matrix) ** 2
    coded = made[0] if data.ndim == 2 else torch.stack(made)
    return _Coded((coded,), data.nbytes, (square / (whole or 1.0)) ** 0.5)


def _coded_experts(gate_up: torch.Tensor, down: torch.Tensor, form: str) -> _Coded:
    coded = encode_experts(gate_up, down, form)
    square = whole = 0.0
    for e in range(len(gate_up)):
        one = [part[e : e + 1] for part in coded]
        back = decode_experts(one[0], one[1], form, down.shape[2], down.shape[1])
        for was, now in ((gate_up[e], back[0][0]), (down[e], back[1][0])):
            square += _distance(now, was) ** 2
            whole += _length(was) ** 2
    return _Coded(coded, gate_up.nbytes + down.nbytes, (square / (whole or 1.0)) ** 0.5)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other.float()).double().norm())


def _length(data: torch.Tensor) -> float:
    return float(data.double().norm())


def _decides(node: Node, facts: Facts) -> str:
    """What hangs on single results of the product, as many of them as it has, elementwise on the
    way: which are the best, or how fast a state decays."""
    size = product(node.outputs[0].type.shape)
    ahead, seen = [node.outputs[0]], set()
    while ahead:
        value = ahead.pop()
        for reader in facts.readers(value):
            name = packet_of(reader.outputs[0])
            if name in _CHOICES:
                return "it is a router"
            if name == "graphc.delta_rule" and reader.argument("decay") is value:
                return "it sets how a recurrent state decays"
            if "linear" in reader.target or reader in seen:
                continue
            seen.add(reader)
            ahead += [v for v in reader.outputs if _as_many(v, size)]
    return ""


def _as_many(value: Value, size: Any) -> bool:
    shape = getattr(value.type, "shape", None)
    return shape is not None and same(product(shape), size)


def _leaves(value: Value, facts: Facts) -> bool:
    """Whether it is a result of the graph, seen as it is."""
    if value in facts.kept:
        return True
    readers = facts.readers(value)
    return bool(readers) and all(
        packet_of(r.outputs[0]) in _SAME and _leaves(r.outputs[0], facts) for r in readers
    )


def _of_pages(value: Any) -> bool:
    """Whether it is rows of a sequence's pages, seen as they are."""
    while isinstance(value, Value) and value.producer is not None:
        if packet_of(value) in _PAGES:
            return True
        if packet_of(value) not in _SAME:
            return False
        value = operand(value)
    return False
