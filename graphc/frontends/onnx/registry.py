"""The table of ONNX operators: `@operator("Name", since=version)` over one small function.

A handler takes the node, then the ONNX inputs in their order as positional parameters, then the
ONNX attributes as keyword parameters with their defaults, and returns a tensor or a tuple:

    @operator("LeakyRelu")
    def leaky_relu(node: OnnxNode, x: Tensor, *, alpha: float = 0.01) -> Tensor:
        return torch.nn.functional.leaky_relu(x, alpha)

The annotation of an input says how it arrives (see `values`): `Tensor`, `Ints`, `Int`, `Floats`,
`Bool`, `Known` or `Raw`. A handler of control flow takes a `scope` after the node: where its
subgraphs find the names of the enclosing graph. An attribute that the handler does not name is
refused, never ignored.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args, get_origin

Handler = Callable[..., Any]
H = TypeVar("H", bound=Handler)


@dataclass(frozen=True)
class Operator:
    """One version of an operator: its handler and how its parameters are passed."""

    name: str
    domain: str
    since: int
    handler: Handler
    inputs: tuple[str, ...]
    variadic: str | None
    attributes: frozenset[str]
    required: int
    scoped: bool


_OPERATORS: dict[tuple[str, str], list[Operator]] = {}
_STATIC: dict[tuple[str, str], Handler] = {}
_PREPARE: dict[tuple[str, str], Handler] = {}


def _kind(annotation: Any) -> str:
    """`Tensor | None` is a tensor; `Annotated[..., kind]` names its kind."""
    metadata = getattr(annotation, "__metadata__", None)
    if metadata:
        return str(metadata[0])
    if get_origin(annotation) is not None:
        for argument in get_args(annotation):
            if getattr(argument, "__metadata__", None):
                return str(argument.__metadata__[0])
    return "tensor"


def operator(
    *names: str, since: int = 1, domain: str = "", attributes: Sequence[str] = ()
) -> Callable[[H], H]:
    """Registers a handler for the named operators from opset version `since` on. Its keyword-only
    parameters are the attributes it takes; `attributes` names those it takes as `**`."""

    def register(handler: H) -> H:
        hints = typing.get_type_hints(handler, include_extras=True)
        parameters = list(inspect.signature(handler).parameters.values())[1:]
        scoped = bool(parameters) and parameters[0].name == "scope"
        parameters = parameters[scoped:]
        inputs, variadic, required = [], None, 0
        for parameter in parameters:
            if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
                inputs.append(_kind(hints[parameter.name]))
                required += parameter.default is inspect.Parameter.empty
            elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                variadic = _kind(hints[parameter.name])
        keywords = {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
        taken = frozenset({*keywords, *attributes})
        for name in names:
            entry = Operator(
                name, domain, since, handler, tuple(inputs), variadic, taken, required, scoped
            )
            versions = _OPERATORS.setdefault((domain, name), [])
            versions.append(entry)
            versions.sort(key=lambda o: o.since)
        return handler

    return register


def static(*names: str, domain: str = "") -> Callable[[H], H]:
    """Registers the rule that evaluates an operator on `Static` inputs with symbolic items.

    The rule takes (node, *inputs, **attributes) as the handler does, with inputs unconverted, and
    returns a Static, or NotImplemented to let the tensor handler do it.
    """

    def register(rule: H) -> H:
        for name in names:
            _STATIC[domain, name] = rule
        return rule

    return register


def prepare(*names: str, domain: str = "") -> Callable[[H], H]:
    """Registers what is precomputed at load from constant inputs: (node, constants) -> tensors.

    `constants` has one real tensor or None per input. The returned tensors become buffers that the
    handler reads with `node.packed(key)`. The rule names the inputs it replaces with
    `node.consumed`; those arrive as None in the handler.
    """

    def register(rule: H) -> H:
        for name in names:
            _PREPARE[domain, name] = rule
        return rule

    return register


def find_operator(domain: str, name: str, version: int) -> Operator | None:
    """The newest registered version of an operator that is not newer than `version`."""
    found = None
    for entry in _OPERATORS.get((domain, name), ()):
        if entry.since <= version:
            found = entry
    return found


def find_static(domain: str, name: str) -> Handler | None:
    return _STATIC.get((domain, name))


def find_prepare(domain: str, name: str) -> Handler | None:
    return _PREPARE.get((domain, name))


def operators() -> list[Operator]:
    """Every registered operator version, sorted by domain, name and version."""
    return [o for key in sorted(_OPERATORS) for o in _OPERATORS[key]]
