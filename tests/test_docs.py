"""The documents say what is there: commands, options, dependencies, exit codes, links, tests."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from cli.main import COMMANDS, cli
from graphc import errors

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def blocks(path: Path, language: str) -> Iterator[str]:
    yield from re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)


def commands() -> list[tuple[str, str]]:
    """(document, line) of every `graphc ...` in a shell block or in a line's code."""
    found: list[tuple[str, str]] = []
    for path in DOCUMENTS:
        text = path.read_text()
        lines = [line for block in blocks(path, "sh") for line in block.splitlines()]
        lines += re.findall(r"`((?:make|graphc) [^`]+)`", text)
        found += [(path.name, line.strip()) for line in lines if line.strip()]
    return found


def targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_shell_blocks_parse(path: Path) -> None:
    for block in blocks(path, "sh"):
        done = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("document", "line"), commands(), ids=lambda text: text)
def test_commands_and_options_exist(document: str, line: str) -> None:
    words = shlex.split(line, comments=True)
    while words and "=" in words[0] and not words[0].startswith("-"):
        words.pop(0)  # VAR=value before a command
    if words[:1] == ["make"]:
        assert words[1] in targets(), f"{document}: {line}"
        return
    if words[:1] != ["graphc"]:
        return
    words = [word for word in words[1:] if word not in {"--debug", "..."}]
    if not words or words[0] in {"--help", "--version"}:
        return
    assert words[0] in COMMANDS, f"{document}: {line}"
    command = cli.get_command(click.Context(cli), words[0])
    assert command is not None
    if isinstance(command, click.Group):
        word = next((word for word in words[1:] if not word.startswith("-")), None)
        if word is None:
            return
        command = command.get_command(click.Context(command), word)
        assert command is not None, f"{document}: {line}"
    known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
    for word in words[1:]:
        if word.startswith("-") and not re.fullmatch(r"-\d.*", word):
            assert word.partition("=")[0] in {*known, "--help"}, f"{document}: {line}: {word}"


def test_readme_has_two_commands_first() -> None:
    first = next(blocks(ROOT / "README.md", "sh")).splitlines()
    assert [line.split("#")[0].split() for line in first] == [["make", "demo"], ["make", "test"]]


def test_python_blocks_parse() -> None:
    for path in DOCUMENTS:
        for block in blocks(path, "python"):
            ast.parse(block)


def test_links_lead_somewhere() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", path.read_text()):
            if not target.startswith("https://"):
                assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_every_dependency_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "docs/dependencies.md").read_text()
    pinned = (ROOT / "constraints.txt").read_text().lower()
    needed = [(item, "") for item in project["dependencies"]]
    for extra, items in project["optional-dependencies"].items():
        needed += [(item, extra) for item in items]
    for item, extra in needed:
        name = re.split(r"[\[<>=!~; ]", item)[0]
        row = rf"^\| {re.escape(name)} \| " + (rf"{extra} \|" if extra else "")
        assert re.search(row, text, re.MULTILINE), f"docs/dependencies.md has no row for {name}"
        assert f"\n{name.lower()}==" in pinned, f"constraints.txt has no pin for {name}"


def test_every_exit_code_is_documented() -> None:
    text = (ROOT / "docs/errors.md").read_text()
    classes = [
        item
        for item in vars(errors).values()
        if isinstance(item, type) and issubclass(item, errors.GraphcError)
    ]
    for item in classes:
        if item is errors.GraphcError:
            continue
        row = rf"^\| {item.exit_code} \|[^\n]*`{item.__name__}`"
        assert re.search(row, text, re.MULTILINE), f"docs/errors.md: no row for {item.__name__}"


def test_every_bad_input_has_its_test() -> None:
    table = (ROOT / "docs/errors.md").read_text().partition("## Bad input")[2]
    rows = re.findall(r"^\| ([^|]+?) \| `graphc", table, re.MULTILINE)
    assert len(rows) >= 13
    tests = (ROOT / "tests/test_errors.py").read_text()
    for row in rows:
        name = re.sub(r"[^a-z]+", "_", row.lower().replace("'", "").replace("++", ""))
        assert f"def test_{name}(" in tests, f"no test_{name} for the row {row!r}"


def test_every_make_target_has_help() -> None:
    text = (ROOT / "Makefile").read_text()
    for target in targets():
        assert re.search(rf"^{target}:.*## \S", text, re.MULTILINE), target


def test_json_keys_are_documented() -> None:
    import msgspec

    from graphc import report

    text = (ROOT / "docs/json.md").read_text()
    structs = [
        item
        for item in vars(report).values()
        if isinstance(item, type) and issubclass(item, msgspec.Struct)
    ]
    assert len(structs) > 10
    for item in structs:
        keys = ", ".join(f"`{name}`" for name in item.__struct_fields__)
        assert f"| {item.__name__} | {keys} |" in text
