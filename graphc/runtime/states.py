"""States of a Session: memory that lives across runs, one region per state."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from graphc.errors import DamagedError, InternalError, UsageError
from graphc.plan import Plan
from graphc.runtime.native import NativeProgram
from graphc.runtime.pool import Region
from graphc.runtime.tensors import ITEMSIZE, numpy_dtype

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


class States:
    """Allocates every state at the largest size its symbols allow and sets its initial value."""

    def __init__(self, plan: Plan, native: NativeProgram, weights: NDArray[np.uint8]) -> None:
        self._plan = plan
        self._weights = weights
        for k, symbol in enumerate(plan.symbols):
            native.symbols[k] = symbol.maximum
        native.evaluate()
        self._shapes: list[tuple[int, ...]] = []
        self._regions: list[Region] = []
        for state in plan.states:
            shape = tuple(native.value(e) for e in state.tensor.shape)
            count = 1
            for size in shape:
                count *= size
            nbytes = count * ITEMSIZE[state.tensor.dtype]
            if state.weight >= 0 and plan.weights[state.weight].nbytes != nbytes:
                raise InternalError(
                    f"state {state.tensor.name!r} and its initial value differ in size"
                )
            self._shapes.append(shape)
            self._regions.append(Region(nbytes))
        self.table = array("Q", [region.address for region in self._regions] or [0])
        self.nbytes = sum(region.nbytes for region in self._regions)
        self._initialise()

    def _initialise(self) -> None:
        for state, region in zip(self._plan.states, self._regions, strict=True):
            if state.weight >= 0:
                start = self._plan.weights[state.weight].offset
                region.bytes[:] = self._weights[start : start + region.nbytes]

    def reset(self) -> None:
        for region in self._regions:
            region.clear()
        self._initialise()

    def use_huge_pages(self, state: int, first: int, nbytes: int) -> None:
        """For a part of a state that is about to be filled; what is smaller than one stays."""
        self._regions[state].use_huge_pages(first, nbytes)

    def views(self) -> dict[str, NDArray[Any]]:
        return {
            state.tensor.name: region.bytes.view(numpy_dtype(state.tensor.dtype)).reshape(shape)
            for state, region, shape in zip(
                self._plan.states, self._regions, self._shapes, strict=True
            )
        }

    def save(self, path: Path | str) -> None:
        """Raw bytes per state, with dtype and shape in its key: "name|float32|2x3"."""
        arrays = {self._key(i): region.bytes for i, region in enumerate(self._regions)}
        with open(path, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    def load(self, path: Path | str) -> None:
        from zipfile import BadZipFile

        try:
            with np.load(path, allow_pickle=False) as stored:
                found = {key: stored[key] for key in stored.files}
        except (OSError, ValueError, BadZipFile, EOFError) as error:
            raise DamagedError(f"cannot read the states: {error}", where=str(path)) from error
        wanted = [self._key(i) for i in range(len(self._regions))]
        if sorted(found) != sorted(wanted):
            raise UsageError(
                f"expected the states {wanted}, found {sorted(found)}",
                where=str(path),
                hint="the file is another model's",
            )
        for key, region in zip(wanted, self._regions, strict=True):
            if found[key].dtype != np.uint8 or found[key].nbytes != region.nbytes:
                raise DamagedError(f"state {key} has a wrong size", where=str(path))
        for key, region in zip(wanted, self._regions, strict=True):
            region.bytes[:] = found[key].reshape(-1)

    def _key(self, i: int) -> str:
        tensor = self._plan.states[i].tensor
        return f"{tensor.name}|{tensor.dtype}|{'x'.join(map(str, self._shapes[i]))}"
