"""`rollcorr conformance`: grade a function that corrects rollouts."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from rollcorr.cli.app import exit_on, terminal


def conformance(
    function: Annotated[str, typer.Argument(metavar="MODULE:NAME or FILE.py:NAME", help="The function to grade.")],
) -> None:
    """Grade a function that corrects rollouts by fifteen properties; print the smallest batch that fails.

    Give any framework's correction this form:

        def my_function(train_log_prob, rollout_log_prob, response_mask,
                        ceiling=2.0):
            ratio = (train_log_prob - rollout_log_prob).exp()
            return {"weights": ratio.clamp(max=ceiling)}

        rollcorr conformance my_module:my_function

    It gets log-probs in float32, nats, and a bool mask, (B, T) each. It may take these options:

        level             "token", "sequence", or None for no weights
        ceiling           largest weight
        token_band        (low, high): ratios of kept tokens
        geometric_band    (low, high): geometric mean ratios of kept sequences
        veto              a sequence with a ratio below it is rejected

    It returns a dictionary with any of these:

        weights      (B, T) or (B, 1)
        loss_mask    (B, T): the tokens that stay in the loss
        ess, k3      effective sample size as a share, and mean k3;
                     any other number is a statistic, too

    If the function has an attribute `merge`, it is called with a list of such dictionaries,
    one per micro-batch, and returns the numbers of the full batch.

    A property that needs a missing option or output is not applicable.
    The command imports the module or runs the file, as Python would.

    Exit codes: 0 no property failed, 1 one failed, 2 the function cannot be loaded or called, 130 interrupted.
    """
    from rollcorr.config.functions import load_function

    # As for `python -m`, the working directory holds modules.
    sys.path.insert(0, str(Path.cwd()))
    with exit_on(ValueError):
        graded = load_function(function, option="function")
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from rollcorr.conformance import PROPERTIES, grade_function

    verdicts: Counter[str] = Counter()
    stdout, stderr = terminal(), terminal(stderr=True)
    bar = (TextColumn("property"), BarColumn(), MofNCompleteColumn())
    interrupted = False
    # Each grade is printed at once, so an interrupt loses none.
    with Progress(*bar, console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        task = progress.add_task("", total=len(PROPERTIES))
        try:
            for grade in grade_function(graded):
                stdout.print(str(grade), markup=False, soft_wrap=True)
                verdicts[grade.verdict] += 1
                progress.advance(task)
        except KeyboardInterrupt:
            interrupted = True

    counts = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in ("pass", "fail", "not applicable", "error"))
    state = f"interrupted after {verdicts.total()} of {len(PROPERTIES)} properties: " if interrupted else ""
    stdout.print(f"{state}{counts}", soft_wrap=True)
    code = 130 if interrupted else _exit_code(verdicts)
    raise typer.Exit(code)


def _exit_code(verdicts: Counter[str]) -> int:
    """Return 1 if a property failed; else 2 if a call failed or nothing was graded."""
    if verdicts["fail"]:
        return 1
    return 2 if verdicts["error"] or not verdicts["pass"] else 0
