"""Runs a rule whose first operand is a state with the new content in the state's own memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import torch

from graphc.lowering.context import Dim, View
from tests.kernel_harness import FakeContext, lower


def run_in_place(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *, isa: str,
    parts: int = 3, result: int = 1,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """As `run_rule`, with result number `result` where args[0] is, which is left as it was."""
    state = args[0]
    places: dict[int, View] = {}
    made: list[torch.Tensor] = []
    plain_view, plain_outputs = FakeContext._tensor_view, FakeContext.outputs

    def place(context: FakeContext) -> View:
        if id(context) not in places:
            view, memory = context._allocate(state.shape, state.dtype)
            memory.copy_(state)
            places[id(context)] = view
            made.append(memory)
        return places[id(context)]

    def tensor_view(self: FakeContext, tensor: torch.Tensor, shape: tuple[Dim, ...]) -> View:
        return place(self) if tensor is state else plain_view(self, tensor, shape)

    def outputs(self: FakeContext, node: Any) -> tuple[View, ...]:
        views = list(plain_outputs(self, node))
        views[result] = place(self)
        results = list(self.results)
        results[result] = made[-1]
        self.results = tuple(results)
        return tuple(views)

    with (
        mock.patch.object(FakeContext, "_tensor_view", tensor_view),
        mock.patch.object(FakeContext, "outputs", outputs),
    ):
        context = lower(name, args, kwargs, isa=isa)
        context.execute(parts)
    return tuple(t.clone() for t in context.results)
