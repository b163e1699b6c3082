"""Who may import whom (docs/architecture.md), read off the source with ast."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("graphc", "passes", "cache", "cli")

#: room -> what it may import of our own, besides itself. A module that isn't listed belongs to
#: the nearest listed package above it.
GROUND = {"graphc.cpu", "graphc.distinct", "graphc.errors", "graphc.files"}
IR = GROUND | {"graphc.ir"}
ALLOWED: dict[str, set[str]] = {
    "graphc.cpu": {"graphc.errors"},
    "graphc.distinct": set(),
    "graphc.errors": set(),
    "graphc.files": set(),
    "graphc.from_cache": GROUND
    | {
        "graphc.frontends",
        "graphc.lowering",
        "graphc.options",
        "graphc.report",
        "graphc.warm",
    },
    "graphc.garbage": set(),
    "graphc.options": GROUND | {"graphc.plan_io", "graphc.report", "graphc.shapes"},
    "graphc.plan": GROUND,
    "graphc.plan_io": GROUND | {"graphc.plan"},
    "graphc.plan_bundle": GROUND | {"graphc.plan_io"},
    "graphc.plan_writer": GROUND | {"graphc.plan", "graphc.plan_io"},
    "graphc.quantization": GROUND | {"graphc.report"},
    "graphc.report": GROUND,
    "graphc.precision": GROUND | {"graphc.shapes_reader"},
    "graphc.shapes": GROUND | {"graphc.precision", "graphc.shapes_reader"},
    "graphc.shapes_reader": GROUND,
    "graphc.store": GROUND,
    "graphc.build_report": {
        "graphc",
        "graphc.lowering",
        "graphc.plan",
        "graphc.report",
        "graphc.store",
        "graphc.toolchain",
    },
    "graphc.builder": IR
    | {
        "graphc.frontends",
        "graphc.lowering",
        "graphc.plan",
        "graphc.plan_io",
        "graphc.plan_writer",
        "graphc.report",
        "graphc.shapes",
        "graphc.store",
        "graphc.target_build",
        "graphc.toolchain",
    },
    "graphc.target_build": IR
    | {
        "graphc",
        "graphc.build_report",
        "graphc.lowering",
        "graphc.plan",
        "graphc.plan_io",
        "graphc.plan_writer",
        "graphc.report",
        "graphc.toolchain",
    },
    "graphc.tuner": IR
    | {
        "graphc",
        "graphc.kernels",
        "graphc.lowering",
        "graphc.plan",
        "graphc.plan_io",
        "graphc.plan_writer",
        "graphc.report",
        "graphc.runtime",
        "graphc.store",
        "graphc.toolchain",
    },
    "graphc.ir": GROUND,
    "graphc.ops": IR,
    "graphc.dsl": IR | {"graphc.ops"},
    "graphc.models": set(),
    "graphc.quality": IR
    | {
        "graphc.api",
        "graphc.decoders",
        "graphc.ops",
        "graphc.quantization",
        "graphc.runtime",
        "graphc.shapes",
    },
    "graphc.kernels": GROUND,
    "graphc.rewrite": IR | {"graphc.ops", "graphc.report"},
    "graphc.frontends": IR | {"graphc.ops", "graphc.shapes"},
    "graphc.lowering": IR
    | {
        "graphc.dsl",
        "graphc.kernels",
        "graphc.ops",
        "graphc.plan",
        "graphc.report",
        "graphc.rewrite",
    },
    "graphc.warm": IR
    | {
        "graphc",
        "graphc.frontends",
        "graphc.plan",
        "graphc.plan_io",
        "graphc.plan_writer",
        "graphc.report",
        "graphc.store",
        "graphc.toolchain",
    },
    "graphc.toolchain": GROUND | {"graphc.plan", "graphc.store", "graphc.kernels"},
    "graphc.runtime": GROUND | {"graphc.plan", "graphc.plan_io"},
    "passes.memory": IR | {"graphc.plan", "graphc.rewrite", "graphc.report"},
    "passes": IR
    | {"graphc.ops", "graphc.precision", "graphc.rewrite", "graphc.report", "passes.memory"},
    "cache": GROUND | {"graphc.store"},
}
#: free to import everything: the module that looks up, the face of the package, the wiring
FREE = {
    "graphc.api", "graphc.compiled", "graphc.decoders", "graphc.dynamo", "graphc",
    "graphc.__main__", "cli",
}  # fmt: skip

#: only the API looks up to these from the ground floor, and inside functions
UPPER = ("passes", "cache", "cli")


def modules() -> list[tuple[str, Path]]:
    found: list[tuple[str, Path]] = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def imports(path: Path, top_level_only: bool = False) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of each import that runs; those for type checkers are left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if top_level_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno
        nodes.extend(ast.iter_child_nodes(node))


def room_of(module: str) -> str:
    """The longest prefix of `module` that has a row of its own."""
    parts = module.split(".")
    for count in range(len(parts), 0, -1):
        name = ".".join(parts[:count])
        if name in ALLOWED or (name in FREE and name != "graphc") or name == "cli":
            return name
    return "graphc" if parts[0] == "graphc" else ""


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda item: str(item))
def test_imports_go_downwards(module: str, path: Path) -> None:
    room = room_of(module)
    if room in FREE and not (room == "graphc" and module != "graphc"):
        return
    assert room in ALLOWED, f"{module} is in no room: give it a row in ALLOWED"
    for name, line in imports(path):
        if name.split(".")[0] not in PACKAGES:
            continue
        target = room_of(name)
        assert target == room or target in ALLOWED[room] or target == "graphc.models", (
            f"{path.relative_to(ROOT)}:{line}: {room} may not import {name}"
        )


def test_only_the_api_looks_up_and_lazily() -> None:
    for module, path in modules():
        if not module.startswith("graphc") or module == "graphc.__main__":
            continue
        for name, line in imports(path, top_level_only=module == "graphc.api"):
            if name.split(".")[0] in UPPER:
                raise AssertionError(f"{path.relative_to(ROOT)}:{line}: {module} imports {name}")


@pytest.mark.parametrize(
    ("room", "banned"),
    [
        ("graphc.runtime", ("torch", "sympy", "onnx")),
        ("graphc.plan", ("torch", "sympy", "onnx", "numpy")),
        ("graphc.report", ("torch", "sympy", "onnx", "numpy")),
        ("graphc.shapes", ("torch", "sympy", "onnx", "numpy")),
        ("graphc.errors", ("torch", "sympy", "onnx", "numpy", "click")),
        ("graphc.toolchain", ("torch", "sympy", "onnx")),
        ("cache", ("torch", "sympy", "onnx", "numpy")),
        ("cli", ("torch", "sympy", "onnx", "passes")),
    ],
)
def test_not_at_import_time(room: str, banned: tuple[str, ...]) -> None:
    """Loading and running a plan, and every --help, must not pay for torch."""
    for module, path in modules():
        if module != room and not module.startswith(room + "."):
            continue
        for name, line in imports(path, top_level_only=True):
            assert name.split(".")[0] not in banned, f"{path.relative_to(ROOT)}:{line}: {name}"


def test_modules_are_short() -> None:
    """One subject a module: 400 lines is the habit, 600 the limit."""
    long = {
        module: count
        for module, path in modules()
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > 600
    }
    assert not long


def test_every_package_is_typed() -> None:
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").is_file()
