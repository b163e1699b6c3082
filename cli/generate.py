"""`graphc generate PLAN_OR_MODEL --prompt TEXT`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.measure import peak_memory, since_process_start
from cli.options import BuildOptions, build_options, decoder_options
from cli.plans import is_plan, plan_place, unbundled
from cli.render import duration, print_json
from cli.targets import must_run
from graphc.errors import UsageError

if TYPE_CHECKING:
    from graphc.runtime.sampling import Sampler


@click.command()
@click.argument("plan_or_model", metavar="PLAN_OR_MODEL")
@click.option("--prompt", help="Text to continue.")
@click.option("--ids", metavar="1,2,3|@FILE.npy", help="Tokens to continue.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, show_default=True, help="Of the best K tokens only.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Of this probability.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the draws.")
@click.option("--threads", type=click.IntRange(1), help="Threads of the executor [all cores].")
@build_options
@decoder_options
@click.option("--json", "as_json", is_flag=True, help="Print tokens and figures as JSON.")
def generate(
    plan_or_model: str,
    prompt: str | None,
    ids: str | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    threads: int | None,
    chunk: int | None,
    batch: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Continue a prompt, token by token.

    PLAN_OR_MODEL is a plan that `graphc build --generate` made, or a model, which is built into
    the cache folder first. The text goes to stdout as it comes; tokens per second go to stderr.
    """
    from graphc.runtime.sampling import Sampler

    if (prompt is None) == (ids is None):
        raise UsageError("expected either --prompt or --ids")
    sampler = Sampler(temperature, top_k, top_p, seed)
    folder = unbundled(Path(plan_or_model))
    if not is_plan(folder):
        build = BuildOptions(**options)
        must_run(build.target)
        folder = plan_place(plan_or_model, ("generate", build, chunk, batch))
        folder.parent.mkdir(parents=True, exist_ok=True)
        build.build_decoder(plan_or_model, folder, chunk=chunk, batch=batch, quiet=as_json)
    given = prompt if prompt is not None else read_ids(ids or "")
    result = stream(
        folder, given, max_new_tokens=max_new_tokens, sampler=sampler, threads=threads,
        quiet=as_json,
    )  # fmt: skip
    if as_json:
        print_json(result)
    else:
        print_rates(result)


def stream(
    folder: Path,
    prompt: str | list[int],
    *,
    max_new_tokens: int,
    sampler: Sampler | None = None,
    threads: int | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Continues a prompt with a plan, printing text as it comes unless `quiet`; gives what
    `--json` prints."""
    from cli.tokens import Tokens
    from graphc.runtime.decoder import load
    from graphc.runtime.generation import Timing
    from graphc.runtime.generation import generate as following

    decoder = load(folder, threads=threads)
    tokens = Tokens(folder, decoder.facts)
    given = tokens.encode(prompt) if isinstance(prompt, str) else prompt
    timing, made = Timing(), list[int]()
    text, said, first_token = tokens.stream(), "", 0.0
    stop = frozenset(decoder.facts.stop)
    with decoder.sequence() as sequence:
        for token in following(
            sequence, given, max_new_tokens=max_new_tokens, sampler=sampler, stop=stop,
            timing=timing,
        ):  # fmt: skip
            first_token = first_token or since_process_start()
            made.append(token)
            if token not in stop:
                said += (piece := text(token))
                if not quiet:
                    click.echo(piece, nl=False)
    if not quiet:
        click.echo()
    return {
        "plan": str(folder),
        "target": decoder.session.plan.target,
        "prompt": given,
        "tokens": made,
        "text": said if decoder.facts.text else None,
        "first_token_s": first_token,
        "prefill_s": timing.prefill_seconds,
        "prefill_tokens_per_s": timing.prefill_rate,
        "decode_s": timing.decode_seconds,
        "decode_tokens_per_s": timing.decode_rate,
        "threads": decoder.session.threads,
        "peak_memory": peak_memory(),
    }


def print_rates(result: dict[str, Any]) -> None:
    """Tokens per second, on stderr: stdout has the text."""
    click.echo(
        f"prompt {len(result['prompt'])} tokens, {result['prefill_tokens_per_s']:.0f}/s; new "
        f"{len(result['tokens'])}, {result['decode_tokens_per_s']:.1f}/s; first token "
        f"{duration(result['first_token_s'])} after process start",
        err=True,
    )


def read_ids(text: str) -> list[int]:
    """Tokens of "1,2,3" or of a .npy file.

    Raises:
        UsageError: it is neither.
    """
    if text.startswith("@"):
        import numpy as np

        try:
            array = np.load(text[1:], allow_pickle=False)
        except (OSError, ValueError) as error:
            raise UsageError(f"expected a .npy file of tokens: {error}", where=text[1:]) from error
        if array.dtype.kind not in "iu":
            raise UsageError(f"expected integers, found {array.dtype}", where=text[1:])
        return [int(i) for i in array.reshape(-1)]
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"expected tokens such as 1,2,3, found {text!r}") from error
