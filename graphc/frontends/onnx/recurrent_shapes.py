"""Shapes of torch's fused recurrences for symbolic lengths.

Where shapes are inferred (torch.export, fake tensors), torch runs the decomposition of aten.lstm,
aten.gru and aten.rnn into single steps, which fixes the sequence length to that of the example.
Inside `whole_recurrences()` their shapes are stated instead, so the operator stays whole and the
length symbolic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

Tensor = torch.Tensor
KEYS = (
    torch._C.DispatchKey.Autograd,
    torch._C.DispatchKey.CompositeImplicitAutograd,
    torch._C.DispatchKey.Meta,
)


def _output(x: Tensor, hidden: Tensor, bidirectional: bool) -> Tensor:
    """[T, B, directions * H] (or batch first) for states [layers * directions, B, H]."""
    return x.new_empty([x.shape[0], x.shape[1], hidden.shape[2] * (2 if bidirectional else 1)])


def _lstm_shapes(x: Tensor, hx: list[Tensor], *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _output(x, hx[0], rest[5]), torch.empty_like(hx[0]), torch.empty_like(hx[1])


def _single_state_shapes(x: Tensor, hx: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _output(x, hx, rest[5]), torch.empty_like(hx)


def _for_fakes(shapes: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """`shapes` for fake tensors; real ones are computed as ever."""

    def kernel(x: Tensor, *rest: Any) -> Any:
        return (shapes if isinstance(x, FakeTensor) else original)(x, *rest)

    return kernel


@contextmanager
def whole_recurrences() -> Iterator[None]:
    """Within it, aten.lstm, aten.gru and aten.rnn of fake tensors are not decomposed."""
    aten: Any = torch.ops.aten
    rules: dict[Any, Any] = {aten.lstm.input: _lstm_shapes}
    for operator in (aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input):
        rules[operator] = _single_state_shapes
    saved = {operator: dict(operator.py_kernels) for operator in rules}
    try:
        for operator, shapes in rules.items():
            for key in KEYS:
                original = operator.py_kernels.get(key, operator.decompose)
                operator.py_kernels[key] = _for_fakes(shapes, original)
            operator._dispatch_cache.clear()
        yield
    finally:
        for operator, kernels in saved.items():
            operator.py_kernels.clear()
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()
