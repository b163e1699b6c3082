"""Options that several commands share, and the call of `graphc.api.build` they lead to."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.progress import progress
from graphc.report import BisectRecord, BuildReport

if TYPE_CHECKING:
    from graphc.toolchain.lookups import Lookups

Command = Callable[..., Any]

#: of a build that is done, not only asked about (`graphc cache why`)
_WORK_OPTIONS = [
    click.option(
        "--fresh", is_flag=True, help="Capture the model anew, whatever earlier builds left."
    ),
    click.option("--require-cached", is_flag=True, help="Exit 9 instead of compiling anything."),
    click.option("--jobs", type=click.IntRange(1), help="Compiles at the same time [all cores]."),
]

_CODE_OPTIONS = [
    click.option(
        "--input",
        "inputs",
        multiple=True,
        metavar="NAME=DTYPE[DIMS]",
        help="Type of an input, e.g. x=f32[1,T,384]; a name in DIMS is a length free at run time.",
    ),
    click.option(
        "--dynamic",
        multiple=True,
        metavar="T=MIN:MAX",
        help="Range of a free length, e.g. T=1:2048.",
    ),
    click.option(
        "--bucket",
        "buckets",
        multiple=True,
        metavar="NAME",
        help="Bucket to plan for: a name of shapes.yaml, a number, or T=4096. Repeatable.",
    ),
    click.option("--phase", help="Phase of shapes.yaml, e.g. prefill or decode."),
    click.option("--dtype", help="Convert floating-point weights, e.g. bfloat16."),
    click.option(
        "--shapes",
        type=click.Path(path_type=Path),
        help="Shapes file [./shapes.yaml, else built in].",
    ),
    click.option(
        "--disable-pass",
        "disable_pass",
        multiple=True,
        metavar="NAME",
        help="Leave out a pass. Repeatable.",
    ),
    click.option(
        "--pass",
        "pass_options",
        multiple=True,
        metavar="NAME{K=V}",
        help="Options of a pass. Repeatable.",
    ),
    click.option(
        "--quant",
        multiple=True,
        metavar="ROLE=FORM",
        help="Narrow index=mxfp8, kv=fp8, weights=int8, ...: docs/quantization.md. Repeatable.",
    ),
    click.option(
        "--precision",
        default="",
        metavar="ROLE=FORM,...",
        help="What may be narrowed: index=mxfp8,cache=keep, ... [shapes.yaml]: docs/precision.md.",
    ),
    click.option(
        "--target",
        default="host",
        metavar="CPU,...",
        help="CPUs to build for: host, x86-64-v4, x86-64-v3, x86-64-v2, portable [host].",
    ),
    click.option(
        "--tune", is_flag=True, help="Measure open choices of kernels here; remembered by CPU."
    ),
]


_DECODER_OPTIONS = [
    click.option("--chunk", type=click.IntRange(1), help="Prompt tokens of one run [2048]."),
    click.option("--batch", type=click.IntRange(1), help="Sequences of one decode [8]."),
]


def decoder_options(function: Command) -> Command:
    """Adds the options of a decoder's build to a command."""
    return _added(_DECODER_OPTIONS, function)


def build_options(function: Command) -> Command:
    """Adds the options of a build to a command; they arrive in `BuildOptions.of(kwargs)`."""
    return code_options(_added(_WORK_OPTIONS, function))


def code_options(function: Command) -> Command:
    """Adds the options of a build that say what code it makes."""
    return _added(_CODE_OPTIONS, function)


def _added(options: Sequence[Callable[[Command], Command]], function: Command) -> Command:
    for option in reversed(options):
        function = option(function)
    return function


@dataclass(frozen=True)
class BuildOptions:
    """The options of a build, as given on the command line."""

    inputs: tuple[str, ...] = ()
    dynamic: tuple[str, ...] = ()
    buckets: tuple[str, ...] = ()
    phase: str | None = None
    dtype: str | None = None
    shapes: Path | None = None
    disable_pass: tuple[str, ...] = ()
    pass_options: tuple[str, ...] = ()
    quant: tuple[str, ...] = ()
    precision: str = ""
    fresh: bool = False
    require_cached: bool = False
    jobs: int | None = None
    target: str = "host"
    tune: bool = False

    def build(
        self,
        model: str,
        output: Path,
        *,
        verify: bool = False,
        dump_passes: Path | None = None,
        quiet: bool = False,
        lookups_only: bool = False,
    ) -> BuildReport:
        """Builds `model` into the folder `output`, with progress on a terminal."""
        check_model(model)
        from graphc import api

        with progress(quiet) as show:
            return api.build(
                model,
                output,
                **self._keywords(),
                verify=verify,
                dump_passes=dump_passes,
                require_cached=self.require_cached,
                jobs=self.jobs,
                target=self.target,
                tune=self.tune,
                quant=self.quant,
                precision=self.precision,
                fresh=self.fresh,
                progress=show,
                lookups_only=lookups_only,
            )

    def build_decoder(
        self,
        model: str,
        output: Path,
        *,
        chunk: int | None = None,
        batch: int | None = None,
        drafts: int | None = None,
        verify: bool = False,
        dump_passes: Path | None = None,
        quiet: bool = False,
        lookups_only: bool = False,
    ) -> BuildReport:
        """Builds a causal language model with its states into the folder `output`.

        Raises:
            UsageError: options that say what a plain model's inputs are.
        """
        from graphc.errors import UsageError

        if self.inputs or self.dynamic or self.phase:
            raise UsageError(
                "expected none of --input, --dynamic and --phase: a decoder's inputs and phases "
                "are known",
                hint="--bucket, --chunk and --batch say how long prompts and sequences may be",
            )
        check_model(model)
        from graphc import api

        with progress(quiet) as show:
            options = api.Options(
                shapes=self.shapes,
                buckets=self.buckets,
                disable_pass=self.disable_pass,
                pass_options=self.pass_options,
                quant=self.quant,
                precision=self.precision,
                verify=verify,
                dump_passes=dump_passes,
                require_cached=self.require_cached,
                jobs=self.jobs,
                target=self.target,
                progress=show,
                tune=self.tune,
                lookups_only=lookups_only,
                fresh=self.fresh,
            )
            return api.build_decoder(
                model, output, options, dtype=self.dtype, chunk=chunk, batch=batch, drafts=drafts
            )

    def lookups(
        self,
        model: str,
        *,
        generate: bool = False,
        chunk: int | None = None,
        batch: int | None = None,
        drafts: int | None = None,
        quiet: bool = False,
    ) -> tuple[Lookups, ...]:
        """What `build` would look up in the cache for each target, or with `generate`
        `build_decoder`. Nothing is compiled or written."""
        from graphc.toolchain.lookups import LookupsOnly

        nowhere = Path(os.devnull)
        try:
            if generate:
                self.build_decoder(
                    model, nowhere, chunk=chunk, batch=batch, drafts=drafts, quiet=quiet,
                    lookups_only=True,
                )  # fmt: skip
            else:
                self.build(model, nowhere, quiet=quiet, lookups_only=True)
        except LookupsOnly as end:
            return end.lookups
        raise AssertionError("the build went past its look-ups")

    def bisect(self, model: str, *, rtol: float, atol: float) -> BisectRecord | None:
        """The first pass and node out of tolerance, or None."""
        check_model(model)
        from graphc import api

        return api.bisect(model, **self._keywords(), rtol=rtol, atol=atol)

    def _keywords(self) -> dict[str, Any]:
        """What says which graph is captured and which passes it takes."""
        return {
            "shapes": self.shapes,
            "inputs": list(self.inputs) or None,
            "dynamic": list(self.dynamic) or None,
            "phase": self.phase,
            "buckets": list(self.buckets) or None,
            "dtype": self.dtype,
            "disable_pass": list(self.disable_pass),
            "pass_options": list(self.pass_options),
        }


def check_model(model: str) -> None:
    """Refuses a MODEL argument that can't be any of the known forms, before torch is imported.

    Forms: "demo", "pkg.mod:factory", "file.py:factory", "x.pt2", "x.onnx", a checkpoint folder.

    Raises:
        UsageError: no such file; names that are close are offered.
    """
    from difflib import get_close_matches

    from graphc.errors import UsageError

    path, colon, factory = model.rpartition(":")
    if model == "demo":
        return
    if colon and not path.endswith(".py"):
        if all(part.isidentifier() for part in (*path.split("."), factory)):
            return
    if colon and path.endswith(".py"):
        file = Path(path)
        if not factory.isidentifier():
            raise UsageError(f"expected FILE.py:FACTORY, found {model!r}")
    else:
        file = Path(model)
    if file.exists():
        if (
            file.is_dir()
            or file.suffix in {".onnx", ".pt2", ".gguf"}
            or (colon and file.suffix == ".py")
        ):
            return
        hint = f"name the factory: {model}:FACTORY" if file.suffix == ".py" else _FORMS
        raise UsageError(f"expected a model, found {model!r}", hint=hint)
    folder = file.parent
    beside = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    close = get_close_matches(file.name, [*beside, "demo"], n=3, cutoff=0.5)
    names = ", ".join(
        name if name == "demo" and "demo" not in beside else str(folder / name) for name in close
    )
    raise UsageError(
        f"expected a model, found no file {str(file)!r}",
        hint=f"did you mean: {names}?" if names else _FORMS,
    )


_FORMS = "MODEL is demo, pkg.mod:factory, file.py:factory, x.pt2, x.onnx or a checkpoint folder"
