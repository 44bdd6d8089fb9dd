"""`rollcorr demo`, `explain`, `presets` and `info`: show the library's purpose, and explain its names."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from typing import Annotated

import typer

from rollcorr.cli.app import exit_on, terminal
from rollcorr.config.documents import dump_yaml
from rollcorr.config.presets import PRESETS, START_WITH, preset_fields


def demo() -> None:
    """Show a healthy run, a fault that is found and fixed, and a stale sampler with and without correction.

    It needs no model and no network, and finishes in less than a minute.
    The policies are tables over a few tokens. The library computes the corrections, the losses and the diagnosis.
    Everything is seeded: the numbers are the same on every run.
    """
    from rollcorr.demo.demo_screen import show_stories

    show_stories(terminal())


def explain(
    metrics: Annotated[
        list[str] | None,
        typer.Argument(metavar="METRIC…", help="Names as they stand in a log, with or without prefix."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each metric, in a list.")] = False,
) -> None:
    """Explain a metric: unit, formula, healthy range, and the fix outside it.

    Lists all names by default. Exit codes: 0 found, 2 unknown metric.
    """
    from rollcorr.core.metric_registry import METRICS
    from rollcorr.diagnostics.metric_explanation import explain_metric

    if not metrics:
        typer.echo("\n".join(METRICS))
        return
    with exit_on(ValueError):
        found = [explain_metric(name) for name in metrics]
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False, indent=2))
        return
    typer.echo("\n\n".join(_align_columns(explanation) for explanation in found))


def presets(
    name: Annotated[str | None, typer.Argument(metavar="[PRESET]", help="Print this preset as YAML.")] = None,
) -> None:
    """List the presets, or print one as YAML that `rollcorr check --config` and a trainer read.

    Exit codes: 0 found, 2 unknown preset.
    """
    if name is None:
        typer.echo(f"{START_WITH}\n")
        typer.echo(_align_columns({name: preset.description for name, preset in PRESETS.items()}))
        return
    with exit_on(ValueError):
        fields = preset_fields(name, {})
    preset = PRESETS[name]
    taken = ", ".join(preset.parameters) or "none"
    typer.echo(f"# {preset.description}\n# arguments: {taken}; source: {preset.source}")
    typer.echo(dump_yaml({"rollout_correction": fields or {"rollout_is": None}}), nl=False)


def info(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Show the installation: versions, extras, and the kernels that run here or the reason why not."""
    from rollcorr.diagnostics.installation import inspect_installation, show_installation

    installation = inspect_installation()
    if as_json:
        typer.echo(json.dumps(installation, ensure_ascii=False, indent=2))
    else:
        show_installation(terminal(), installation)


def _align_columns(lines: dict[str, str]) -> str:
    """Return headings and texts in two columns; a text wraps inside its column."""
    width = max(map(len, lines))
    # If the output is not a terminal, such as a pipe, do not wrap.
    columns = shutil.get_terminal_size((0, 0)).columns if sys.stdout.isatty() else 0
    indent = " " * (width + 2)
    texts = []
    for heading, text in lines.items():
        wrapped = textwrap.wrap(text, max(columns - width - 2, 20)) if columns else [text]
        texts.append(f"{heading:<{width}}  " + f"\n{indent}".join(wrapped))
    return "\n".join(texts)
