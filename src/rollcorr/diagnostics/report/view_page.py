"""The page of runs or rollout logs with their tokens."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rollcorr.config.documents import BadInputError
from rollcorr.diagnostics.log_check.check import check_logs
from rollcorr.diagnostics.log_check.token_rows import RULE, packed_tokens, read_tokens
from rollcorr.diagnostics.report.comparison_page import comparison_report, render_comparison
from rollcorr.diagnostics.report.html_page import render
from rollcorr.diagnostics.report.report_data import check_report, run_report
from rollcorr.diagnostics.run_verdict import MOST_BYTES
from rollcorr.run_directory.directory import RunDirectory
from rollcorr.run_directory.stored_run import Run, read_run


def view_page(
    paths: Sequence[Path],
    *,
    decode: Callable[[int], str] | None = None,
    text: bool = True,
    live: bool = False,
    on_rows: Callable[[int, int], None] | None = None,
) -> str:
    """Return the page of one run, of several side by side, or of a rollout log.

    Args:
        paths: run directories, or one rollout log.
        decode: token id → text; defaults to ids.
        text: show prompts, tokens and pictures' prompts; without it, the page has numbers only.
        live: the page asks its server for new steps.
        on_rows: called with the rows read since the last call, and the rows of the log.

    Raises:
        BadInputError: a path is neither, or several are given and one is no run.
        RolloutLogError: a log cannot be read.
    """
    if len(paths) == 1 and not RunDirectory(paths[0]).metrics.exists():
        result = check_logs(paths)
        found = read_tokens(paths, result.config, text=text, on_rows=on_rows)
        tokens = [packed_tokens(found, paths[0].name, decode)]
        return render(check_report(result), {"live": live, "rule": RULE, "tokens": tokens})

    runs = [read_run(path) for path in paths]
    page = tokens_of_runs(runs, decode=decode, text=text, on_rows=on_rows) | {"live": live}
    return render_comparison(comparison_report(runs), page) if len(runs) > 1 else render(run_report(runs[0]), page)


def tokens_of_runs(
    runs: Sequence[Run],
    *,
    decode: Callable[[int], str] | None = None,
    text: bool = True,
    most_bytes: float = math.inf,
    on_rows: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Return what a page shows of the tokens that runs logged.

    Args:
        runs: from `rollcorr.read_run`.
        decode: as for `view_page`.
        text: as for `view_page`.
        most_bytes: skip a run with larger rollouts; default: none.
        on_rows: as for `view_page`.

    Raises:
        RolloutLogError: a log cannot be read.
    """
    logged, tokens = [run for run in runs if 0 < _rollouts_size(run) <= most_bytes], []
    for run in logged:
        found = read_tokens(
            RunDirectory(run.path).rollouts, run.config, text=text, share=1 / len(logged), on_rows=on_rows
        )
        tokens.append(packed_tokens(found, run.path.resolve().name, decode))
    return {"tokens": tokens, "rule": RULE}


def logged_tokens(runs: Sequence[Run], *, text: bool) -> dict[str, Any]:
    """Return what the report shows of the tokens; empty without Arrow or if a log is unreadable.

    Args:
        runs: from `rollcorr.read_run`.
        text: include prompts and token ids.
    """
    try:
        return tokens_of_runs(runs, text=text, most_bytes=MOST_BYTES)
    except (ImportError, BadInputError):
        return {}


def _rollouts_size(run: Run) -> int:
    """Return the size of the rollouts that a run logged. A run may be untrusted, so a link in it is not followed."""
    folder = RunDirectory(run.path).rollouts
    files = list(folder.glob("*"))  # empty if there is no folder
    return 0 if any(file.is_symlink() for file in (folder, *files)) else sum(file.stat().st_size for file in files)


def token_decoder(directory: Path) -> Callable[[int], str]:
    """Return a function from a token id to its text.

    Args:
        directory: of a tokenizer, with tokenizer.json or another form that transformers reads.

    Raises:
        BadInputError: there is no tokenizer.
    """
    try:
        if (directory / "tokenizer.json").is_file():
            from tokenizers import Tokenizer

            own = Tokenizer.from_file(os.fspath(directory / "tokenizer.json"))
            return lambda token: own.decode([token], skip_special_tokens=False)
        from transformers import AutoTokenizer

        known = AutoTokenizer.from_pretrained(os.fspath(directory), local_files_only=True, trust_remote_code=False)
        return lambda token: known.decode([token])
    except ImportError as error:
        raise ImportError("--tokenizer needs transformers: pip install 'rollcorr[train]'") from error
    except Exception as error:
        raise BadInputError(f"{directory} holds no tokenizer ({error}); give the folder of tokenizer.json") from error
