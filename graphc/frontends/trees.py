"""torch pytree specs as the JSON trees of a Plan (see graphc.plan.Plan)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphc.errors import UnsupportedError


def describe_tree(spec: Any, leaves: Sequence[Any]) -> Any:
    """The JSON tree of `spec` with `leaves` put in, in order."""
    iterator = iter(leaves)
    return _walk(spec, iterator)


def leaf_names(tree: Any, count: int) -> tuple[str, ...]:
    """A name for each of `count` result leaves of a JSON tree: the keys on the way to it
    ("last_hidden_state", "past.0"), else "output0" by position."""
    names = [f"output{i}" for i in range(count)]

    def visit(item: Any, path: str) -> None:
        if not isinstance(item, dict):
            return
        ((kind, content),) = item.items()
        if kind == "leaf" and path:
            names[content] = path
        elif kind == "dict":
            for key, child in content:
                visit(child, f"{path}.{key}" if path else str(key))
        elif kind in ("tuple", "list"):
            for index, child in enumerate(content):
                inner = isinstance(child, dict) and "leaf" not in child
                visit(child, f"{path}.{index}" if path else str(index) if inner else "")

    visit(tree, "")
    return tuple(names)


def _walk(spec: Any, leaves: Any) -> Any:
    if spec.is_leaf():
        return next(leaves)
    kind = spec.type
    children = [_walk(child, leaves) for child in spec.children()]
    if kind is tuple:
        return {"tuple": children}
    if kind is list:
        return {"list": children}
    if kind is type(None):
        return None
    if isinstance(kind, type) and issubclass(kind, dict):
        keys = spec.context if isinstance(spec.context, list) else spec.context[1]
        if len(keys) != len(children):
            keys = list(spec.context[-1])
        return {"dict": [[_key(key), child] for key, child in zip(keys, children, strict=True)]}
    # a named tuple is a type of its own, or collections.namedtuple in the spec
    if getattr(kind, "__name__", "") == "namedtuple" or (
        isinstance(kind, type) and issubclass(kind, tuple)
    ):
        return {"tuple": children}
    fields = _fields(spec, len(children))
    if fields is not None:
        return {"dict": [[name, child] for name, child in zip(fields, children, strict=True)]}
    raise UnsupportedError(f"expected tuples, lists and dicts of tensors, found {kind}")


def _fields(spec: Any, count: int) -> list[str] | None:
    """Field names of a dataclass-like container (HF ModelOutput, caches)."""
    context = spec.context
    candidates = context if isinstance(context, (list, tuple)) else ()
    for candidate in (candidates, *candidates):
        if isinstance(candidate, (list, tuple)) and len(candidate) == count:
            if all(isinstance(name, str) for name in candidate):
                return list(candidate)
    return None


def _key(key: Any) -> Any:
    if not isinstance(key, (str, int, float, bool)):
        raise UnsupportedError(f"expected dict keys that are strings or numbers, found {key!r}")
    return key
