"""`rollcorr null`: measure what two correct policies differ by, and keep it for `rollcorr check --null`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from rollcorr import diagnostics, engines
from rollcorr.cli.app import check_unused, exit_on
from rollcorr.cli.logs import COLUMNS_OPTION, LIMIT_OPTION, file_options, share_memory
from rollcorr.config import SamplingSpec
from rollcorr.config.input_file import BadInputError
from rollcorr.config.yaml_text import load_yaml

if TYPE_CHECKING:
    from rollcorr.diagnostics.null.null_file import Sides


def parse_steps(text: str | None) -> tuple[int, int] | None:
    """FIRST:LAST as two numbers; None for None.

    Raises:
        BadInputError: it is not of that form, or the first is larger.
    """
    if text is None:
        return None
    ends = [int(end) for end in text.split(":") if end.strip().isdecimal()]
    if text.count(":") != 1 or len(ends) != 2 or ends[0] > ends[1]:
        raise BadInputError(f"steps are FIRST:LAST, for example 1:5; got {text!r}")
    return ends[0], ends[1]


def measure(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write the null (JSON).")],
    logs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[LOG]...",
            help="Rollout logs whose two sides are the same policy: files, folders or glob patterns. "
            "None with --engine.",
        ),
    ] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="FIRST:LAST", help="Only these steps of the logs. [default: all rows]")
    ] = None,
    train_column: Annotated[
        str | None,
        typer.Option(help="Trainer's log-probs: old_log_prob or log_prob. [default: the one that is recorded]"),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Measure with this engine: transformers, ctranslate2, vllm, vllm_server or sglang."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="DIR", help="The model that the engine samples from and the trainer scores.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Prompts like those of the run: a rollout log with prompt_ids, or a .txt of lines."
        ),
    ] = None,
    sides: Annotated[
        str,
        typer.Option(
            help="What is compared: run (engine against trainer), engine (its sampling against its own scoring), or "
            "trainer (its score twice, in other batches)."
        ),
    ] = "run",
    rows: Annotated[int, typer.Option(help="Responses to sample; prompts are repeated where there are fewer.")] = 256,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of the longest response.")] = 256,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Sampling: the mass that is kept.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sampling: the number of tokens that are kept; -1 for all.")] = -1,
    dtype: Annotated[str, typer.Option(help="Precision of the engine, where it has this option.")] = "bfloat16",
    train_dtype: Annotated[str, typer.Option(help="Precision of the trainer.")] = "float32",
    engine_option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An option of the engine, for example url=http://localhost:8000."),
    ] = None,
    workers: Annotated[int, typer.Option(help="How many processes read the log. The numbers do not depend on it.")] = 1,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    limit: Annotated[list[str] | None, LIMIT_OPTION] = None,
    columns: Annotated[list[str] | None, COLUMNS_OPTION] = None,
) -> None:
    """Measure what a correct sampler and trainer differ by, for `rollcorr check --null FILE`.

    From logs: give rollouts whose two sides are known to be the same policy, such as the first steps of a run that was
    right. A log whose sides show other sampling settings is refused.

        rollcorr null run/rollouts --steps 1:3 -o null.json

    From an engine: it samples from a model, and the trainer scores the same tokens with the same weights. Use the
    engine, precision, prompts, lengths and sampling settings of the run: all of them change the null.

        rollcorr null --engine transformers --model DIR --prompts run/rollouts -o null.json
        rollcorr null --engine vllm_server --engine-option url=http://HOST:8000 --model DIR --prompts p.txt -o n.json

    Exit codes: 0 written, 2 bad input, 130 interrupted.
    """
    share_memory()
    from rollcorr.diagnostics.null import is_large, remark_on_size
    from rollcorr.diagnostics.report.console import row_progress

    with exit_on(engines.EngineError, unwritten=output):
        check_unused(output, overwrite=overwrite)
        _check_source(logs or [], engine, model, prompts)
        file_limits, column_names = file_options(limit, columns)
        with TemporaryDirectory() as folder:
            rollouts = Path(folder) / "rollouts.parquet"
            if engine is not None and model is not None and prompts is not None:
                _sample(
                    rollouts,
                    prompts,
                    engine_option or [],
                    sampling={"temperature": temperature, "top_p": top_p, "top_k": top_k},
                    engine=engine,
                    model=model,
                    sides=sides,
                    rows=rows,
                    max_new_tokens=max_new_tokens,
                    dtype=dtype,
                    train_dtype=train_dtype,
                )
            with row_progress() as on_rows:
                null = diagnostics.null_of_logs(
                    [rollouts] if engine else logs or [],
                    name=output.name,
                    kind="engine" if engine else "log",
                    sides=cast("Sides", sides) if engine else "run",  # checked with the engine's settings
                    steps=parse_steps(steps),
                    train_column=train_column,
                    workers=workers,
                    file_limits=file_limits,
                    column_names=column_names,
                    on_rows=on_rows,
                )
        null.save(output)
    profile = null.profile
    typer.echo(f"{output}: {profile.row_count:,} sequences, {profile.tokens:,} tokens, k3 {profile.k3:.3g} per token")
    remark = remark_on_size(null)
    if remark:
        judges = is_large(null)
        typer.echo(f"{'note' if judges else 'warning'}: {remark}", err=not judges)


def _check_source(logs: list[Path], engine: str | None, model: str | None, prompts: Path | None) -> None:
    """Check that there is one source of rollouts, and that it is whole.

    Raises:
        BadInputError: there is none, there are two, or a part is missing.
    """
    alone = engine is None
    wrong = {
        "--model belongs to --engine NAME; give it too, or logs alone": alone and model,
        "--prompts belongs to --engine NAME; give it too, or logs alone": alone and prompts,
        "give rollout logs, or --engine NAME --model DIR --prompts FILE": alone and not logs,
        f"logs ({', '.join(map(str, logs))}) and --engine {engine} exclude each other; give one": engine and logs,
        f"--engine {engine} needs --model DIR": engine and model is None,
        f"--engine {engine} needs --prompts FILE (a rollout log with prompt_ids, or a .txt of lines)": engine
        and prompts is None,
    }
    for message, applies in wrong.items():
        if applies:
            raise BadInputError(message)


def _sample(
    target: Path,
    prompts: Path,
    options: list[str],
    *,
    sampling: dict[str, Any],
    **settings: Any,  # noqa: ANN401 (of an `EngineNullConfig`)
) -> None:
    """Sample from the engine, score, and write the rollouts; nothing is left after an interrupt.

    Raises:
        BadInputError: a setting or a prompt is refused.
    """
    from rollcorr.diagnostics.report.console import row_progress
    from rollcorr.rollout_log import RolloutLogWriter
    from rollcorr.train.grpo.engine_null import EngineNullConfig, engine_null_rollouts, processed, read_prompts

    given = {}
    try:
        for option in options:
            name, equals, value = option.partition("=")
            if not (name and equals):
                raise ValueError(f"--engine-option {option[:60]!r} is not of the form NAME=VALUE")
            given[name] = load_yaml(value)
        config = EngineNullConfig(engine_options=given, sampling=processed(SamplingSpec(**sampling)), **settings)
        with row_progress("sampling") as on_rows:
            batches = list(engine_null_rollouts(config, read_prompts(prompts), on_rows=on_rows))
        with RolloutLogWriter(target) as log:
            for batch in batches:
                log.write(batch)
    except (TypeError, ValueError) as error:
        # A refused setting names the option of a run; here it has a name of its own.
        text = str(error).replace("rollout.engine_options.", "--engine-option ").replace("rollout.sampling.", "--")
        raise BadInputError(text.replace("rollout.", "--")) from error
