"""The tree of errors a user can meet: what happened, where, and what to do.

Every class carries the exit code that `docs/errors.md` lists, so the command line maps
errors to codes in one place. A bug of ours is `InternalError`, and says so.
"""

from __future__ import annotations


class GraphcError(Exception):
    """Base of all user-facing errors.

    Args:
        what: one sentence, "expected X, found Y".
        where: file, line, node or field it concerns; empty if it concerns the whole call.
        hint: what the user can do about it.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what = what
        self.where = where
        self.hint = hint
        super().__init__(self.message())

    def message(self) -> str:
        """The whole text: what, where, hint, one line each."""
        lines = [self.what]
        if self.where:
            lines.append(f"  at: {self.where}")
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)


class InternalError(GraphcError):
    """A bug of graphc itself."""

    exit_code = 1

    def message(self) -> str:
        text = super().message()
        return text + "\n  this is a bug in graphc, not in your model; please report it"


class UsageError(GraphcError):
    """Bad arguments, files or configuration."""

    exit_code = 2


class CaptureError(GraphcError):
    """The model cannot be captured as one static graph."""

    exit_code = 3


class UnsupportedError(CaptureError, NotImplementedError):
    """The model holds something graphc refuses to build (never a wrong answer instead)."""

    unsupported = True


class CompileError(GraphcError):
    """No compiler, or the compiler rejected a kernel."""

    exit_code = 4


class NumericsError(GraphcError):
    """A result differs from its reference beyond the tolerance."""

    exit_code = 5


class PlanMismatchError(GraphcError):
    """The plan was built for another machine, ABI or format version."""

    exit_code = 6


class DamagedError(GraphcError):
    """A file of a plan or cache is damaged and cannot be repaired."""

    exit_code = 7


class InputRejectedError(GraphcError, ValueError):
    """An input fails a boundary check or a guard of the capture."""

    exit_code = 8


class CacheMissError(GraphcError):
    """`--require-cached` was given and something would have to be compiled."""

    exit_code = 9


class PrecisionError(GraphcError):
    """The graph narrows what the policy of mixed precision keeps.

    Args:
        node: name of the node that narrows.
        role: what the narrowed value is for (`graphc.precision.ROLES`).
        found: the format it has.
    """

    exit_code = 10

    def __init__(
        self, what: str, *, where: str = "", hint: str = "", node: str = "", role: str = "",
        found: str = "",
    ) -> None:  # fmt: skip
        super().__init__(what, where=where, hint=hint)
        self.node = node
        self.role = role
        self.found = found
