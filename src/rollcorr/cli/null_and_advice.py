"""`rollcorr null`, `calibrate` and `advise`: measure the gap of two correct policies, and choose a correction."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from rollcorr import diagnostics, engines
from rollcorr.cli.app import (
    COLUMNS_OPTION,
    CONFIG_OPTION,
    LIMIT_OPTION,
    TRUST_OPTION,
    check_unused,
    exit_on,
    file_options,
    share_memory,
    terminal,
)
from rollcorr.config import SamplingSpec
from rollcorr.config.documents import BadInputError, load_yaml

if TYPE_CHECKING:
    from rollcorr.diagnostics.null.null_file import Sides


def parse_steps(text: str | None) -> tuple[int, int] | None:
    """Parse FIRST:LAST as two integers; return None without a text.

    Raises:
        BadInputError: the text is not of that form, or FIRST is larger.
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
            help="Rollout logs whose two sides are the same policy: files, folders or glob patterns; or null files. "
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
    rows: Annotated[
        int, typer.Option(help="Responses or pictures to sample; prompts are repeated where there are fewer.")
    ] = 256,
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
    engine_precision: Annotated[
        str,
        typer.Option(metavar="NAME", help="Declare a quantized engine: fp8, int8, fp4 or int4. The null records it."),
    ] = "",
    config: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE or dotted.name=value",
            help="Pictures: sample and score with this `flow_grpo` configuration, at its start; repeat the option.",
        ),
    ] = None,
    sampler: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="Pictures: your sampler, `sample` of `fresh_pictures`; with --config, a function of the trainer that "
            "returns a `DiffusionEngine`. It runs the module.",
        ),
    ] = None,
    trainer: Annotated[
        str | None, typer.Option(metavar="MODULE:NAME", help="Pictures: your trainer, `score` of `fresh_pictures`.")
    ] = None,
    trust: Annotated[bool, TRUST_OPTION] = False,
    workers: Annotated[int, typer.Option(help="How many processes read the log. The numbers do not depend on it.")] = 1,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    limit: Annotated[list[str] | None, LIMIT_OPTION] = None,
    columns: Annotated[list[str] | None, COLUMNS_OPTION] = None,
) -> None:
    """Measure the gap between a correct sampler and trainer, for `rollcorr check --null FILE`.

    From logs: pass rollouts whose two sides are known to be the same policy, such as the first steps of a correct run.
    A log whose sides show different sampling settings is an error.

        rollcorr null run/rollouts --steps 1:3 -o null.json

    Null files add up to one null, which records the step of each:

        rollcorr null a.json b.json -o null.json

    From an engine: it samples from a model, and the trainer scores the same tokens with the same weights. Use the
    engine, precision, prompts, lengths and sampling settings of the run: all of them change the null.

        rollcorr null --engine transformers --model DIR --prompts run/rollouts -o null.json
        rollcorr null --engine vllm_server --engine-option url=http://HOST:8000 --model DIR --prompts p.txt -o n.json

    Pictures: sampled and scored with the weights of the start, by a configuration or by two functions.

        rollcorr null --config flow_grpo.yaml -o null.json
        rollcorr null --config flow_grpo.yaml --sampler mine:engine -o null.json
        rollcorr null --sampler mine:sample --trainer mine:score -o null.json

    Exit codes: 0 written, 2 bad input, 130 interrupted.
    """
    share_memory()
    from rollcorr.diagnostics.null import is_large, remark_on_size
    from rollcorr.diagnostics.report.console import row_progress

    with exit_on(engines.EngineError, unwritten=output):
        check_unused(output, overwrite=overwrite)
        logs = logs or []
        of_pictures = bool(config or sampler or trainer)
        if not of_pictures or logs or engine:
            _check_one_source(logs, engine, model, prompts, of_pictures=of_pictures)
        file_limits, column_names = file_options(limit, columns)
        with TemporaryDirectory() as folder:
            rollouts = Path(folder) / "rollouts.parquet"
            if engine is not None and model is not None and prompts is not None:
                _write_sampled_rollouts(
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
            if of_pictures:
                _write_picture_rollouts(rollouts, config or [], sampler, trainer, pictures=rows, trust=trust)

            # Null files are there already; everything else is measured.
            merging = bool(logs) and all(path.suffix == ".json" for path in logs)
            if merging and (steps or train_column or engine_precision):
                raise BadInputError(
                    "null files add up as they are; leave out --steps, --train-column, --engine-precision"
                )
            with row_progress() as on_rows:
                null: diagnostics.MismatchNull | diagnostics.PictureNull
                if merging:
                    null = reduce(diagnostics.MismatchNull.merge, map(diagnostics.read_null, logs))
                else:
                    null = diagnostics.null_of_logs(
                        [rollouts] if engine or of_pictures else logs,
                        name=output.name,
                        kind="engine" if engine or of_pictures else "log",
                        sides=cast("Sides", sides) if engine else "run",  # checked with the engine's settings
                        steps=parse_steps(steps),
                        train_column=train_column,
                        workers=workers,
                        file_limits=file_limits,
                        column_names=column_names,
                        on_rows=on_rows,
                        engine_precision=engine_precision,
                    )
        null.save(output)
    if isinstance(null, diagnostics.PictureNull):
        typer.echo(
            f"{output}: {null.pictures:,} pictures, {null.exact_kl:.3g} nats per step at D = {null.dimensions:,}"
        )
        return
    profile = null.profile
    typer.echo(f"{output}: {profile.row_count:,} sequences, {profile.tokens:,} tokens, k3 {profile.k3:.3g} per token")
    for text in null.remarks:
        typer.echo(f"note: {text}")
    remark = remark_on_size(null)
    if remark:
        judges = is_large(null)
        typer.echo(f"{'note' if judges else 'warning'}: {remark}", err=not judges)


def _check_one_source(
    logs: list[Path], engine: str | None, model: str | None, prompts: Path | None, *, of_pictures: bool
) -> None:
    """Check that there is one complete source of rollouts.

    Raises:
        BadInputError: the source is missing or incomplete, or there are two.
    """
    alone = engine is None
    wrong = {
        "--model belongs to --engine NAME; give it too, or logs alone": alone and model,
        "--prompts belongs to --engine NAME; give it too, or logs alone": alone and prompts,
        "give rollout logs, or --engine NAME --model DIR --prompts FILE": alone and not logs,
        f"logs ({', '.join(map(str, logs))}) and --engine {engine} exclude each other; give one": engine and logs,
        "--config, --sampler and --trainer sample pictures; leave out the logs and --engine": of_pictures,
        f"--engine {engine} needs --model DIR": engine and model is None,
        f"--engine {engine} needs --prompts FILE (a rollout log with prompt_ids, or a .txt of lines)": engine
        and prompts is None,
    }
    for message, applies in wrong.items():
        if applies:
            raise BadInputError(message)


def _write_picture_rollouts(
    target: Path, config: list[str], sampler: str | None, trainer: str | None, *, pictures: int, trust: bool
) -> None:
    """Sample pictures, score them, and write the rollouts.

    Raises:
        BadInputError: the source is incomplete, or a setting is invalid.
    """
    from rollcorr.config.functions import load_function
    from rollcorr.rollout_log import RolloutLogWriter
    from rollcorr.train import load_config
    from rollcorr.train.config_file import check_trusted
    from rollcorr.train.flow_grpo.configured_pictures import configured_pictures
    from rollcorr.train.flow_grpo.flow_grpo_config import FlowGrpoConfig, RewardConfig
    from rollcorr.train.flow_grpo.fresh_pictures import fresh_pictures

    # One complete source: two functions, or a configuration.
    if bool(config) == bool(trainer) or (trainer and not sampler):
        raise BadInputError(
            "give --config FILE, alone or with --sampler MODULE:NAME (a function of the trainer that returns a "
            "DiffusionEngine), or both --sampler MODULE:NAME and --trainer MODULE:NAME"
        )
    try:
        # With a configuration, its trainer scores; without, the second function does.
        sample = None if sampler is None else load_function(sampler, option="--sampler")
        if sample and trainer:
            batches = fresh_pictures(sample, load_function(trainer, option="--trainer"), pictures=pictures)
        else:
            files = [text for text in config if "=" not in text]
            overrides = [text for text in config if "=" in text]
            found = load_config(files[0] if files else None, overrides)
            if not isinstance(found, FlowGrpoConfig):
                raise ValueError(f"--config {', '.join(files)} is of the recipe {found.recipe}; give a flow_grpo one")
            # No reward is computed, so of the options that run code only the family does.
            if not trust:
                check_trusted(replace(found, reward=RewardConfig()), overrides, ", ".join(files))
            batches = configured_pictures(found, sample, pictures=pictures)
        with RolloutLogWriter(target) as log:
            for batch in batches:
                log.write(batch)
    except (KeyError, TypeError, ValueError) as error:
        raise BadInputError(str(error)) from error


def _write_sampled_rollouts(
    target: Path,
    prompts: Path,
    options: list[str],
    *,
    sampling: dict[str, Any],
    **settings: Any,  # noqa: ANN401 (of `engine_null_rollouts`)
) -> None:
    """Sample from the engine, score, and write the rollouts. An interrupt during sampling writes nothing.

    Raises:
        BadInputError: a setting or a prompt is invalid.
    """
    from rollcorr.diagnostics.report.console import row_progress
    from rollcorr.rollout_log import RolloutLogWriter
    from rollcorr.train.grpo.engine_null import engine_null_rollouts, read_prompts

    engine_options = {}
    try:
        for option in options:
            name, equals, value = option.partition("=")
            if not (name and equals):
                raise ValueError(f"--engine-option {option[:60]!r} is not of the form NAME=VALUE")
            engine_options[name] = load_yaml(value)
        with row_progress("sampling") as on_rows:
            texts, spec = read_prompts(prompts), SamplingSpec(**sampling)
            # Sample everything first, so that a failure leaves no file.
            batches = list(
                engine_null_rollouts(texts, engine_options=engine_options, sampling=spec, on_rows=on_rows, **settings)
            )
        with RolloutLogWriter(target) as log:
            for batch in batches:
                log.write(batch)
    except (TypeError, ValueError) as error:
        # Translate the run's option names to this command's, the longest prefix first.
        text = str(error).replace("rollout.engine_options.", "--engine-option ").replace("rollout.sampling.", "--")
        raise BadInputError(text.replace("rollout.", "--")) from error


def calibrate_thresholds(
    null: Annotated[
        Path | None, typer.Argument(metavar="[NULL.json]", help="A null, as `rollcorr null` writes it.")
    ] = None,
    rate: Annotated[
        float, typer.Option(help="Share of healthy tokens (token settings) or sequences that a threshold may reject.")
    ] = 0.05,
    lengths: Annotated[str, typer.Option(help="Tokens of the responses, with commas.")] = "100,500,1000,8000",
    alarm_rate: Annotated[float, typer.Option(help="Share of healthy steps that may raise an alarm.")] = 0.001,
    sequences: Annotated[int, typer.Option(help="Sequences of a step, for the alarms.")] = 256,
    noise: Annotated[
        bool, typer.Option("--noise", help="Instead: what pure noise does to every customary limit. It needs no null.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Also write the thresholds as JSON.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compute thresholds and alarms that cost a stated share of healthy sequences, as a function of length.

    Every number has a 95 % interval over the sampling of the null's rows. Rows of a length that the null does not
    contain are cut or joined from its rows, and the output marks them.

    Exit codes: 0 printed, 2 bad input.
    """
    from rollcorr.diagnostics.report.advice_text import show_calibration, show_noise_table

    with exit_on():
        wanted = _parse_lengths(lengths)
        if noise:
            if null is not None or output is not None:
                raise BadInputError("--noise takes neither a null nor a file: it is about normal noise alone")
            rows = diagnostics.noise_table(lengths=wanted)
            if as_json:
                typer.echo(json.dumps([asdict(row) for row in rows], ensure_ascii=False, indent=1))
            else:
                show_noise_table(terminal(), rows, wanted)
            return
        if null is None:
            raise BadInputError("give a null (`rollcorr null LOG -o null.json`), or --noise")
        # Check the file first: a calibration may take a minute.
        check_unused(output, overwrite=overwrite)
        found = diagnostics.calibrate(
            diagnostics.read_null(null), rate=rate, lengths=wanted, alarm_rate=alarm_rate, sequences=sequences
        )
        if output is not None:
            found.save(output)
    if as_json:
        typer.echo(found.to_json())
    else:
        show_calibration(terminal(), found)


def advise_on(
    logs: Annotated[
        list[Path],
        typer.Argument(help="Rollout logs, or dumps of other frameworks: files, folders or glob patterns."),
    ],
    null: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="What two correct policies differ by here (`rollcorr null`). [default: RUN/null.json]"
        ),
    ] = None,
    config: Annotated[list[str] | None, CONFIG_OPTION] = None,
    intended: Annotated[
        bool,
        typer.Option("--intended", help="The sampler's weights are old or rounded on purpose: advise unjudged."),
    ] = False,
    train_column: Annotated[
        str | None,
        typer.Option(help="Trainer's log-probs: old_log_prob or log_prob. [default: the one that is recorded]"),
    ] = None,
    workers: Annotated[int, typer.Option(help="How many processes read the log. The numbers do not depend on it.")] = 1,
    limit: Annotated[list[str] | None, LIMIT_OPTION] = None,
    columns: Annotated[list[str] | None, COLUMNS_OPTION] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Also write the YAML alone, if the advice is to correct."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure corrections on a log, and recommend one with reasons and YAML to paste; or the repair to make first.

    With --config, also print the overrides that turn your configuration into the recommended one.

    Exit codes: 0 a preset, 1 repair something first, 2 bad input, 3 not judged, 130 interrupted.
    """
    share_memory()
    from rollcorr.config.schemas import as_overrides
    from rollcorr.diagnostics.log_check import choose_config
    from rollcorr.diagnostics.report.advice_text import show_advice
    from rollcorr.diagnostics.report.console import row_progress
    from rollcorr.run_directory.durable_files import write_text_durably

    with exit_on():
        check_unused(output, overwrite=overwrite)
        yours = choose_config(settings=config).to_dict() if config else None
        file_limits, column_names = file_options(limit, columns)
        with row_progress() as on_rows:
            result = diagnostics.check_logs(
                logs,
                train_column=train_column,
                null=None if null is None else diagnostics.read_null(null),
                candidates=True,
                workers=workers,
                file_limits=file_limits,
                column_names=column_names,
                on_rows=on_rows,
            )
        if result.interrupted:
            typer.echo("interrupted: part of a log gives no advice", err=True)
            raise typer.Exit(130)
        advice = diagnostics.advise(result, intended=intended)
        if output is not None and advice.yaml:
            write_text_durably(output, advice.yaml)
    if output is not None and not advice.yaml:
        typer.echo(f"{output} is not written: there is no configuration to write", err=True)
    if yours is not None and advice.config is not None:
        changed = {key: value for key, value in advice.config.to_dict().items() if value != yours[key]}
        typer.echo(f"over your configuration: {as_overrides(changed) or 'nothing to change'}", err=True)
    if as_json:
        typer.echo(advice.to_json())
    else:
        if result.null is not None:
            typer.echo(f"judged against {result.null.name}", err=True)  # users paste the YAML of the output
        show_advice(terminal(), advice)
    raise typer.Exit(advice.exit_code)


def _parse_lengths(text: str) -> list[int]:
    """Parse comma-separated lengths.

    Raises:
        BadInputError: a length is not an integer above 0.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise BadInputError(f"lengths are whole numbers with commas, for example 500,8000; got {text!r}")
    return [int(part) for part in parts]
