"""What a model is made of, as seen when it was made, and whether that still holds."""

from __future__ import annotations

import hashlib
import importlib.machinery
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from graphc.store import Fields
from graphc.warm.identity import FileDigests, version
from graphc.warm.watch import Watch

#: of a checkpoint's folder: files that no loader of models reads
_HIDDEN = "."


class Observed(msgspec.Struct, frozen=True):
    """files: SHA-256 by absolute path. environment: SHA-256 of the values of variables that the
    user's code read ("": not set). modules: file by name of the user's modules that the path of
    imports leads to. packages: version by name of the installed distributions at work."""

    files: dict[str, str]
    environment: dict[str, str] = {}
    modules: dict[str, str] = {}
    packages: dict[str, str] = {}

    def changed(self, digests: FileDigests) -> str:
        """What is no longer as it was, "" if everything is."""
        for name, value in self.environment.items():
            if _sealed(os.environ.get(name)) != value:
                return f"the environment variable {name}"
        for name, wanted in self.packages.items():
            if version(name) != wanted:
                return f"the package {name}"
        for name, file in self.modules.items():
            if _origin(name) != file:
                return f"where Python finds the module {name}"
        for file, wanted in self.files.items():
            try:
                found = digests.of(Path(file))
            except OSError:
                found = ""
            if found != wanted:
                return file
        return ""

    def fields(self) -> Fields:
        """As fields of a key: files by their last name, so that a copy elsewhere is the same."""
        named = sorted((Path(file).name, digest) for file, digest in self.files.items())
        made = [("files", "\n".join(f"{digest} {name}" for name, digest in named))]
        if self.environment:
            lines = (f"{name} {value or 'unset'}" for name, value in self.environment.items())
            made.append(("environment", "\n".join(sorted(lines))))
        packages = (f"{name} {number}" for name, number in sorted(self.packages.items()))
        made.append(("packages", "\n".join(packages)))
        return tuple(made)


def of_folder(folder: Path, packages: Iterable[str], digests: FileDigests) -> Observed:
    """A checkpoint: every file in the folder, whether it is read or not."""
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and not any(part.startswith(_HIDDEN) for part in path.relative_to(folder).parts)
    )
    return Observed(
        {str(path.absolute()): digests.of(path) for path in files},
        packages={name: version(name) for name in packages},
    )


def of_watch(watch: Watch, packages: Iterable[str], digests: FileDigests) -> Observed:
    """What `watch` saw, and the user's modules, with the packages behind."""
    modules = watch.modules()
    paths = dict.fromkeys([*watch.read(), *modules.values()])
    names = dict.fromkeys([*packages, *_distributions()])
    tops = {name: file for name, file in modules.items() if "." not in name}
    return Observed(
        {path: digests.of(Path(path)) for path in paths},
        {name: _sealed(value) for name, value in sorted(watch.environment.items())},
        {name: file for name, file in tops.items() if _origin(name) == file},
        {name: number for name in names if (number := version(name))},
    )


def _sealed(value: str | None) -> str:
    """What stands for a variable's value, which may be a secret."""
    return "" if value is None else hashlib.sha256(value.encode()).hexdigest()


def _origin(name: str) -> str | None:
    """The file that a top-level module would be imported from."""
    try:
        spec = importlib.machinery.PathFinder.find_spec(name)
    except (ImportError, ValueError):
        return None
    return os.path.realpath(spec.origin) if spec is not None and spec.origin else None


def _distributions() -> list[str]:
    """The distributions whose modules are loaded."""
    from importlib.metadata import packages_distributions

    known = packages_distributions()
    tops = {name.partition(".")[0] for name in sys.modules}
    return sorted({dist for top in tops for dist in known.get(top, ()) if dist != "graphc"})
