"""Binding of a call's arguments to the plan's inputs, and of its outputs to the results.

The trees are those of `graphc.plan.Plan`: {"tuple": [..]}, {"list": [..]}, {"dict": [[key, tree],
..]}, {"leaf": i}, {"const": scalar}, null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from graphc.errors import InputRejectedError, InternalError
from graphc.plan import Plan

_MISSING = object()


class Node(NamedTuple):
    """A tree node: kind "tuple", "list" (content: nodes), "dict" (content: (key, node) pairs),
    "leaf" (content: position), "const" (content: the value) or "none"."""

    kind: str
    content: Any


def read_tree(tree: Any) -> Node:
    """The nodes of a JSON tree."""
    if tree is None:
        return Node("none", None)
    if isinstance(tree, dict) and len(tree) == 1:
        ((kind, content),) = tree.items()
        if kind in ("tuple", "list"):
            return Node(kind, [read_tree(item) for item in content])
        if kind == "dict":
            return Node(kind, [(key, read_tree(item)) for key, item in content])
        if kind == "leaf":
            return Node(kind, int(content))
        if kind == "const":
            return Node(kind, scalar(content))
    raise InternalError(f"the plan holds an unknown tree node {tree!r}")


def scalar(value: Any) -> Any:
    """A JSON scalar of the plan as a Python value: literal, {"float": "inf"|"-inf"|"nan"},
    {"complex": [re, im]}, {"dtype": name}, {"device": name} (the latter two as strings)."""
    if isinstance(value, dict) and len(value) == 1:
        ((kind, content),) = value.items()
        if kind == "float":
            return float(content)
        if kind == "complex":
            return complex(*content)
        if kind == "dtype":
            return f"torch.{content}"
        if kind == "device":
            return str(content)
    return value


def _same(captured: Any, given: Any) -> bool:
    """Whether `given` would be captured as `captured`: 1, 1.0 and True differ."""
    if isinstance(captured, bool):
        return isinstance(given, bool | np.bool_) and bool(given) == captured
    if isinstance(given, bool | np.bool_):
        return False
    if isinstance(captured, int):
        return isinstance(given, int | np.integer) and int(given) == captured
    if isinstance(captured, float):
        return isinstance(given, float | np.floating) and (
            float(given) == captured or (math.isnan(captured) and math.isnan(float(given)))
        )
    if isinstance(captured, str):
        return str(given) == captured
    return bool(captured == given)


class Binder:
    """Finds the input leaves of a call."""

    def __init__(self, plan: Plan) -> None:
        positional: list[Node] = read_tree(plan.arguments).content or []
        keywords: list[tuple[str, Node]] = read_tree(plan.keywords).content or []
        names = plan.positional_names
        self._trees = positional + [tree for _, tree in keywords]
        self._labels = [
            names[i] if i < len(names) else f"args[{i}]" for i in range(len(positional))
        ] + [key for key, _ in keywords]
        self._by_name = {name: i for i, name in enumerate(names[: len(positional)])}
        self._by_name |= {key: len(positional) + i for i, (key, _) in enumerate(keywords)}
        # positions: captured positional arguments, then captured keywords where the signature
        # (positional_names may list it whole) tells their place
        self._places = list(range(len(positional)))
        for name in names[len(positional) :]:
            if name not in self._by_name:
                break
            self._places.append(self._by_name[name])
        self._leaves = len(plan.inputs)
        # the usual call: every argument is a tensor, all given by position or all by name
        leaves = [tree.content for tree in self._trees if tree.kind == "leaf"]
        plain = len(leaves) == len(self._trees) == self._leaves
        order = [leaves[place] for place in self._places] if plain else []
        self._in_order = plain and order == list(range(self._leaves))
        named = {leaves[i]: name for name, i in self._by_name.items()} if plain else {}
        self._names = [named[i] for i in sorted(named)]  # of all leaves, or not used
        self.signature = "(" + ", ".join(self._labels) + ")"

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """The value of every input leaf. Raises InputRejectedError naming the argument."""
        if self._in_order and not kwargs and len(args) == self._leaves:
            return args
        if not args and len(kwargs) == self._leaves == len(self._names):
            try:
                return [kwargs[name] for name in self._names]
            except KeyError:
                pass  # the general way says what is wrong
        values = [_MISSING] * len(self._trees)
        if len(args) > len(self._places):
            raise InputRejectedError(
                f"expected at most {len(self._places)} positional arguments, found {len(args)}",
                hint=f"the plan takes {self.signature}; pass the rest by keyword",
            )
        for place, value in zip(self._places, args, strict=False):
            values[place] = value
        for name, value in kwargs.items():
            slot = self._by_name.get(name)
            if slot is None:
                raise InputRejectedError(
                    f"the plan has no argument {name!r}",
                    hint=f"it was captured as {self.signature}",
                )
            if values[slot] is not _MISSING:
                raise InputRejectedError(f"argument {name!r} is given twice")
            values[slot] = value
        leaves: list[Any] = [_MISSING] * self._leaves
        for tree, label, value in zip(self._trees, self._labels, values, strict=True):
            if value is not _MISSING:
                if tree.kind == "leaf":
                    leaves[tree.content] = value
                else:
                    _match(tree, value, label, leaves)
            elif _holds_leaf(tree):
                raise InputRejectedError(
                    f"argument {label!r} is missing", hint=f"the plan takes {self.signature}"
                )
        return leaves


def _holds_leaf(tree: Node) -> bool:
    kind, content = tree
    if kind in ("tuple", "list"):
        return any(_holds_leaf(item) for item in content)
    if kind == "dict":
        return any(_holds_leaf(item) for _, item in content)
    return kind == "leaf"


def _match(tree: Node, value: Any, path: str, leaves: list[Any]) -> None:
    kind, content = tree
    if kind == "leaf":
        leaves[content] = value
    elif kind == "none":
        if value is not None:
            raise InputRejectedError(
                f"expected None, found {_brief(value)}",
                where=path,
                hint="the model was captured with None here",
            )
    elif kind == "const":
        if not _same(content, value):
            raise InputRejectedError(
                f"expected {content!r}, found {_brief(value)}",
                where=path,
                hint="the value was fixed when the model was captured; build a plan for this one",
            )
    elif kind == "dict":
        if not isinstance(value, Mapping):
            raise InputRejectedError(f"expected a dict, found {_brief(value)}", where=path)
        wanted = [key for key, _ in content]
        if len(value) != len(wanted) or any(key not in value for key in wanted):
            raise InputRejectedError(f"expected the keys {wanted}, found {list(value)}", where=path)
        for key, item in content:
            _match(item, value[key], f"{path}[{key!r}]", leaves)
    else:
        if not isinstance(value, list | tuple):
            raise InputRejectedError(f"expected a {kind}, found {_brief(value)}", where=path)
        if len(value) != len(content):
            raise InputRejectedError(
                f"expected a {kind} of {len(content)}, found {len(value)} items", where=path
            )
        for i, item in enumerate(content):
            _match(item, value[i], f"{path}[{i}]", leaves)


def _brief(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | complex | str):
        return repr(value)[:60]
    return type(value).__name__


def build_results(tree: Any, leaves: Sequence[Any]) -> Any:
    """The containers of a tree (JSON, or as read by `read_tree`) with `leaves` in their places."""
    kind, content = tree if isinstance(tree, Node) else read_tree(tree)
    if kind == "leaf":
        return leaves[content]
    if kind == "tuple":
        return tuple([build_results(item, leaves) for item in content])
    if kind == "list":
        return [build_results(item, leaves) for item in content]
    if kind == "dict":
        return {key: build_results(item, leaves) for key, item in content}
    return content
