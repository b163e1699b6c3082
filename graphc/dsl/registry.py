"""Makes an operator `graphc::<name>` of a definition: schema, types, reference, and the list that
lowering reads.

    name(Tensor? state, Tensor <operands> ..., Tensor? slots=None, *, float <numbers>, bool <flags>)
        -> (Tensor, Tensor)

The results are o [B, T, H, V] of the dtype of the rows over V, and the states behind the last
token. state: float32 [N, H, K, V], sequence b's is state[slots[b]]; without slots [B, H, K, V];
None: zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphc.dsl.interpret import evaluate
from graphc.dsl.laws import check
from graphc.dsl.operator import Definition, SequenceOperator, trace
from graphc.dsl.tiles import K, SequenceOperatorError, V
from graphc.ops import library

#: tokens that the reference takes at once; a result depends on it by rounding only
CHUNK = 16
#: operators by the names of their overloads, "graphc.<name>.default"
DEFINED: dict[str, SequenceOperator] = {}
_LISTENERS: list[Callable[[str], None]] = []


def on_define(listener: Callable[[str], None]) -> None:
    """Calls `listener` with the name of each operator defined so far, and from now on."""
    _LISTENERS.append(listener)
    for name in DEFINED:
        listener(name)


def define(operator: SequenceOperator) -> torch._ops.OpOverload:
    """Registers graphc::<name>.

    Raises SequenceOperatorError where the name is taken, the expressions do not fit each other, or
    a law is broken (graphc/dsl/laws.py).
    """
    name = f"graphc.{operator.name}.default"
    if not operator.name.isidentifier() or hasattr(torch.ops.graphc, operator.name):
        raise SequenceOperatorError(
            f"graphc::{operator.name} is defined already, or no name for an operator"
        )
    check(operator)

    def meta(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return _meta(operator, arguments(operator, args, kwargs))

    def reference(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return run(operator, arguments(operator, args, kwargs))

    overload = library.define(schema(operator), meta)(reference)
    DEFINED[name] = operator
    for listener in _LISTENERS:
        listener(name)
    return overload


def schema(operator: SequenceOperator) -> str:
    """As torch.library reads it."""
    tensors = [f"Tensor {name}" for name in operator.of_kind("rows", "decay", "column")]
    numbers = [f"float {name}" for name in operator.of_kind("number")]
    flags = [f"bool {name}=False" for name in operator.of_kind("flag")]
    parts = ["Tensor? state", *tensors, "Tensor? slots=None"]
    if numbers or flags:
        parts += ["*", *numbers, *flags]
    return f"{operator.name}({', '.join(parts)}) -> (Tensor, Tensor)"


def arguments(
    operator: SequenceOperator, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by name."""
    names = ["state", *operator.of_kind("rows", "decay", "column"), "slots"]
    found: dict[str, Any] = dict.fromkeys(operator.of_kind("flag"), False)
    return {"slots": None, **found, **dict(zip(names, args, strict=False)), **kwargs}


def flags_of(operator: SequenceOperator, given: Mapping[str, Any]) -> frozenset[tuple[str, bool]]:
    """The setting of the flags among arguments, as `trace` takes it."""
    return frozenset((name, bool(given[name])) for name in operator.of_kind("flag"))


def wide_rows(operator: SequenceOperator, axis: str) -> str:
    """The first operand over an axis; over V it has all heads and the dtype of the result."""
    return next(name for name, x in operator.operands().items() if x.axis == axis)


def _meta(operator: SequenceOperator, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    value = given[wide_rows(operator, V)]
    out = value.new_empty(value.shape)
    if given["state"] is not None:
        return out, torch.empty_like(given["state"])
    batch, _, heads, width = value.shape
    kind = torch.promote_types(value.dtype, torch.float32)
    channels = given[wide_rows(operator, K)].shape[3]
    return out, value.new_empty([batch, heads, channels, width], dtype=kind)


def run(
    operator: SequenceOperator, given: dict[str, Any], chunk: int = CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator in torch, `chunk` tokens at a time, in float32 (float64 for float64 values)."""
    value, state = given[wide_rows(operator, V)], given["state"]
    kind = torch.promote_types(value.dtype, torch.float32)
    wide = spread(operator, given, kind)
    channels = given[wide_rows(operator, K)].shape[3]
    batch, tokens, heads, width = value.shape
    slots = given["slots"]
    if state is None:
        now = value.new_zeros([batch, heads, channels, width], dtype=kind)
    else:
        now = (state if slots is None else state[slots.long()]).to(kind)
    out = torch.empty_like(value)
    definition = trace(operator, flags_of(operator, given))
    for t0 in range(0, tokens, chunk):
        o, now = apply(definition, cut(wide, t0, t0 + chunk), now)
        out[:, t0 : t0 + chunk] = o.transpose(1, 2).to(value.dtype)
    if state is None:
        return out, now.contiguous()
    if slots is None:
        return out, now.to(state.dtype).clone()
    return out, state.index_copy(0, slots.long(), now.to(state.dtype))


def apply(
    definition: Definition, operands: dict[str, torch.Tensor], state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(outputs, state behind) of a chunk of operands as `spread` gives them."""
    roots = (definition.output, definition.after)
    output, after = evaluate(roots, {**operands, "state": state}, state.shape[-2])
    return output.expand(*state.shape[:-2], *output.shape[-2:]), after


def spread(
    operator: SequenceOperator, given: Mapping[str, Any], kind: torch.dtype
) -> dict[str, torch.Tensor]:
    """Operands as the interpreter takes them: [B, H, T, channels or 1], one head for each of V."""
    heads = given[wide_rows(operator, V)].shape[2]
    found: dict[str, torch.Tensor] = {}
    for name, operand in operator.of_kind("rows", "decay", "column").items():
        x = given[name].to(kind)
        if x.dim() == 3:
            x = x.unsqueeze(-1)
        if operand.kind == "rows":
            x = x.repeat_interleave(heads // x.shape[2], 2)
        found[name] = x.transpose(1, 2)
    for name in operator.of_kind("number"):
        found[name] = torch.tensor([[given[name]]], dtype=kind)
    return found


def cut(operands: dict[str, torch.Tensor], begin: int, end: int) -> dict[str, torch.Tensor]:
    """Some tokens of what `spread` gives."""
    return {n: x[..., begin:end, :] if x.dim() > 2 else x for n, x in operands.items()}
