"""`rollcorr confirm`: score logged rows again, to find which change of the scoring explains a mismatch."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollcorr.cli.app import COLUMNS_OPTION, exit_on, file_options, terminal
from rollcorr.cli.null_and_advice import parse_steps

if TYPE_CHECKING:
    from rollcorr.confirm import Confirmation

SHOWN = 4
"""Variants of each side in the table."""


def confirm_cause(
    logs: Annotated[
        list[Path], typer.Argument(help="Rollout logs with prompt_ids, response_ids and both sides' log-probs.")
    ],
    model: Annotated[
        str,
        typer.Option(metavar="DIR", help="The trainer's weights before the logged steps, as `save_pretrained` writes."),
    ],
    steps: Annotated[
        str | None, typer.Option(metavar="FIRST:LAST", help="Only these steps of the logs. [default: all]")
    ] = None,
    rows: Annotated[int, typer.Option(help="Rows to score, those with the largest mismatch.")] = 8,
    train_column: Annotated[
        str | None, typer.Option(help="Trainer's log-probs: old_log_prob or log_prob. [default: the recorded one]")
    ] = None,
    columns: Annotated[list[str] | None, COLUMNS_OPTION] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Name the change of the scoring that explains a mismatch, from rows scored again.

    The trainer's model scores the worst rows under variants: temperatures, penalties, top-p and top-k, BOS, chat
    template, prompts of other rows, bfloat16, logits that are not shifted, dropout off. The variant that equals the
    sampler's or the trainer's log-probs is the cause.

        rollcorr confirm run/rollouts --model run/checkpoints/step_000040 --steps 41:41

    The weights that step 40 saves sample and score step 41.
    Ctrl-C prints the result of the rows scored so far. Exit codes: 0 confirmed, or no mismatch, 2 bad input, 3 no
    variant explains it, 130 interrupted.
    """
    from rollcorr.confirm import confirm
    from rollcorr.diagnostics.report.console import row_progress
    from rollcorr.rollout_log.errors import RolloutLogError
    from rollcorr.train.grpo.policy import read_model, read_policy
    from rollcorr.train.model_files import model_directory

    with exit_on(RolloutLogError):
        # A model alone is enough; the tokenizer only adds the variant of the chat template.
        folder = model_directory(model)
        has_tokenizer = (folder / "tokenizer_config.json").is_file()
        policy = read_policy(folder) if has_tokenizer else None
        network = read_model(folder) if policy is None else policy.model
        with row_progress("scoring") as on_rows:
            result = confirm(
                [str(log) for log in logs],
                network,
                tokenizer=None if policy is None else policy.tokenizer,
                rows=rows,
                steps=parse_steps(steps),
                train_column=train_column,
                column_names=file_options(None, columns)[1],
                on_rows=on_rows,
            )
    if as_json:
        typer.echo(json.dumps(asdict(result), indent=2))
    else:
        typer.echo(result.verdict)
        _show_table(result)
    if not result.complete:
        raise typer.Exit(130)
    raise typer.Exit(0 if result.is_explained else 3)


def _show_table(result: Confirmation) -> None:
    from rich.table import Table

    table = Table("side", "variant", "gap (nats per token)", "excess removed", box=None)
    for side, found in result.sides.items():
        shown = {"plain": found.gaps["plain"]} | {name: found.gaps[name] for name in list(found.gaps)[:SHOWN]}
        for name, gap in shown.items():
            removed = f"{found.removed[name]:.0%}" if name in found.removed else ""
            table.add_row(side, name, f"{gap:.3g}", removed)
    typer.echo(f"{result.rows} rows, mismatch {result.mismatch:.3g} nats per token, bfloat16 noise {result.noise:.2g}")
    terminal().print(table)
