"""From what the user names to something that can be captured.

pkg.mod:factory, file.py:factory    graphc.frontends.torch_module
x.pt2                               graphc.frontends.exported
x.onnx                              graphc.frontends.onnx_model
a folder with config.json           graphc.frontends.huggingface
demo                                graphc.models.demo
a torch.nn.Module                   as it is
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphc.errors import UsageError
from graphc.frontends.capture import Captured, capture, import_program
from graphc.frontends.inputs import (
    InputType,
    Lengths,
    example,
    float_dtype,
    make_dim,
    parse_input,
    parse_lengths,
    unknown_name,
)
from graphc.frontends.naming import Asked, Place, as_asked, combined, positional_names
from graphc.frontends.torch_module import load_factory
from graphc.ir.types import UNBOUNDED

FORMS = "a model is demo, pkg.mod:factory, file.py:factory, x.pt2, x.onnx or a checkpoint folder"


@dataclass(frozen=True)
class Source:
    """A model and an example call of it, ready for `capture_source`.

    `kind` is "python", "pt2", "onnx", "huggingface" or "module". For a .pt2 file `program` is what
    is built, `module` the same program as a module, and `named` the names and ranges that the user
    gave its lengths, by (flat input, dimension).
    """

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dynamic_shapes: Any
    kind: str
    name: str
    program: torch.export.ExportedProgram | None = None
    named: Mapping[Place, Asked] = field(default_factory=dict)


def resolve(
    model: str | torch.nn.Module,
    *,
    inputs: Sequence[str] = (),
    dynamic: Sequence[str] = (),
    dtype: str | None = None,
) -> Source:
    """Loads a model and makes its example call.

    Args:
        model: one of the forms above.
        inputs: types of inputs, "x=f32[1,T,384]"; a name in place of a size is a free length.
            Numbers, "rate=16000" or "axes=[0,1]", fix the input of an ONNX file to that value.
        dynamic: ranges "T=1:2048", and names of dimensions "x.1=T".
        dtype: floating-point weights (and example inputs) are converted to it.

    Raises:
        UsageError: no such model, or a name that it does not have.
        CaptureError: the user's code raised.
    """
    types = [parse_input(text) for text in inputs]
    lengths = parse_lengths(dynamic)
    if isinstance(model, str) and Path(model).suffix == ".onnx":
        fixed = {t.name: t.value for t in types if t.dims is None}
        types = [t for t in types if t.dims is not None]
        source = _onnx(Path(model), lengths, fixed)
    else:
        source = _load(model, lengths, dtype)
    if dtype is not None:
        source = _converted(source, dtype)
    if source.program is not None:
        return _named_program(source, types, lengths)
    return _with_inputs(source, types, lengths)


def capture_source(source: Source, keep: frozenset[str]) -> Captured:
    """The Graph of a source.

    Args:
        keep: operator names that must reach the passes undecomposed.

    Raises:
        CaptureError: the model cannot be one static graph.
    """
    if source.program is not None:
        return import_program(source.program, keep=keep, asked=source.named)
    captured = capture(source.module, source.args, source.kwargs, source.dynamic_shapes, keep=keep)
    names = tuple(getattr(source.module, "output_names", ()) if source.kind == "onnx" else ())
    if len(names) == len(captured.result_names):
        return replace(captured, result_names=names)
    return captured


def _load(model: str | torch.nn.Module, lengths: Lengths, dtype: str | None) -> Source:
    if isinstance(model, torch.nn.Module):
        return Source(model, (), {}, None, "module", type(model).__name__)
    if model == "demo":
        from graphc.models.demo import encoder

        return _python("demo", *encoder())
    path = Path(model)
    if path.is_dir():
        from graphc.frontends.huggingface import load_checkpoint

        module, kwargs, shapes = load_checkpoint(path, dtype)
        return Source(module, (), kwargs, shapes, "huggingface", path.resolve().name)
    if path.suffix == ".pt2":
        from graphc.frontends.exported import load_exported

        program = load_exported(path)
        args, kwargs = program.example_inputs or ((), {})
        return Source(
            program.module(), tuple(args), dict(kwargs), None, "pt2", path.stem, program
        )  # fmt: skip
    if ":" in model:
        return _python(model.rpartition(":")[2], *load_factory(model))
    raise UsageError(f"expected a model, found {model!r}", hint=FORMS)


def _python(name: str, module: torch.nn.Module, args: Any, kwargs: Any, shapes: Any) -> Source:
    return Source(module, tuple(args), dict(kwargs), shapes, "python", name)


def _onnx(path: Path, lengths: Lengths, fixed: Mapping[str, object]) -> Source:
    from graphc.frontends.onnx_model import load_onnx

    module = load_onnx(path, fixed=fixed)
    sizes = {name: low for name, (low, _) in lengths.ranges.items() if low > 1}
    known = {d for spec in module.input_specs for d in spec.dims or () if isinstance(d, str)}
    examples = module.example_inputs({n: s for n, s in sizes.items() if n in known})
    return Source(module, examples, {}, module.dynamic_shapes(), "onnx", path.stem)


def _converted(source: Source, dtype: str) -> Source:
    wanted = float_dtype(dtype)
    if source.kind in ("pt2", "onnx"):
        raise UsageError(
            f"expected no dtype for a {source.kind} file, found {dtype}",
            hint="the types are part of the file; convert the model before it is saved",
        )
    # .to also converts buffers; tied weights stay tied
    module = source.module.to(wanted)

    def leaf(item: Any) -> Any:
        if isinstance(item, torch.Tensor) and item.dtype.is_floating_point:
            return item.to(wanted)
        return item

    args, kwargs = pytree.tree_map(leaf, (source.args, dict(source.kwargs)))
    return replace(source, module=module, args=args, kwargs=kwargs)


class _Call:
    """The example call as one flat table of named arguments."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.parameters = list(inspect.signature(source.module.forward).parameters.values())
        self.positional = positional_names(source.module, len(source.args))
        self.values: dict[str, Any] = {
            **dict(zip(self.positional, source.args, strict=True)),
            **source.kwargs,
        }
        self.shapes: dict[str, Any] = dict(self._shapes())

    def _shapes(self) -> Iterator[tuple[str, Any]]:
        """dynamic_shapes by argument name; what *args takes is spread."""
        given = self.source.dynamic_shapes
        if given is None:
            return
        tree = combined(self.source.module, self.source.args, self.source.kwargs)
        if isinstance(given, Mapping):
            known = given
        else:
            known = dict(zip(tree, given, strict=False))
        kinds = {p.name: p.kind for p in self.parameters}
        for name, shapes in known.items():
            if kinds.get(name) is inspect.Parameter.VAR_POSITIONAL:
                first = len(self.positional) - len(tree[name])
                yield from zip(self.positional[first:], shapes or (), strict=False)
            elif kinds.get(name) is inspect.Parameter.VAR_KEYWORD:
                yield from (shapes or {}).items()
            else:
                yield name, shapes

    def accepts(self, name: str) -> bool:
        if name in self.values:
            return True
        return any(
            p.name == name or p.kind is p.VAR_KEYWORD
            for p in self.parameters
            if p.kind is not p.VAR_POSITIONAL
        )

    def names(self) -> list[str]:
        known = [p.name for p in self.parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        return list(dict.fromkeys([*self.values, *known]))

    def rebuild(self) -> Source:
        """The source with the table's values: arguments keep the way they were passed."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        by_position = True
        spread = [n for n in self.positional if n not in {p.name for p in self.parameters}]
        shapes: dict[str, Any] = {}
        rest = dict(self.values)
        for p in self.parameters:
            if p.kind is p.VAR_POSITIONAL:
                args += [rest.pop(name) for name in spread]
                shapes[p.name] = tuple(self.shapes.get(name) for name in spread)
                by_position = False
            elif p.kind is p.VAR_KEYWORD:
                kwargs.update(rest)
                if rest:
                    shapes[p.name] = {name: self.shapes.get(name) for name in rest}
                rest = {}
            elif p.name in rest:
                value = rest.pop(p.name)
                shapes[p.name] = self.shapes.get(p.name)
                if (
                    by_position
                    and p.kind is not p.KEYWORD_ONLY
                    and (p.name not in self.source.kwargs)
                ):
                    args.append(value)
                else:
                    kwargs[p.name] = value
                    by_position = False
            else:
                by_position = False
        free = any(
            item is not None and not isinstance(item, int) for item in pytree.tree_leaves(shapes)
        )
        return replace(
            self.source, args=tuple(args), kwargs=kwargs, dynamic_shapes=shapes if free else None
        )  # fmt: skip


def _with_inputs(source: Source, types: Sequence[InputType], lengths: Lengths) -> Source:
    if not types and not lengths.ranges and not lengths.places:
        if not source.args and not source.kwargs:
            _need_inputs(source)
        return source
    call = _Call(source)
    chosen: dict[str, int] = {}
    dims: dict[str, torch.export.Dim] = {}

    def dim(name: str) -> torch.export.Dim:
        return dims.setdefault(name, make_dim(name, lengths.ranges.get(name)))

    for kind in types:
        if not call.accepts(kind.name):
            raise unknown_name(kind.name, call.names(), "an input")
        call.values[kind.name] = example(kind, chosen, lengths.ranges)
        free = {i: dim(d) for i, d in enumerate(kind.dims or ()) if isinstance(d, str)}
        call.shapes[kind.name] = free or None
    for (name, axis), length in lengths.places.items():
        value = call.values.get(name)
        if not isinstance(value, torch.Tensor):
            tensors = [n for n, v in call.values.items() if isinstance(v, torch.Tensor)]
            raise unknown_name(name, tensors, "a tensor input")
        if axis >= value.dim():
            raise UsageError(
                f"expected a dimension of {name}, which has {value.dim()}, found {axis}",
                where=f"{name}.{axis}={length}",
            )
        call.shapes[name] = {**_as_mapping(call.shapes.get(name)), axis: dim(length)}
    known = {a.name for item in _leaves(call.shapes) if (a := as_asked(item)) is not None}
    for name in lengths.ranges:
        if name not in known:
            raise unknown_name(name, sorted(known), "a free length")
    call.shapes = {name: _ranged(item, lengths) for name, item in call.shapes.items()}
    if not call.values:
        _need_inputs(source)
    _in_range(call, lengths)
    return call.rebuild()


def _in_range(call: _Call, lengths: Lengths) -> None:
    """Example inputs longer than the range asked for are cut, shorter ones repeated."""
    for name, shapes in call.shapes.items():
        value = call.values.get(name)
        if not isinstance(value, torch.Tensor):
            continue
        for axis, item in _as_mapping(shapes).items():
            asked = as_asked(item)
            if asked is None or asked.derived or asked.name not in lengths.ranges:
                continue
            size = value.shape[axis]
            wanted = max(asked.minimum, min(size, asked.maximum), min(2, asked.maximum))
            if wanted != size and size:
                value = value.index_select(axis, torch.arange(wanted) % size)
        call.values[name] = value


def _as_mapping(shapes: Any) -> dict[int, Any]:
    if isinstance(shapes, Mapping):
        return dict(shapes)
    return {i: s for i, s in enumerate(shapes or ()) if s is not None}


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, Mapping):
        for item in tree.values():
            yield from _leaves(item)
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _leaves(item)
    else:
        yield tree


def _ranged(tree: Any, lengths: Lengths) -> Any:
    """The same shapes with the ranges asked for put into the named Dims."""
    if isinstance(tree, Mapping):
        return {key: _ranged(item, lengths) for key, item in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)(_ranged(item, lengths) for item in tree)
    asked = as_asked(tree)
    if asked is None or asked.name not in lengths.ranges:
        return tree
    made = make_dim(asked.name, lengths.ranges[asked.name])
    return tree.fn(made) if asked.derived else made


def _need_inputs(source: Source) -> None:
    """A model without inputs is fine; one that needs some must get them."""
    needed = [
        p.name
        for p in inspect.signature(source.module.forward).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise UsageError(
            f"expected example inputs for {', '.join(needed)}, found none",
            hint=f'give their types, such as --input "{needed[0]}=f32[1,T,384]", or return '
            "(module, args) from the factory",
        )


def _named_program(source: Source, types: Sequence[InputType], lengths: Lengths) -> Source:
    """Names and ranges for the lengths of a saved program."""
    if types:
        raise UsageError(
            "expected no input types for a .pt2 file: they are part of the file",
            hint='name its lengths with --dynamic "x.1=T" and narrow them with "T=1:512"',
        )
    program = source.program
    assert program is not None
    shapes = _program_shapes(program)
    named: dict[Place, Asked] = {}
    for (name, axis), length in lengths.places.items():
        found = next((k for k, (n, _) in enumerate(shapes) if n == name), None)
        if found is None:
            raise unknown_name(name, [n for n, _ in shapes], "an input")
        if axis >= len(shapes[found][1]):
            raise UsageError(f"expected a dimension of {name}, found {axis}")
        low, high = lengths.ranges.get(length, (0, UNBOUNDED))
        named[found, axis] = Asked(length, low, high)
    for name, (low, high) in lengths.ranges.items():
        if name in lengths.places.values():
            continue
        default = {f"{n}_{axis}": (k, axis) for k, (n, dims) in enumerate(shapes)
                   for axis, size in enumerate(dims) if isinstance(size, torch.SymInt)}  # fmt: skip
        if name not in default:
            raise unknown_name(name, sorted(default), "a free length")
        named[default[name]] = Asked(name, low, high)
    return replace(source, named=named)


def _program_shapes(program: torch.export.ExportedProgram) -> list[tuple[str, tuple[Any, ...]]]:
    """(name, sizes) of each flat user input; sizes are empty for what is not a tensor."""
    found: list[tuple[str, tuple[Any, ...]]] = []
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.kind.name == "USER_INPUT":
            value = node.meta.get("val")
            found.append((node.name, tuple(value.shape) if hasattr(value, "shape") else ()))
    return found
