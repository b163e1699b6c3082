"""The one torch.library object of graphc, and `define`, which registers an operator with its
eager reference and its meta function.

`Library.define/impl` rather than `custom_op`: a quarter of the call cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: the readable truth by operator, in plain torch
REFERENCES: dict[str, Callable[..., Any]] = {}
LIBRARY = torch.library.Library("graphc", "DEF")


def define(
    schema: str, meta: Callable[..., Any]
) -> Callable[[Callable[..., Any]], torch._ops.OpOverload]:
    """Registers `graphc::<schema>`; the decorated function is the readable truth in plain torch,
    `meta` answers types on fake tensors."""

    def register(reference: Callable[..., Any]) -> torch._ops.OpOverload:
        name = schema.split("(")[0]
        REFERENCES[name] = reference
        LIBRARY.define(schema)
        LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
        torch.library.register_fake(f"graphc::{name}", meta, lib=LIBRARY)
        overload = getattr(torch.ops.graphc, name).default
        assert isinstance(overload, torch._ops.OpOverload)
        return overload

    return register
