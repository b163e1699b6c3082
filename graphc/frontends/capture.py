"""One door for all frontends: torch.export, then the Graph.

`capture` traces an nn.Module; `import_program` turns an ExportedProgram into a Graph and keeps
what torch.export knows only in its guards.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import graphc.ops
from graphc.errors import CaptureError, GraphcError, UnsupportedError
from graphc.frontends.aliases import overlapping, shared_state
from graphc.frontends.importer import Importer
from graphc.frontends.locations import raised_at
from graphc.frontends.minimum import lower_minimum
from graphc.frontends.naming import (
    Asked,
    Place,
    asked_dims,
    bound,
    combined,
    positional_names,
    relaxed,
    spread_names,
)
from graphc.frontends.ranges import narrow
from graphc.frontends.side_effects import check_unchanged, plain_numbers, watched
from graphc.frontends.tracing import tracing
from graphc.frontends.trees import describe_tree, leaf_names
from graphc.ir.graph import Graph
from graphc.ir.types import UNBOUNDED


@dataclass(frozen=True)
class Captured:
    """A Graph and how the user calls it.

    arguments/keywords/results are JSON trees as graphc.plan.Plan documents them;
    `positional_names` are forward's parameter names of the positional arguments.
    `requested` gives each named length's range as the user asked for it (the proven one is in
    graph.symbols); `notes` say where the two differ.
    `result_names` names each result leaf. `out_spec` is torch's tree of the results, None where the
    graph was read back from a file.
    """

    graph: Graph
    arguments: Any
    keywords: Any
    results: Any
    positional_names: tuple[str, ...]
    state_names: tuple[str, ...]
    out_spec: Any
    notes: tuple[str, ...] = ()
    requested: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    result_names: tuple[str, ...] = ()


def noted(captured: Captured, note: str) -> Captured:
    """With one more note for the user."""
    return replace(captured, notes=(*captured.notes, note))


class _Opaque(TorchFunctionMode):
    """Recurrent layers become one operator instead of a loop unrolled over time."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("lstm", "gru") and len(args) == 9 and isinstance(args[3], bool):
            if name == "lstm":
                return graphc.ops.lstm(*args[:5], float(args[5]), *args[6:])
            return graphc.ops.gru(*args[:5], float(args[5]), *args[6:])
        return func(*args, **(kwargs or {}))


def capture(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    *,
    keep: frozenset[str],
) -> Captured:
    """Captures `module` on example inputs.

    Args:
        dynamic_shapes: as torch.export takes them. Where the model is not proven for the whole
            range asked for, the capture is repeated with that dimension left free, and the
            conditions it relied on become guards of the graph.
        keep: operator names that must reach the passes undecomposed.

    Raises:
        UsageError: forward does not take these arguments.
        CaptureError: with the user's file and line, and the remedy.
    """
    keywords = dict(kwargs or {})
    combined(module, args, keywords)
    if hasattr(dynamic_shapes, "dynamic_shapes"):  # torch.export.ShapesCollection
        dynamic_shapes = dynamic_shapes.dynamic_shapes(module, args, keywords)
    asked = asked_dims(module, args, keywords, dynamic_shapes)
    plain = frozenset(a.name for a in asked.values() if not a.derived)
    before = plain_numbers(module)
    with _families(module), watched(module) as after:
        program, notes = _export(module, args, keywords, bound(dynamic_shapes, plain))
    check_unchanged(module, before, after, *_examples(args, keywords))
    program = _decompose(program, keep)
    captured = _assemble(program, asked, notes, names=spread_names(module, args))
    with _families(module):
        graph, refused = lower_minimum(
            captured.graph, program, module, *_examples(args, keywords),
            {place.name: place for place in asked.values() if not place.derived},
        )  # fmt: skip
    return replace(
        captured,
        graph=graph,
        positional_names=positional_names(module, len(args)),
        notes=(*captured.notes, *refused),
    )


def _families(module: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Parts of transformers' models that cannot be traced for all lengths are operators inside."""
    if not any(type(m).__module__.startswith("transformers.models.") for m in module.modules()):
        return contextlib.nullcontext()
    from graphc.frontends.decoder.families import substituted

    return substituted(module)


def _examples(args: Any, kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example inputs as row-major tensors of their own (a dynamic export leaves marks on the
    tensors it saw, and a graph's inputs are row-major)."""

    def fresh(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            return leaf.detach().contiguous()
        return leaf

    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    made_args, made_kwargs = pytree.tree_unflatten([fresh(leaf) for leaf in leaves], spec)
    return made_args, made_kwargs


def _export(
    module: torch.nn.Module, args: Any, kwargs: Mapping[str, Any], dynamic_shapes: Any
) -> tuple[torch.export.ExportedProgram, list[str]]:
    """The exported program, and a note if the range asked for was not proven."""
    attempts = [dynamic_shapes]
    if dynamic_shapes is not None:
        attempts.append(relaxed(dynamic_shapes))
    notes: list[str] = []
    failure: Exception | None = None
    for shapes in attempts:
        fresh_args, fresh_kwargs = _examples(args, kwargs)
        try:
            with tracing(), _Opaque():
                program = torch.export.export(
                    module, fresh_args, fresh_kwargs, dynamic_shapes=shapes, strict=False
                )
            return program, notes
        except Exception as error:  # torch.export raises many unrelated classes
            failure = failure or error
            if not _is_constraint(error):
                raise capture_error(error) from error
            notes = [
                "the model is not proven for the whole range asked for; the conditions on lengths "
                "that it relies on are checked at each run"
            ]
    assert failure is not None
    raise capture_error(failure) from failure


def _is_constraint(error: Exception) -> bool:
    """Whether a capture failed on the range asked for, not on the model."""
    text = str(error)
    words = ("Constraints violated", "specializ", "marked as dynamic", "dynamic_shapes", "Dim(")
    return any(word in text for word in words) and "data-dependent" not in text


_REMEDIES = (
    (
        ("GuardOnDataDependent", "data-dependent", "Data dependent", "DataDependentOutput"),
        "the control flow depends on tensor values; use torch.where, bound the value with "
        "torch._check, or decide outside of the model",
    ),
    (
        ("mutated in the forward",),
        "register the tensor with register_buffer; buffers that change are states of the plan",
    ),
    (("onstraint", "specializ"), "give the dimension a smaller range, or leave it fixed"),
    (
        ("missing a required argument", "missing 1 required", "required positional"),
        "pass every input that the model's forward needs",
    ),
    (
        ("FakeTensor", "fake tensor", "Fake tensor", ".numpy()", "numpy"),
        "a tensor leaves torch inside forward (numpy, a Python list, a foreign library); keep the "
        "computation in torch operators, or wrap the foreign code with torch.library.custom_op",
    ),
)
_OTHERWISE = (
    "run the module's forward on these inputs in eager torch first: what fails there cannot be "
    "captured; side effects and foreign libraries belong outside of forward"
)


def capture_error(error: Exception) -> GraphcError:
    """Any exception of a capture as an error of ours: what, the user's line, the remedy."""
    if isinstance(error, GraphcError):
        return error
    text, kind = str(error).strip(), type(error).__name__
    user = re.search(r'File "([^"]+)", line (\d+), in forward', text)
    where = f"{user.group(1)}:{user.group(2)}" if user else raised_at(error)
    hint = next(
        (remedy for words, remedy in _REMEDIES if any(w in text or w in kind for w in words)),
        _OTHERWISE,
    )
    cls = UnsupportedError if isinstance(error, NotImplementedError) else CaptureError
    return cls(f"the model cannot be captured: {kind}: {_brief(text, 500)}", where=where, hint=hint)


def _brief(text: str, limit: int) -> str:
    """The first paragraph of a message, on one line."""
    lines: list[str] = []
    for line in text.splitlines():
        if not line.strip() and lines:
            break
        lines.append(line.strip())
    flat = " ".join(lines)
    return flat if len(flat) <= limit else flat[: limit - 3] + "..."


#: operators that raise on singular matrices: taken apart, the check becomes a side effect (a token)
#: outside of the data flow; whole, it stays with the operator
_CHECKED = frozenset(
    f"aten.{name}.default"
    for name in (
        "inverse", "linalg_inv", "linalg_solve", "linalg_cholesky", "linalg_ldl_factor",
        "linalg_lu_factor", "linalg_tensorinv", "linalg_tensorsolve",
    )
)  # fmt: skip


@lru_cache(maxsize=4)  # torch makes a table of a thousand entries anew each time
def decompositions(keep: frozenset[str]) -> dict[Any, Any]:
    """torch's decomposition table without the operators that graphc lowers itself."""
    table = torch.export.default_decompositions()
    whole = keep | _CHECKED
    return {op: table[op] for op in list(table.keys()) if str(op) not in whole}


def _decompose(
    program: torch.export.ExportedProgram, keep: frozenset[str]
) -> torch.export.ExportedProgram:
    with tracing():
        try:
            made: torch.export.ExportedProgram = program.run_decompositions(decompositions(keep))
            return made
        except Exception as error:
            # torch gives up on buffers that change and share memory, with an assertion of its own
            held = {**program.state_dict, **program.constants}
            shared = overlapping({k: t for k, t in held.items() if isinstance(t, torch.Tensor)})
            if isinstance(error, AssertionError) and shared:
                raise shared_state(shared[0]) from error
            raise capture_error(error) from error


def import_program(
    program: torch.export.ExportedProgram,
    *,
    keep: frozenset[str],
    asked: Mapping[Place, Asked] | None = None,
) -> Captured:
    """Turns an ExportedProgram into a Graph (functional, undecomposed where `keep` says so).

    Args:
        asked: names and ranges by (flat input, dimension); other lengths are named after their
            input and dimension.

    Raises:
        CaptureError: the program holds something that cannot be a Graph.
    """
    captured = _assemble(_decompose(program, keep), asked or {}, [], saved=True)
    top = program.module_call_graph[0].signature
    names = tuple(getattr(top, "forward_arg_names", None) or ())
    count = program.call_spec.in_spec.child(0).num_children if program.call_spec.in_spec else 0
    if len(names) < count:
        names = tuple(f"args_{i}" for i in range(count))
    return replace(captured, positional_names=names[:count])


def _assemble(
    program: torch.export.ExportedProgram,
    asked: Mapping[Place, Asked],
    notes: list[str],
    *,
    saved: bool = False,
    names: Mapping[int, str] | None = None,
) -> Captured:
    importer = Importer(program, asked, saved=saved, names=names)
    try:
        with tracing():
            graph = narrow(importer.run())
    except GraphcError:
        raise
    except Exception as error:
        raise capture_error(error) from error
    requested = {a.name: (a.minimum, a.maximum) for a in asked.values()}
    in_spec, out_spec = program.call_spec.in_spec, program.call_spec.out_spec
    arguments, keywords = describe_tree(in_spec, importer.leaves)["tuple"]
    results = describe_tree(out_spec, [{"leaf": i} for i in range(len(graph.results))])
    said = [*notes, *importer.notes]
    for name, (low, high) in requested.items():
        info = graph.symbols.get(name)
        if info is not None and (info.minimum > max(low, 2) or info.maximum < high):
            wanted = f"{low}..{high}" if high < UNBOUNDED else f"{low} and above"
            said.append(f"{name} is proven for {info.minimum}..{info.maximum}, asked for {wanted}")
    return Captured(
        graph, arguments, keywords, results, (), importer.state_names, out_spec, tuple(said),
        requested, leaf_names(results, len(graph.results)),
    )  # fmt: skip
