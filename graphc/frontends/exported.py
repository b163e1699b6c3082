"""A model saved by torch.export.save (`x.pt2`)."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from graphc.errors import UsageError


def load_exported(path: Path) -> torch.export.ExportedProgram:
    """The program of a .pt2 file; its ranges and guards come with it.

    Raises:
        UsageError: the file is missing, damaged, or of something else.
    """
    if not path.is_file():
        raise UsageError(f"expected a file, found no {str(path)!r}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.load(path)
    except Exception as error:  # zip, pickle, JSON and schema errors of many classes
        lines = str(error).strip().splitlines()
        raise UsageError(
            f"expected a program of torch.export.save, found a file that cannot be read: "
            f"{type(error).__name__}: {lines[0][:200] if lines else ''}",
            where=str(path),
            hint="save it again with torch.export.save of this torch version "
            f"({torch.__version__}); operators of other libraries must be imported first",
        ) from error
    if not isinstance(program, torch.export.ExportedProgram):
        raise UsageError(f"expected an ExportedProgram, found {type(program).__name__}")
    return program
