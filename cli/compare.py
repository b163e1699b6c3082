"""`--expect`: results against a reference, within a tolerance."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from graphc.errors import NumericsError, UsageError

Array = NDArray[Any]

#: relative and absolute tolerance by dtype; integers and bools must be equal
TOLERANCES = {
    "float64": (1e-7, 1e-9),
    "float32": (1e-4, 1e-5),
    "bfloat16": (2e-2, 2e-2),
    "float16": (5e-3, 5e-3),
}


class Comparison(msgspec.Struct, frozen=True):
    """One output against its reference: the largest absolute difference, the largest relative to
    the reference's largest value, and the tolerance used."""

    name: str
    max_abs: float
    max_rel: float
    rtol: float
    atol: float
    ok: bool
    reason: str = ""


def as_array(value: Any) -> Array:
    """A result leaf as numpy; bfloat16 stays ml_dtypes' type."""
    if hasattr(value, "detach"):  # a torch tensor, from a plan with fallbacks
        value = value.detach()
        if str(value.dtype) == "torch.bfloat16":
            import ml_dtypes

            return np.asarray(value.float().numpy()).astype(ml_dtypes.bfloat16)
        value = value.numpy()
    return np.asarray(value)


def save(path: Path, outputs: Mapping[str, Array]) -> None:
    """Writes a .npz; bfloat16 and float8, which the format can't name, as float32 (exact)."""
    plain: dict[str, Any] = {
        name: array.astype(np.float32) if array.dtype.kind == "V" else array
        for name, array in outputs.items()
    }
    with path.open("wb") as file:  # savez would add ".npz" to another suffix
        np.savez(file, **plain)


def read_expected(path: Path, names: list[str]) -> dict[str, Array]:
    """The references of a .npz by output name; by order if no key is an output's name.

    Raises:
        UsageError: unreadable, or neither the names nor the count agree.
    """
    try:
        loaded = np.load(path, allow_pickle=False)
        arrays = {"output": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    except OSError as error:
        reason = error.strerror or "not a numpy file"
        raise UsageError(f"expected a readable .npz, found: {reason}", where=str(path)) from None
    except (ValueError, EOFError) as error:
        raise UsageError(f"expected a .npz, found: {error}", where=str(path)) from None
    if set(arrays) <= set(names) and arrays:
        return arrays
    if len(arrays) == len(names) and not set(arrays) & set(names):
        return dict(zip(names, arrays.values(), strict=True))
    raise UsageError(
        f"expected references for {', '.join(names)}, found {', '.join(arrays) or 'none'}",
        where=str(path),
    )


def compare(
    outputs: Mapping[str, Array],
    expected: Mapping[str, Array],
    rtol: float | None,
    atol: float | None,
) -> list[Comparison]:
    """One `Comparison` for each reference, with the defaults of the output's dtype."""
    return [_compare(name, outputs[name], ref, rtol, atol) for name, ref in expected.items()]


def check(comparisons: list[Comparison], where: str) -> None:
    """Raises NumericsError that names the first output out of tolerance."""
    for item in comparisons:
        if item.ok:
            continue
        raise NumericsError(
            item.reason
            or f"expected {item.name} within rtol {item.rtol:g}, atol {item.atol:g}, "
            f"found max abs {item.max_abs:.3g}, max rel {item.max_rel:.3g}",
            where=where,
            hint="find the pass at fault: graphc verify MODEL --bisect",
        )


def _compare(
    name: str, actual: Array, expected: Array, rtol: float | None, atol: float | None
) -> Comparison:
    exact = actual.dtype.kind in "iub"
    default = (0.0, 0.0) if exact else TOLERANCES.get(actual.dtype.name, (1e-4, 1e-5))
    relative = default[0] if rtol is None else rtol
    absolute = default[1] if atol is None else atol
    if actual.shape != expected.shape:
        text = f"expected {name} of shape {list(expected.shape)}, found {list(actual.shape)}"
        return Comparison(name, float("inf"), float("inf"), relative, absolute, False, text)
    if expected.dtype.kind in "iub" and exact and not relative and not absolute:
        different = int(np.count_nonzero(actual != expected))
        text = f"expected {name} equal to its reference, found {different} different elements"
        worst = _largest(actual.astype(np.float64) - expected.astype(np.float64))
        return Comparison(name, worst, 0.0, 0.0, 0.0, not different, text if different else "")
    wide = np.complex128 if "c" in (actual.dtype.kind, expected.dtype.kind) else np.float64
    left, right = actual.astype(wide), expected.astype(wide)
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    with np.errstate(invalid="ignore"):  # inf - inf where both are the same infinity
        gap = np.where(same, 0.0, np.abs(left - right))
    gap = np.where(np.isnan(gap), np.inf, gap)  # not-a-number against a number
    finite = np.where(np.isfinite(right), np.abs(right), 0.0)
    ok = bool(np.all(gap <= absolute + relative * finite))
    worst, scale = _largest(gap), _largest(finite)
    return Comparison(name, worst, worst / scale if scale else worst, relative, absolute, ok)


def _largest(values: Array) -> float:
    return float(np.max(np.abs(values), initial=0.0))
