"""The group of commands, imported on use, and the one place that turns errors into exit codes."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from types import FrameType

import click

from graphc.errors import GraphcError

#: name -> (module, what `graphc --help` says); a module's command has the module's own name
COMMANDS = {
    "build": ("cli.build", "Compile a model into a plan."),
    "run": ("cli.run", "Run a plan, or build a model and run it."),
    "generate": ("cli.generate", "Continue a prompt with a language model."),
    "inspect": ("cli.inspect", "Show what a plan holds and how it came about."),
    "verify": ("cli.verify", "Check every pass numerically; find the one that breaks."),
    "bundle": ("cli.bundle", "Put a plan into one file, or take it out."),
    "bench": ("cli.bench", "Time a model against torch, ONNX Runtime and OpenVINO."),
    "cache": ("cli.cache", "Show, explain, trim and check the kernel cache."),
    "doctor": ("cli.doctor", "Check this machine and this installation."),
    "demo": ("cli.demo", "Build, run and inspect the built-in model."),
}

EXIT_BUG = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

#: failures of the file system that are the user's to mend, with what to do
FILE_ERRORS = {
    errno.ENOSPC: "free some space, or choose another folder",
    errno.EDQUOT: "free some space, or choose another folder",
    errno.EFBIG: "the limit on file sizes is too low here (see `ulimit -f`)",
    errno.EROFS: "choose a folder that can be written",
    errno.EACCES: "choose a folder that can be written",
    errno.EPERM: "choose a folder that can be written",
    errno.ENOTDIR: "a file stands where a folder is expected",
    errno.EISDIR: "a folder stands where a file is expected",
    errno.EEXIST: "a file stands where a folder is expected",
}


class LazyGroup(click.Group):
    """Imports a command's module when the command is called, not before: torch takes seconds."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        command = getattr(importlib.import_module(entry[0]), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            close = get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise click.UsageError(f"No such command {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(package_name="graphc", prog_name="graphc")
def cli(debug: bool) -> None:
    """Compile a PyTorch or ONNX model once, then run it natively from a cache.

    \b
    graphc build MODEL -o plan/
    graphc run plan/ --input x=random:1x128
    graphc inspect plan/ memory
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and gives its exit code (docs/errors.md). Nothing is raised."""
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args or bool(os.environ.get("GRAPHC_DEBUG"))
    _terminate_as_interrupt()
    try:
        result = cli.main(args, prog_name="graphc", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        error.show()
        return EXIT_USAGE
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted; nothing half-written is kept")
        return EXIT_INTERRUPTED
    except GraphcError as error:
        if debug:
            traceback.print_exc()
        _say(f"error: {error.message()}")
        return error.exit_code
    except BrokenPipeError:
        # the reader (head, less) left; leave stdout pointing nowhere so that exit is silent
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        hint = FILE_ERRORS.get(error.errno or 0)
        if hint is None:
            return _bug(error, debug)
        if debug:
            traceback.print_exc()
        where = f"\n  at: {error.filename}" if error.filename else ""
        _say(f"error: expected to write, found: {error.strerror}{where}\n  hint: {hint}")
        return EXIT_USAGE
    except MemoryError:
        _say("error: out of memory\n  hint: build a smaller bucket (--bucket), or free memory")
        return EXIT_USAGE
    except Exception as error:
        return _bug(error, debug)


def _say(text: str) -> None:
    click.echo(text, err=True)


def _bug(error: Exception, debug: bool) -> int:
    """Reports an exception that is no `GraphcError`: the traceback goes to a file to attach."""
    if debug:
        traceback.print_exc()
    text = "".join(traceback.format_exception(error))
    with tempfile.NamedTemporaryFile(
        "w", prefix="graphc-traceback-", suffix=".txt", delete=False
    ) as file:
        file.write(f"graphc {' '.join(sys.argv[1:])}\n{text}")
    _say(
        f"error: {type(error).__name__}: {error}\n"
        "  this is a bug in graphc, not in your model; please report it\n"
        f"  traceback: {Path(file.name)}"
    )
    return EXIT_BUG


def _terminate_as_interrupt() -> None:
    """SIGTERM takes the way of Ctrl-C, so that locks are freed and half-made files removed."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    # ValueError: not the main thread (tests); the host program owns the signals
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGTERM, interrupt)


if __name__ == "__main__":
    sys.exit(main())
