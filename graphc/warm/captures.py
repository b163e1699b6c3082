"""Captured graphs as one file: a safetensors file whose header holds the graphs' texts.

Weights that a checkpoint's own files hold are named, not copied.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from graphc.distinct import Distinct, equal_bytes
from graphc.errors import GraphcError
from graphc.frontends.capture import Captured
from graphc.ir.content import raw_bytes
from graphc.ir.parse import parse_graph
from graphc.ir.text import print_graph
from graphc.ir.types import torch_dtype

_FORMAT = 1
_HEADER = "graphc"
_CANDIDATES = 4


class Unfit(Exception):
    """Why captured graphs are not kept, or cannot be read."""


class _Tensor(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the content of a weight or state is: `own` names a tensor of this file; `file` and
    `name` one of a checkpoint's files, taken as `dtype`; neither: zeros. `strides`: if it is not
    row-major."""

    own: str = ""
    file: str = ""
    name: str = ""
    dtype: str = ""
    strides: list[int] | None = None


class _Graph(msgspec.Struct, frozen=True):
    """A Captured: the text of its graph, (name, location, module) of each node, (name, hint) of its
    symbols in order, and the rest."""

    text: str
    symbols: list[tuple[str, int]]
    nodes: list[tuple[str, str, str]]
    contents: dict[str, _Tensor]
    arguments: Any
    keywords: Any
    results: Any
    positional_names: list[str]
    state_names: list[str]
    notes: list[str]
    requested: dict[str, tuple[int, int]]
    result_names: list[str]


class _File(msgspec.Struct, frozen=True):
    format: int
    graphs: list[_Graph]
    extra: Any = None


@dataclass(frozen=True)
class Kept:
    """What a file holds: the captures, and what was put beside them (plain JSON)."""

    captures: tuple[Captured, ...]
    extra: Any


def write_captures(
    path: Path, captures: Sequence[Captured], extra: Any, checkpoint: Sequence[Path], limit: int
) -> None:
    """Writes captured graphs.

    Args:
        extra: further facts, as plain JSON.
        checkpoint: safetensors files that their weights may come from.
        limit: the most bytes of weights to copy.

    Raises:
        Unfit: the copies would take more, or have a dtype that the file cannot hold.
    """
    places = _Places(checkpoint, limit)
    graphs = [_packed(captured, places) for captured in captures]
    header = msgspec.json.encode(_File(_FORMAT, graphs, extra)).decode()
    try:
        save_file(places.own, path, {_HEADER: header})
    except (SafetensorError, KeyError, ValueError) as error:
        raise Unfit(f"a weight cannot be stored: {error}") from None


def read_captures(path: Path, checkpoint: Sequence[Path]) -> Kept:
    """What `write_captures` wrote; weights are mapped, not read.

    Raises:
        Unfit: a file is missing, or an operator is not known here.
    """
    files = {file.name: file for file in checkpoint}
    try:
        with safe_open(path, "pt") as opened:
            data = msgspec.json.decode((opened.metadata() or {})[_HEADER], type=_File)
            if data.format != _FORMAT:
                raise Unfit(f"expected format {_FORMAT}, found {data.format}")
            reader = _Reader(opened, files)
            return Kept(tuple(_unpacked(graph, reader) for graph in data.graphs), data.extra)
    except (SafetensorError, OSError, KeyError, msgspec.MsgspecError) as error:
        raise Unfit(f"{type(error).__name__}: {error}") from None
    except GraphcError as error:
        raise Unfit(str(error)) from None


# -- writing -----------------------------------------------------------------------------------


def _packed(captured: Captured, places: _Places) -> _Graph:
    graph = captured.graph
    tensors = {**graph.weights, **graph.states}
    return _Graph(
        print_graph(graph, contents=False),
        [(symbol.name, symbol.hint) for symbol in graph.symbols.values()],
        [(node.name, node.location, node.module) for node in graph.nodes],
        {value.name: places.of(value.name, tensor) for value, tensor in tensors.items()},
        captured.arguments, captured.keywords, captured.results,
        list(captured.positional_names), list(captured.state_names), list(captured.notes),
        dict(captured.requested), list(captured.result_names),
    )  # fmt: skip


class _Places:
    """Where the contents of tensors are; those that no checkpoint holds are collected in `own`."""

    def __init__(self, checkpoint: Sequence[Path], limit: int) -> None:
        self.own: dict[str, torch.Tensor] = {}
        self._checkpoint = _Checkpoint(checkpoint)
        self._distinct: Distinct[str] = Distinct()
        self._size, self._limit = 0, limit

    def of(self, name: str, tensor: torch.Tensor) -> _Tensor:
        """The place of a weight's or state's content. Raises Unfit beyond the limit."""
        # one number seen many times (strides of 0) is stored, and read again, row by row
        dense = 0 not in tensor.stride()
        strides = None if tensor.is_contiguous() or not dense else list(tensor.stride())
        data = raw_bytes(tensor)
        if not np.frombuffer(data, np.uint8).any():  # of -0.0 too: what counts is the bytes
            return _Tensor(strides=strides)
        dtype = str(tensor.dtype).removeprefix("torch.")
        found = self._checkpoint.of(name, tensor, data)
        if found is not None:
            return _Tensor(file=found[0], name=found[1], dtype=dtype, strides=strides)
        kind = (dtype, tuple(tensor.shape))
        own = self._distinct.find(data, kind)
        if own is None:
            own = f"t{len(self.own)}"
            self._size += data.nbytes
            if self._size > self._limit:
                raise Unfit(
                    f"tensors that are in no file of a checkpoint take more than "
                    f"{self._limit >> 20} MiB"
                )
            self._distinct.note(data, own, kind)
            # a copy: parts of one tensor are refused otherwise
            self.own[own] = tensor.detach().contiguous().clone()
        return _Tensor(own=own, strides=strides)


class _Checkpoint:
    """Tensors of safetensors files by their name."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = {file.name: safe_open(file, "pt") for file in files}
        self._names: dict[str, list[tuple[str, str]]] = {}
        for file, opened in self._files.items():
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                self._names.setdefault(_last(name), []).append((file, name))

    def of(self, name: str, tensor: torch.Tensor, data: memoryview) -> tuple[str, str] | None:
        """(file, name) of a tensor that gives these bytes when it is taken in this dtype. The best
        candidates by name are looked at; what counts is the bytes."""
        near = self._names.get(_last(name), [])
        for file, other in sorted(near, key=lambda place: -_alike(place[1], name))[:_CANDIDATES]:
            opened = self._files[file]
            if tuple(opened.get_slice(other).get_shape()) != tuple(tensor.shape):
                continue
            if equal_bytes(raw_bytes(opened.get_tensor(other).to(tensor.dtype)), data):
                return file, other
        return None


def _last(name: str) -> str:
    """The last two words of a name: "layers.0.mlp.up.weight" -> "up.weight"."""
    return ".".join(re.split(r"[._]", name)[-2:])


def _alike(one: str, other: str) -> int:
    """How many words two names end with alike."""
    count = 0
    pairs = zip(reversed(re.split(r"[._]", one)), reversed(re.split(r"[._]", other)), strict=False)
    for a, b in pairs:
        if a != b:
            break
        count += 1
    return count


# -- reading -----------------------------------------------------------------------------------


class _Reader:
    def __init__(self, opened: Any, files: Mapping[str, Path]) -> None:
        self._own, self._files = opened, files
        self._opened: dict[str, Any] = {}
        self._made: dict[str, torch.Tensor] = {}

    def tensor(self, place: _Tensor) -> torch.Tensor | None:
        """The tensor; None for zeros."""
        if place.own:
            if place.own not in self._made:
                self._made[place.own] = self._own.get_tensor(place.own)
            plain = self._made[place.own]
        elif place.file:
            if place.file not in self._files:
                raise Unfit(f"the checkpoint has no {place.file}")
            if place.file not in self._opened:
                self._opened[place.file] = safe_open(self._files[place.file], "pt")
            plain = self._opened[place.file].get_tensor(place.name).to(torch_dtype(place.dtype))
        else:
            return None
        if place.strides is None:
            return plain
        made = torch.empty_strided(tuple(plain.shape), tuple(place.strides), dtype=plain.dtype)
        return made.copy_(plain)


def _unpacked(data: _Graph, reader: _Reader) -> Captured:
    found = {name: reader.tensor(place) for name, place in data.contents.items()}
    tensors = {name: tensor for name, tensor in found.items() if tensor is not None}
    graph = parse_graph(data.text, tensors, origins=data.nodes)
    symbols = {name: replace(graph.symbols[name], hint=hint) for name, hint in data.symbols}
    ordered = replace(graph, symbols=symbols)
    return Captured(
        ordered, data.arguments, data.keywords, data.results,
        tuple(data.positional_names), tuple(data.state_names), None, tuple(data.notes),
        data.requested, tuple(data.result_names),
    )  # fmt: skip
