"""C++ of elementwise expressions over vectors: each node of a loop is computed once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from graphc.dsl.tiles import ELEMENTWISE, Tile
from graphc.lowering.context import Refuse

_TEXT = {
    "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "neg": "-{}", "exp": "vexp({})",
    "sigmoid": "vsigmoid({})",
}  # fmt: skip


@dataclass
class Body:
    """Statements of a loop's body. leaf: C++ of a node that the loop reads, or None for one that
    it computes."""

    leaf: Callable[[Tile], str | None]
    lines: list[str] = field(default_factory=list)
    names: dict[Tile, str] = field(default_factory=dict)

    def value(self, node: Tile) -> str:
        """The name of the vector that holds the node's value."""
        if node not in self.names:
            text = self.leaf(node)
            if text is None:
                if node.op not in ELEMENTWISE:
                    raise Refuse(f"{node} where only elementwise work is done")
                text = _TEXT[node.op].format(*map(self.value, node.args))
            self.names[node] = name = f"x{len(self.names)}"
            self.lines.append(f"const vf {name} = {text};")
        return self.names[node]


def literal(value: float) -> str:
    """A float constant."""
    return f"{value!r}f"


def block(head: str, lines: list[str]) -> list[str]:
    """`head { lines }`."""
    return [f"{head} {{", *(f"  {line}" for line in lines), "}"]
