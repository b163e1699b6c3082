"""Captures: named lengths, guards, scalars, states, aliases, numbers computed from lengths."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils._sympy.functions import FloorDiv, Mod

from graphc.errors import CaptureError, UnsupportedError, UsageError
from graphc.frontends.capture import Captured, capture
from graphc.frontends.guards import truth
from graphc.ir.graph import Graph, Value

KEEP = frozenset(
    f"aten.{name}.default" for name in ("linear", "layer_norm", "gelu", "silu", "matmul")
)


class Rejected(Exception):
    """A call outside of what the graph promises."""


class Run:
    """A captured graph, executed node by node in eager torch."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.graph: Graph = captured.graph
        self.state = {value: tensor.clone() for value, tensor in self.graph.states.items()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        graph = self.graph
        tensors: dict[int, Tensor] = {}
        _match(self.captured.arguments, args, tensors)
        _match(self.captured.keywords, kwargs, tensors)
        given = [tensors[i] for i in range(len(graph.inputs))]
        lengths = self._lengths(given)
        values: dict[Value, Any] = dict(zip(graph.inputs, given, strict=True))
        values |= {**graph.weights, **self.state}

        def read(item: Any) -> Any:
            if isinstance(item, Value):
                return values[item]
            if isinstance(item, (tuple, list)):
                return [read(i) for i in item]
            return _number(item, lengths)

        for node in graph.nodes:
            result = node.op(*map(read, node.args), **{k: read(v) for k, v in node.kwargs.items()})
            results = result if isinstance(result, (tuple, list)) else (result,)
            for value, tensor in zip(node.outputs, results, strict=True):
                values[value] = tensor
                _bind(value, tensor, lengths)
        for guard in graph.guards:
            if guard.condition.xreplace(lengths) != sympy.true:
                raise Rejected(guard.text)
        leaves = [read(r) for r in graph.results]
        updates = {state: values[new].clone() for state, new in graph.state_updates.items()}
        self.state.update(updates)
        for old, new in graph.input_updates.items():
            values[old].copy_(values[new])
        return _build(self.captured.results, leaves)

    def _lengths(self, given: list[Tensor]) -> dict[Any, sympy.Integer]:
        lengths: dict[Any, sympy.Integer] = {}
        for value, tensor in zip(self.graph.inputs, given, strict=True):
            for dim, size in zip(value.type.shape, tensor.shape, strict=True):
                if isinstance(dim, sympy.Symbol):
                    lengths.setdefault(dim, sympy.Integer(size))
        for value, tensor in zip(self.graph.inputs, given, strict=True):
            for dim, size in zip(value.type.shape, tensor.shape, strict=True):
                if _number(dim, lengths) != size:
                    raise Rejected(f"{value}: {size}")
        for info in self.graph.symbols.values():
            if not info.data and not info.minimum <= lengths[info.expr] <= info.maximum:
                raise Rejected(f"{info.name} = {lengths[info.expr]}")
        for guard in self.graph.guards:
            if guard.condition.xreplace(lengths) == sympy.false:
                raise Rejected(guard.text)
        return lengths


def _number(item: Any, lengths: Mapping[Any, sympy.Integer]) -> Any:
    return int(item.xreplace(lengths)) if isinstance(item, sympy.Basic) else item


def _bind(value: Value, result: Any, lengths: dict[Any, sympy.Integer]) -> None:
    if not isinstance(result, Tensor):
        expr = getattr(value.type, "expr", None)
        if isinstance(expr, sympy.Symbol):
            lengths[expr] = sympy.Integer(int(result))
        return
    for dim, size in zip(value.type.shape, result.shape, strict=True):
        if isinstance(dim, sympy.Symbol):
            lengths.setdefault(dim, sympy.Integer(size))
        assert _number(dim, lengths) == size, value
    assert value.type.dtype == str(result.dtype).removeprefix("torch."), value


def _match(tree: Any, value: Any, tensors: dict[int, Tensor]) -> None:
    if tree is None or "const" in tree:
        wanted = None if tree is None else tree["const"]
        if type(value) is not type(wanted) or value != wanted:
            raise Rejected(f"{value} is not {wanted}")
    elif "leaf" in tree:
        tensors[tree["leaf"]] = value
    elif "dict" in tree:
        for key, child in tree["dict"]:
            _match(child, value[key], tensors)
    else:
        for child, item in zip(tree.get("tuple", tree.get("list")), value, strict=True):
            _match(child, item, tensors)


def _build(tree: Any, leaves: list[Any]) -> Any:
    if tree is None:
        return None
    if "leaf" in tree:
        return leaves[tree["leaf"]]
    if "dict" in tree:
        return {key: _build(child, leaves) for key, child in tree["dict"]}
    if "tuple" in tree:
        return tuple(_build(child, leaves) for child in tree["tuple"])
    return [_build(child, leaves) for child in tree["list"]]


def check(
    module: nn.Module, calls: list[tuple[Any, ...]], shapes: Any = None, **kwargs: Any
) -> Captured:
    """Captures on the first call and compares with the module on all of them, in order."""
    reference = copy.deepcopy(module)
    captured = capture(module, calls[0], kwargs, shapes, keep=KEEP)
    run = Run(captured)
    with torch.no_grad():
        for call in calls:
            ours, theirs = copy.deepcopy(call), copy.deepcopy(call)
            found, expected = run(*ours, **kwargs), reference(*theirs, **kwargs)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(ours, theirs)  # what the model wrote into its inputs
    return captured


class Function(nn.Module):
    """A plain function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


# -- lengths ---------------------------------------------------------------------------------------


class TwoLengths(nn.Module):
    def forward(self, x: Tensor, *, other: dict[str, Tensor]) -> Tensor:
        return x.sum(1) + other["b"].sum() - other["a"].sum()


def test_a_name_goes_to_the_dimension_it_was_asked_for() -> None:
    s, t = Dim("S", min=2, max=99), Dim("T", min=2, max=50)
    other = {"b": randn(7), "a": randn(5)}
    shapes = {"x": None, "other": {"a": {0: t}, "b": {0: s}}}
    captured = capture(TwoLengths(), (randn(2, 3),), {"other": other}, shapes, keep=KEEP)
    types = {value.name: str(value.type) for value in captured.graph.inputs}
    assert sorted(types.values()) == ["f32[2,3]", "f32[S]", "f32[T]"]
    assert captured.keywords == {
        "dict": [["other", {"dict": [["b", {"leaf": 1}], ["a", {"leaf": 2}]]}]]
    }
    assert str(captured.graph.inputs[1].type) == "f32[S]"
    assert captured.graph.symbols["S"].maximum == 99
    assert captured.graph.symbols["T"].maximum == 50
    assert captured.positional_names == ("x",)


class Halves(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.reshape(-1, 2).sum(1) + y


def test_a_derived_dimension_is_spelled_with_its_root() -> None:
    t = Dim("T", min=2, max=32)
    calls = [(randn(8), randn(4)), (randn(20), randn(10))]
    captured = check(Halves(), calls, ({0: 2 * t}, {0: t}))
    assert [str(v.type) for v in captured.graph.inputs] == ["f32[2*T]", "f32[T]"]


def test_a_derived_dimension_without_its_root_is_a_length_with_a_guard() -> None:
    t = Dim("T", min=2, max=32)
    function = Function(lambda x: x.reshape(-1, 2).sum(1))
    captured = check(function, [(randn(8),), (randn(20),)], ({0: 2 * t},))
    assert str(captured.graph.inputs[0].type) == "f32[x_0]"
    with pytest.raises(Rejected):
        Run(captured)(randn(9))


def test_length_one_is_kept_where_it_holds() -> None:
    captured = check(
        Function(lambda x: torch.softmax(x, 1).cumsum(1)),
        [(randn(2, 8),), (randn(2, 1),)],
        ({1: Dim("T", min=1, max=64)},),
    )
    assert captured.graph.symbols["T"].minimum == 1
    assert captured.notes == ()


def test_length_one_is_refused_where_the_model_branches_on_it() -> None:
    function = Function(lambda x: x * 2 if x.shape[1] == 1 else x * 3)
    captured = check(function, [(randn(2, 8),)], ({1: Dim("T", min=1, max=64)},))
    assert captured.graph.symbols["T"].minimum == 2
    assert any("T = 1" in note for note in captured.notes)
    with pytest.raises(Rejected):
        Run(captured)(randn(2, 1))


def test_a_branch_on_the_length_bounds_it() -> None:
    function = Function(lambda x: x + 1 if x.shape[0] > 32 else x - 1)
    captured = check(function, [(randn(16),), (randn(32),)], ({0: Dim("T", min=1, max=64)},))
    assert any("asked for 1..64" in note for note in captured.notes)
    with pytest.raises(Rejected):
        Run(captured)(randn(33))


class Compared(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.sum() - y.sum() if x.shape[0] > y.shape[0] else y.sum()


def test_a_condition_on_one_length_becomes_its_range() -> None:
    function = Function(lambda x: x.sum() if (x.shape[0] + 7) // 8 == 2 else -x.sum())
    captured = check(function, [(randn(12),), (randn(16),)], ({0: Dim("T", min=2, max=64)},))
    symbol = captured.graph.symbols["T"]
    assert (symbol.minimum, symbol.maximum) == (9, 16)
    assert captured.graph.guards == ()  # the range says it all
    for length in (8, 17, 40):
        with pytest.raises(Rejected):
            Run(captured)(randn(length))


def test_conditions_that_no_range_can_say_stay_guards() -> None:
    function = Function(lambda x: x.sum() if x.shape[0] % 4 == 0 else -x.sum())
    captured = check(function, [(randn(12),), (randn(40),)], ({0: Dim("T", min=2, max=64)},))
    symbol = captured.graph.symbols["T"]
    assert (symbol.minimum, symbol.maximum) == (4, 64)
    assert [guard.text for guard in captured.graph.guards] != []
    with pytest.raises(Rejected):
        Run(captured)(randn(13))


def test_conditions_on_two_lengths_stay_guards() -> None:
    captured = check(
        Compared(),
        [(randn(6), randn(4)), (randn(7), randn(2))],
        ({0: Dim("T", min=2, max=64)}, {0: Dim("S", min=2, max=64)}),
    )
    with pytest.raises(Rejected):
        Run(captured)(randn(4), randn(6))


def test_a_length_that_python_counts_is_fixed() -> None:
    function = Function(lambda x: torch.stack([x[i] * i for i in range(x.shape[0])]))
    captured = check(function, [(randn(6, 2),)], ({0: Dim("T", min=2, max=64)},))
    assert captured.graph.symbols == {}
    assert any("T is fixed at 6" in note for note in captured.notes)


def test_examples_are_left_as_they_were() -> None:
    x = randn(4, 6).t()
    function = Function(lambda x: x * 2)
    shapes = ({0: Dim("T", min=2, max=9)},)
    for _ in range(2):  # a dynamic export marks the tensors it saw
        captured = capture(function, (x,), None, shapes, keep=KEEP)
    assert str(captured.graph.inputs[0].type) == "f32[T,4]"
    capture(function, (x,), None, None, keep=KEEP)


# -- numbers ---------------------------------------------------------------------------------------

NUMBERS = {
    "root": lambda x: x * x.shape[1] ** -0.5 + x.shape[1] ** 0.5,
    "quotient": lambda x: (x / x.shape[1]).sum(1) * (1 / x.shape[1]),
    "power": lambda x: x.abs() ** (1 + 1 / x.shape[1]),
    "base": lambda x: (x.shape[1] / 4) ** x,
    "clamp": lambda x: x.clamp(min=-1 / x.shape[1], max=0.5 * x.shape[1]),
    "fill": lambda x: x + torch.full((2, x.shape[1]), 1.5 * x.shape[1]),
    "mask": lambda x: x.masked_fill(x > 0.01 * x.shape[1], 0.3 * x.shape[1]),
    "alpha": lambda x: torch.add(x, x, alpha=0.5 * x.shape[1]),
    "reverse": lambda x: 0.5 * x.shape[1] - x,
    "half": lambda x: x[:, : math.floor(x.shape[1] * 0.5)] * 2,
    "integers": lambda x: torch.arange(x.shape[1]) * (x.shape[1] / 7),
    "root of product": lambda x: x.sum() / (x.shape[1] * x.shape[0]) ** 0.5,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_computed_from_a_length_follow_it(name: str) -> None:
    check(
        Function(NUMBERS[name]),
        [(randn(2, 12),), (randn(2, 5),), (randn(2, 33),)],
        ({1: Dim("T", min=2, max=64)},),
    )


DATA = {
    "item": lambda x: x * x.sum().item(),
    "item arithmetic": lambda x: x * (x.sum().item() * 2 + 1),
    "integer item": lambda x: x + x.argmax().item(),
    "nonzero": lambda x: torch.nonzero(x > 0),
    "masked select": lambda x: x[x > 0] * 2,
    "masked sum": lambda x: torch.masked_select(x, x > 0).sum(),
    "repeat": lambda x: torch.repeat_interleave(x, (x > 0).to(torch.int64) + 1),
    "unique": lambda x: torch.unique((x * 3).to(torch.int64)),
}


@pytest.mark.parametrize("name", DATA)
def test_numbers_and_sizes_read_from_data(name: str) -> None:
    calls = [(randn(12),), (randn(13)[:12],), (-randn(14)[:12],)]
    captured = check(Function(DATA[name]), calls)
    assert all(info.data for info in captured.graph.symbols.values())


def test_a_scale_computed_from_the_length_is_refused_where_no_tensor_fits() -> None:
    function = Function(lambda x: torch.arange(0, 1, 1 / x.shape[0]))
    with pytest.raises(CaptureError):
        capture(function, (randn(8),), None, ({0: Dim("T", min=2, max=64)},), keep=KEEP)


# -- calls -----------------------------------------------------------------------------------------


class Scalars(nn.Module):
    def forward(
        self, x: Tensor, scale: float, *, shift: int = 0, mode: str = "a", flag: bool = False,
        mask: Tensor | None = None,
    ) -> Any:  # fmt: skip
        y = torch.roll(x * scale, shift)
        return {"y": -y if flag else y, "mode": None, "pair": (x, 3, mask)}


def test_python_scalars_are_constants_of_the_call() -> None:
    module, x = Scalars(), randn(4)
    captured = capture(module, (x, 0.5), {"shift": 1, "flag": True, "mode": "b"}, keep=KEEP)
    assert captured.positional_names == ("x", "scale")
    assert captured.arguments == {"tuple": [{"leaf": 0}, {"const": 0.5}]}
    run = Run(captured)
    found = run(x, 0.5, shift=1, flag=True, mode="b")
    torch.testing.assert_close(found["y"], module(x, 0.5, shift=1, flag=True)["y"])
    assert found["mode"] is None
    assert found["pair"][1:] == (3, None)
    assert found["pair"][0] is x
    for change in ({"shift": 2}, {"flag": False}, {"mode": "a"}):
        with pytest.raises(Rejected):
            run(x, 0.5, **{"shift": 1, "flag": True, "mode": "b", **change})


class Lengths(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x.shape[0], x.shape[0] * 2 + 1, x[0], x


def test_lengths_are_results() -> None:
    calls = [(randn(5),), (randn(9),)]
    check(Lengths(), calls, ({0: Dim("T", min=2, max=64)},))


# -- states, aliases, weights ----------------------------------------------------------------------


class Cache(nn.Module):
    rows: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.ones(4, 3))
        self.register_buffer("count", torch.tensor(2), persistent=False)

    def forward(self, x: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        self.rows.index_copy_(0, place, x)
        self.count = self.count + 1
        return self.rows.sum(1), self.count


def test_buffers_that_change_are_states() -> None:
    calls = [(randn(1, 3), torch.tensor([i])) for i in (1, 3, 1)]
    captured = check(Cache(), calls)
    assert set(captured.state_names) == {"rows", "count"}
    assert {v.name: float(t.sum()) for v, t in captured.graph.states.items()} == {
        "rows": 12.0,
        "count": 2.0,
    }


class Shared(nn.Module):
    rows: Tensor
    first: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(4, 3))
        self.register_buffer("first", self.rows[0])

    def forward(self, x: Tensor) -> Tensor:
        self.rows.add_(x)
        return self.first + 1


def test_states_in_shared_memory_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="memory of their own"):
        capture(Shared(), (randn(4, 3),), keep=KEEP)


def _write_into_a_view(x: Tensor) -> tuple[Tensor, Tensor]:
    x[:, 1].mul_(2)
    row = x[0]
    row.add_(1)
    return x.sum(), row


def test_inputs_changed_through_views() -> None:
    check(Function(_write_into_a_view), [(randn(3, 4),), (randn(4, 4)[:3],)])


def test_checks_on_matrices_stay_with_their_operator() -> None:
    captured = check(Function(torch.linalg.inv), [(torch.eye(3) + 0.1 * randn(3, 3),)])
    with pytest.raises(RuntimeError, match="singular"):
        Run(captured)(torch.zeros(3, 3))


def test_results_that_are_views_inputs_or_each_other() -> None:
    check(Function(lambda x: (x, x.t(), x[0], x)), [(randn(3, 4),)])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        slab = randn(8 * 16)
        self.parts = nn.ParameterList(nn.Parameter(slab[16 * i : 16 * i + 16]) for i in range(8))
        self.table = nn.Embedding(10, 16)
        self.head = nn.Linear(16, 10, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for part in self.parts:
            x = x * part
        result: Tensor = self.head(x)
        return result


def test_shared_weights_are_kept_once() -> None:
    module = Tied()
    captured = capture(module, (torch.tensor([[1, 2]]),), keep=KEEP)
    found = sum(t.numel() for t in captured.graph.weights.values())
    assert found == 8 * 16 + 10 * 16
    assert len(captured.graph.weights) == 9


# -- refusals --------------------------------------------------------------------------------------


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x


class Foreign(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy().copy())


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5, training=True)


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ randn(3, 3)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.zeros(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        self.kept.add_(x)
        return self.kept + 1


@pytest.mark.parametrize(
    ("module", "what", "hint"),
    [
        (Counter(), "found calls changed", "register_buffer"),
        (Branch(), "cannot be captured", "torch.where"),
        (Foreign(), "cannot be captured", "numpy"),
        (Noise(), "deterministic", "eval"),
        (Broken(), "cannot be captured", "eager"),
    ],
)
def test_refusals_name_the_line_and_the_remedy(module: nn.Module, what: str, hint: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(module, (randn(4, 5),), keep=KEEP)
    assert what in str(caught.value)
    assert hint in caught.value.hint
    line = type(module).forward.__code__.co_firstlineno
    path, _, number = caught.value.where.rpartition(":")
    assert path.endswith("test_capture.py")
    assert line <= int(number) <= line + 4


def test_a_tensor_that_changes_must_be_a_buffer() -> None:
    with pytest.raises(CaptureError, match="mutated") as caught:
        capture(Kept(), (randn(4, 5),), keep=KEEP)
    assert "register_buffer" in caught.value.hint


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + 1


def test_a_counter_that_does_not_matter_is_left_alone() -> None:
    module = Counted()
    check(module, [(randn(3),), (randn(3),)])
    assert module.calls == 0


def test_missing_and_unknown_inputs() -> None:
    with pytest.raises(UsageError, match="missing a required argument: 'scale'"):
        capture(Scalars(), (randn(4),), keep=KEEP)
    with pytest.raises(UsageError, match="unexpected keyword argument 'scal'"):
        capture(Scalars(), (randn(4), 1.0), {"scal": 1.0}, keep=KEEP)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def test_named_tuples_are_tuples() -> None:
    captured = capture(Function(lambda x: Pair(x + 1, x - 1)), (randn(3),), keep=KEEP)
    assert captured.results == {"tuple": [{"leaf": 0}, {"leaf": 1}]}


def test_what_args_takes_keeps_the_modules_names() -> None:
    class Spread(nn.Module):
        input_names = ("a.x", "b")

        def forward(self, *inputs: Tensor) -> Tensor:
            return inputs[0] + inputs[1]

    captured = capture(Spread(), (randn(3), randn(3)), keep=KEEP)
    assert captured.positional_names == ("a.x", "b")
    assert [value.name for value in captured.graph.inputs] == ["a_x", "b"]


def test_a_guard_that_divides_by_zero_does_not_hold() -> None:
    length = sympy.Symbol("T", integer=True, positive=True)
    condition = sympy.Eq(Mod(sympy.Integer(4), FloorDiv(length, 2)), 0)
    assert truth(condition, {length: sympy.Integer(1)}) == sympy.false
    assert truth(condition, {length: sympy.Integer(4)}) == sympy.true
