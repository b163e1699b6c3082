"""A model from the user's Python: `pkg.mod:factory` or `file.py:factory`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from graphc.errors import CaptureError, GraphcError, UsageError
from graphc.frontends.locations import raised_at
from graphc.frontends.naming import where_defined

#: module, positional examples, keyword examples, dynamic_shapes
Call = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any], Any]
_FORMS = (
    "a factory returns a torch.nn.Module, (module, args), (module, args, kwargs) or "
    "(module, args, kwargs, dynamic_shapes)"
)


def load_factory(reference: str) -> Call:
    """Imports the user's code, calls the factory, and reads what it returned.

    Raises:
        UsageError: no such file, module or factory, or it returned something else.
        CaptureError: the user's code raised; with its file and line.
    """
    source, _, name = reference.rpartition(":")
    module = _import_file(Path(source)) if source.endswith(".py") else _import_module(source)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            names = [n for n in vars(module) if not n.startswith("_")]
            close = difflib.get_close_matches(part, names, n=3, cutoff=0.5)
            raise UsageError(
                f"expected a factory, found no {part!r} in {source}",
                where=str(getattr(module, "__file__", "") or ""),
                hint=f"did you mean {', '.join(close)}?" if close else _FORMS,
            )
        found = getattr(found, part)
    where = where_defined(found) if callable(found) else source
    if not isinstance(found, torch.nn.Module):
        if not callable(found):
            raise UsageError(
                f"expected a factory, found {type(found).__name__} {name!r}",
                where=where, hint=_FORMS,
            )  # fmt: skip
        found = _call(found, name, where)
    return read_result(found, where or source)


def _call(factory: Callable[[], Any], name: str, where: str) -> Any:
    try:
        required = [
            p.name
            for p in inspect.signature(factory).parameters.values()
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
    except (TypeError, ValueError):
        required = []
    if required:
        raise UsageError(
            f"expected a factory without arguments, found {name}({', '.join(required)})",
            where=where,
            hint="give the arguments defaults, or write a function of no arguments around it",
        )
    return _user_code(factory, f"the factory {name}", where)


def _user_code(function: Callable[[], Any], what: str, where: str) -> Any:
    """Runs code of the user; what it raises becomes an error with its file and line."""
    try:
        return function()
    except GraphcError:
        raise
    except SyntaxError as error:
        raise UsageError(
            f"{what} is not valid Python: {error.msg}", where=f"{error.filename}:{error.lineno}"
        ) from error
    except (Exception, SystemExit) as error:
        raise CaptureError(
            f"{what} raised {type(error).__name__}: {error}",
            where=raised_at(error) or where,
            hint="run that line in Python; the error is in the model's own code",
        ) from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"expected a Python file, found no {str(path)!r}")
    path = path.resolve()
    name = f"graphc_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"expected a Python file, found {str(path)!r}")
    module = importlib.util.module_from_spec(spec)
    loader = spec.loader
    sys.path.insert(0, str(path.parent))  # the file may import its neighbours
    sys.modules[name] = module  # dataclasses and pickling look their module up
    try:
        _user_code(lambda: loader.exec_module(module), str(path.name), str(path))
    except BaseException:
        sys.modules.pop(name, None)
        raise
    finally:
        sys.path.remove(str(path.parent))
    return module


def _import_module(name: str) -> ModuleType:
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        top = name.split(".")[0]
        if importlib.util.find_spec(top) is None:
            raise UsageError(
                f"expected a Python module, found no {name!r}",
                hint="install it, run in the folder that holds it, or name the file: FILE.py:"
                "FACTORY",
            )
        found: ModuleType = _user_code(lambda: importlib.import_module(name), name, name)
        return found
    finally:
        if added:
            sys.path.remove(here)


def read_result(result: Any, where: str) -> Call:
    """The four parts of what a factory returned, with the missing ones filled in.

    Raises:
        UsageError: it is none of the accepted forms.
    """
    parts: tuple[Any, ...] = result if isinstance(result, tuple) else (result,)
    filled: list[Any] = [*parts, None, None, None, None]
    module, args, kwargs, shapes = filled[:4]
    if len(parts) > 4 or not isinstance(module, torch.nn.Module):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise UsageError(f"expected a module, found ({kinds})", where=where, hint=_FORMS)
    args = () if args is None else args
    kwargs = {} if kwargs is None else kwargs
    if isinstance(args, torch.Tensor):
        args = (args,)
    if isinstance(args, Mapping) and len(parts) == 2:
        args, kwargs = (), args
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, Mapping):
        raise UsageError(
            f"expected a tuple and a dict of examples, found {type(args).__name__} and "
            f"{type(kwargs).__name__}",
            where=where,
            hint=_FORMS,
        )
    return module, tuple(args), dict(kwargs), shapes or None
