"""The models that are measured, by name: "encoder:64", "prefill:2048", "resnet50", "det", ...

Every workload is an eager torch module (or an ONNX file) and one call of it. Weights are random
with a fixed seed where no checkpoint is named, float inputs are float32 and converted by whoever
measures in another precision.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Array = NDArray[Any]


@dataclass(frozen=True)
class Workload:
    """A model and the arguments of a call, by name and in order. `flops` counts a multiply-add of
    products, attention and convolutions as two.

    reference: a module of the same weights and results whose float64 results take less memory.
    kept: inputs that are float32 in every precision. alike: those that are the same in all draws of
    inputs that errors are measured on, for they are large. by_row: see cli.jobs.Job. runtimes: who
    is measured, if not all; `left_out` says why.
    """

    inputs: dict[str, Array]
    module: Callable[[], torch.nn.Module] | None = None
    onnx: str = ""
    flops: float = 0.0
    reference: Callable[[], torch.nn.Module] | None = None
    kept: tuple[str, ...] = ()
    alike: tuple[str, ...] = ()
    by_row: bool = False
    runtimes: tuple[str, ...] = ()
    left_out: str = ""


def workload(name: str) -> Workload:
    """The workload of that name; its module is made when `module` is called.

    Raises KeyError for an unknown name, FileNotFoundError if the file it needs is not there.
    """
    from benchmarks.workloads import chains, decoder, encoder, mlp, onnx_files, resnet

    family, _, size = name.partition(":")
    length = int(size or 0)
    random = np.random.default_rng(zlib.crc32(name.encode()))
    if family == "encoder":
        return encoder.make(length, random)
    if family in decoder.KINDS:
        return decoder.make(family, length, random)
    if family.startswith("kda"):
        from benchmarks.workloads import kda

        return kda.make(family, length, random)
    if family.startswith("dsa"):
        from benchmarks.workloads import dsa

        return dsa.make(family, length, random)
    if family in chains.CHAINS:
        return chains.make(family, random)
    if family == "mlp":
        return mlp.make(length, random)
    if family == "resnet50":
        return resnet.make(random)
    if family in onnx_files.FILES:
        return onnx_files.make(family, Path(os.environ.get("MODELS", ".")), random)
    raise KeyError(name)


def load_reference(name: str, dtype: str | None) -> torch.nn.Module:
    """The module that float64 results are made with."""
    return load_module(name, dtype, reference=True)


def load_module(name: str, dtype: str | None, *, reference: bool = False) -> torch.nn.Module:
    """The module of a workload, converted: the loader of the bench's worker processes."""
    import torch

    made = workload(name)
    if reference and made.reference is not None:
        made = replace(made, module=made.reference)
    if made.module is None:
        from graphc import api

        return api.reference(made.onnx)
    torch.manual_seed(0)
    module = made.module().eval()
    return module if dtype is None else module.to(getattr(torch, dtype))


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """At least float32: for sums that low precision would spoil."""
    import torch

    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
