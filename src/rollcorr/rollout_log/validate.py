"""Validate rollout logs. Every check is vectorized over a column; findings contain file, row and column."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rollcorr.config.finding import Finding, HasFindings, merge_findings
from rollcorr.config.sampling_spec import JSON_MINUS_INFINITY, MOST_ROUNDED_UP
from rollcorr.rollout_log.arrow import pa
from rollcorr.rollout_log.batch import LENGTH_FIX, RolloutBatch
from rollcorr.rollout_log.errors import FileLimits, RolloutLogError
from rollcorr.rollout_log.reader import Paths, log_files, read_rollout_log
from rollcorr.rollout_log.schema import TOKEN_COLUMNS, arrow_type, check_columns, ragged

CHECK_COLUMNS: tuple[tuple[str, ...], ...] = (("rollout_log_prob",), ("old_log_prob", "log_prob"))
LOG_PROB_COLUMNS = ("rollout_log_prob", "old_log_prob", "log_prob")
ZERO_SHARE = 0.5  # of a row's sampled tokens; a row with more exact zeros is considered a placeholder
CERTAIN = -1e-3  # log-prob above which a token counts as certain
ZERO_TOKENS = 8  # rows with fewer sampled tokens are not checked for zeros

RowFindings = Iterator[tuple[np.ndarray, Finding]]
"""Rows of a batch with a finding, as a mask, and the finding with the text for the first of them."""

_BAD_KEPT_SETS_REASON = "a ratio replayed over these sets is not that of what was sampled"
_MISSING_VALUE_FIX = "store NaN (null in JSONL) for what is missing"


@dataclass(frozen=True)
class ValidationReport(HasFindings):
    """Result of `validate_rollout_log`.

    Attributes:
        files: the files read, in order.
        rows: number of rows in the readable files.
        recorded: columns that at least one row of any file records.
        findings: by file, one for each kind and column, with its first row and the number of rows. An error means that
            the log cannot be trusted; the subject of a warning may be intended.
    """

    files: tuple[str, ...]
    rows: int
    recorded: frozenset[str]
    findings: tuple[Finding, ...]

    def raise_errors(self) -> None:
        """Raise the errors of the report, but not its warnings.

        Raises:
            RolloutLogError: the report contains errors; the exception contains all of them.
        """
        if self.errors:
            raise RolloutLogError(*self.errors)


def validate_rollout_log(
    paths: Paths,
    *,
    required: Sequence[Sequence[str]] = CHECK_COLUMNS,
    batch_size: int = 256,
    file_limits: FileLimits | None = None,
) -> ValidationReport:
    """Read logs completely and collect their findings, without raising for them.

    Errors: a damaged file, a newer schema, a type that cannot be read, token columns of unequal length, negative ids,
    version spans that do not tile the response, kept sets that do not fit it, a required column that no row records.
    Warnings, on sampled tokens only: log-probs above 0 by more than rounding (densities?), −9999.0 (an engine's
    −inf), NaN or ±inf, rows mostly of exact zeros (placeholders?), sampled ids outside their kept set.

    Args:
        paths: as in `read_rollout_log`.
        required: groups of columns; each file must record at least one column of each group. The default is the
            columns for measuring the mismatch. `()` requires no columns.
        batch_size: most rows in memory at once; defaults to 256.
        file_limits: size limits of a file; defaults to `FileLimits()`.

    Returns:
        The report with all findings.

    Raises:
        ValueError: `required` names an unknown column.
        RolloutLogError: no log exists at `paths`.
    """
    check_columns(name for group in required for name in group)
    files = log_files(paths)
    findings: list[Finding] = []
    everywhere: set[str] = set()
    total = 0
    for file in files:
        found: tuple[Finding, ...] = ()
        recorded: set[str] = set()
        rows = 0
        try:
            for batch in read_rollout_log(file, batch_size=batch_size, file_limits=file_limits):
                rows += len(batch)
                recorded |= {name for name in batch.columns if batch.has(name)}
                found = merge_findings([*found, *validate_batch(batch)])
            found = (*found, *_check_columns(file, required, recorded, rows))
        except RolloutLogError as error:
            # A damaged file does not stop the validation of the next file.
            found = merge_findings([*found, *error.findings])
        findings += found
        everywhere |= recorded
        total += rows
    return ValidationReport(tuple(map(str, files)), total, frozenset(everywhere), tuple(findings))


def validate_batch(batch: RolloutBatch) -> tuple[Finding, ...]:
    """Return the findings of `validate_rollout_log` in one batch with any columns."""
    if not len(batch) or not any(name in batch.columns for name in TOKEN_COLUMNS):
        return ()
    wrong_lengths = list(_check_lengths(batch))
    fits = ~np.any([np.zeros(len(batch), bool), *(bad for bad, _ in wrong_lengths)], axis=0)
    found = [*wrong_lengths, *_check_ids(batch), *_check_spans(batch)]
    for check in (_check_kept_sets, _check_log_probs, _check_zeros):
        found += _check_selected_rows(fits, check, batch)
    return tuple(
        replace(finding, file=batch.file, first_row=batch.first_row + int(bad.argmax()), rows=int(bad.sum()))
        for bad, finding in found
        if bad.any()
    )


def _check_selected_rows(
    rows: np.ndarray, check: Callable[[RolloutBatch], RowFindings], batch: RolloutBatch
) -> RowFindings:
    """Run a check on the selected rows of a batch, and yield its findings."""
    if rows.any():
        for bad, finding in check(_select_rows(batch, rows)):
            whole = np.zeros(len(batch), bool)
            whole[rows] = bad
            yield whole, finding


def _select_rows(batch: RolloutBatch, rows: np.ndarray) -> RolloutBatch:
    return batch if rows.all() else RolloutBatch(batch.records.filter(pa.array(rows)))


def _check_columns(file: Path, required: Sequence[Sequence[str]], recorded: set[str], rows: int) -> Iterator[Finding]:
    """Check that a file has rows and the required columns."""
    if not rows:
        yield Finding(code="empty", title="no rows", file=str(file))
        return
    for group in required:
        if not recorded.intersection(group):
            yield Finding(
                code="missing",
                title="not recorded in any row",
                reason=f"recorded are {', '.join(sorted(recorded)) or 'no columns'}",
                fix="rename the column that holds it",
                severity="error",
                file=str(file),
                column=" or ".join(group),
            )


def _check_lengths(batch: RolloutBatch) -> RowFindings:
    """Check that each token column has one value per token of the response."""
    for name in TOKEN_COLUMNS:
        if batch.has(name):
            bad, title = batch.wrong_lengths(name)
            yield bad, _error("length", name, title, LENGTH_FIX)


def _check_ids(batch: RolloutBatch) -> RowFindings:
    """Check that token ids are not negative."""
    for name in ("prompt_ids", "response_ids", "kept_ids"):
        if batch.has(name):
            ids, sizes, _ = _ragged_numbers(batch, name)
            if len(ids) and ids.min() < 0:
                finding = _error("negative", name, "negative ids", "leave padding out instead of marking it")
                yield _locate(batch, _row_of_value(sizes)[ids < 0], finding)


def _check_spans(batch: RolloutBatch) -> RowFindings:
    """Check that version spans tile the response from the first token to the last."""
    if not batch.has("policy_versions"):
        return
    spans, sizes, recorded = ragged(batch.records.column("policy_versions"))
    start, length = (np.asarray(spans.field(name)).astype(np.int64) for name in ("start", "length"))
    row_of = _row_of_value(sizes)

    # Each span starts at the end of the previous one, and is not empty. Their lengths sum to the response's length.
    first = np.diff(row_of, prepend=-1) != 0
    expected = np.where(first, 0, np.concatenate([[0], (start + length)[:-1]]))
    broken = np.bincount(row_of[(start != expected) | (length <= 0)], minlength=len(batch)) > 0
    bad = recorded & (broken | (np.bincount(row_of, length, len(batch)) != batch.lengths.numpy()))

    row = int(bad.argmax())
    shown = [(int(s), int(n)) for s, n in zip(start[row_of == row], length[row_of == row], strict=True)]
    title = f"spans (start, length) {shown} do not tile a response of {int(batch.lengths[row])} tokens"
    yield bad, _error("spans", "policy_versions", title, "start at 0, leave no gap, end at the end")


def _check_kept_sets(batch: RolloutBatch) -> RowFindings:
    """Check that offsets of kept sets are valid, that the ids of a set are distinct, and that it has the sampled id."""
    yield from _check_kept_offsets(batch)
    usable = _rows_with_sets(batch)
    yield from _check_selected_rows(usable, _check_repeated_kept_ids, batch)
    if batch.has("response_ids"):
        yield from _check_selected_rows(usable & _ragged_numbers(batch, "response_ids")[2], _check_membership, batch)


def _check_kept_offsets(batch: RolloutBatch) -> RowFindings:
    """Check that kept offsets increase from 0 to the number of kept ids, with one entry more than tokens."""
    _, ids_sizes, ids_recorded = _ragged_numbers(batch, "kept_ids")
    offset, sizes, recorded = _ragged_numbers(batch, "kept_offsets")
    lengths = batch.lengths.numpy()

    one_sided = recorded != ids_recorded
    title = "only one of kept_ids and kept_offsets is recorded"
    yield one_sided, _error("kept", "kept_offsets", title, "record both", _BAD_KEPT_SETS_REASON)

    wrong = recorded & ~one_sided & (sizes != lengths + 1)
    row = int(wrong.argmax())
    title = f"{sizes[row]} offsets for a response of {lengths[row]} tokens"
    fix = "record one entry more than tokens; the last one is the number of kept ids"
    yield wrong, _error("kept_length", "kept_offsets", title, fix, _BAD_KEPT_SETS_REASON)

    # Only the offsets of these rows have a first and a last entry to compare.
    usable = recorded & ~one_sided & ~wrong
    row_of, ends = _row_of_value(sizes), np.cumsum(sizes)
    falls = (np.diff(offset) < 0) & (row_of[1:] == row_of[:-1])
    bad = np.bincount(row_of[1:][falls], minlength=len(batch)) > 0
    bad[usable] |= (offset[(ends - sizes)[usable]] != 0) | (offset[ends[usable] - 1] != ids_sizes[usable])
    title = "offsets fall, or do not run from 0 to the number of kept ids"
    yield bad & usable, _error("kept_offsets", "kept_offsets", title, fix, _BAD_KEPT_SETS_REASON)


def _rows_with_sets(batch: RolloutBatch) -> np.ndarray:
    """Return the rows with one kept set per token: (B,) bool."""
    return _ragged_numbers(batch, "kept_offsets")[2] & ~np.any([bad for bad, _ in _check_kept_offsets(batch)], axis=0)


def _kept_ids_and_tokens(batch: RolloutBatch) -> tuple[np.ndarray, np.ndarray]:
    """Return the kept ids of a batch whose rows are all usable, and the token index of each id."""
    kept = batch.kept_sets()
    return kept.ids.numpy(), _row_of_value(kept.offsets.diff())


def _check_repeated_kept_ids(batch: RolloutBatch) -> RowFindings:
    """Check that no id occurs twice in the kept set of a token, because its probability would count twice."""
    ids, token = _kept_ids_and_tokens(batch)

    # After sorting by token and then by id, equal ids of one token are adjacent.
    order = np.lexsort((ids, token))
    again = (ids[order][1:] == ids[order][:-1]) & (token[order][1:] == token[order][:-1])
    finding = _error("kept_twice", "kept_ids", "ids twice in one set", "record each id once", _BAD_KEPT_SETS_REASON)
    yield _locate(batch, _row_of_value(batch.lengths)[token[order][1:][again]], finding)


def _check_membership(batch: RolloutBatch) -> RowFindings:
    """Check that the kept set of each token contains the sampled id."""
    ids, token = _kept_ids_and_tokens(batch)
    responses, sampled = _recorded_tokens(batch, "response_ids")
    hits = token[ids == responses[token]]
    outside = (np.bincount(hits, minlength=len(responses)) == 0) & sampled
    finding = Finding(
        code="membership",
        column="kept_ids",
        title="sampled ids outside their kept set",
        reason="the sampled token always belongs to its set; the trainer inserts it and counts it",
    )
    yield _locate(batch, _row_of_value(batch.lengths)[outside], finding)


_ABOVE_ZERO = Finding(
    code="positive",
    title="log-probs above 0",
    reason="the probability of a token cannot exceed 1 by more than rounding; densities of a diffusion sampler can",
    fix="look for logits or densities in the column; for a diffusion sampler pass --diffusion",
)
_SENTINEL = Finding(
    code="sentinel",
    title="log-probs of −9999",
    reason="an engine writes −9999 for minus infinity, when the sampled token lay outside the set that was scored; "
    "`rollcorr check` reads it as missing",
    fix=_MISSING_VALUE_FIX,
)
_NONFINITE = Finding(
    code="nonfinite",
    title="NaN or infinite log-probs",
    reason="the configuration's `nonfinite` decides what becomes of these tokens",
)
_ZEROS = Finding(
    code="zeros",
    title="most log-probs of a sequence are exactly 0",
    fix=f"{_MISSING_VALUE_FIX}; log the log-probs of the distribution that was sampled",
)


def _check_log_probs(batch: RolloutBatch) -> RowFindings:
    """Check that log-probs of sampled tokens are valid. For denoising steps they are densities, and may be positive."""
    densities = batch.has("dimensions")
    largest = np.finfo(np.float32).max if densities else MOST_ROUNDED_UP
    for name in LOG_PROB_COLUMNS:
        if batch.has(name):
            # If the minimum and the maximum of all tokens are valid, so are all tokens. NaN fails both comparisons.
            every, _, _ = _ragged_numbers(batch, name)
            if not len(every) or (every.min() > JSON_MINUS_INFINITY and every.max() <= largest):
                continue
            value, sampled = _recorded_tokens(batch, name)
            checks = (
                ((value > MOST_ROUNDED_UP) & (not densities), _ABOVE_ZERO),
                (value == JSON_MINUS_INFINITY, _SENTINEL),
                (~np.isfinite(value), _NONFINITE),
            )
            for bad, finding in checks:
                yield _locate(batch, _row_of_value(batch.lengths)[bad & sampled], replace(finding, column=name))


def _check_zeros(batch: RolloutBatch) -> RowFindings:
    """Check that at most half of a row's log-probs are exactly 0.

    Skip tokens for which truncation kept a single id. Also skip tokens that are certain in a second log-prob column,
    because a placeholder would not agree with a computed value.
    """
    for name in LOG_PROB_COLUMNS:
        if batch.has(name):
            every, _, _ = _ragged_numbers(batch, name)
            if np.count_nonzero(every == 0) <= ZERO_SHARE * ZERO_TOKENS:
                continue  # fewer zeros than any row needs
            value, sampled = _recorded_tokens(batch, name)
            others = [other for other in LOG_PROB_COLUMNS if other != name and batch.has(other)]
            certain_elsewhere = np.any([batch.packed(other).numpy() > CERTAIN for other in others], axis=0)
            judged = sampled & ~_tokens_without_choice(batch) & ~certain_elsewhere
            value, row_of = value[judged], _row_of_value(batch.lengths)[judged]
            zeros = np.bincount(row_of[value == 0], minlength=len(batch))
            tokens = np.bincount(row_of, minlength=len(batch))
            bad = (tokens >= ZERO_TOKENS) & (zeros > ZERO_SHARE * tokens)
            row = int(bad.argmax())
            reason = (
                f"{zeros[row]} of {tokens[row]} in this row; that is probability 1, so they were filled in, or "
                "taken after greedy sampling"
            )
            yield bad, replace(_ZEROS, reason=reason, column=name, tokens=int(zeros[bad].sum()))


def _tokens_without_choice(batch: RolloutBatch) -> np.ndarray:
    """Return the tokens that may have probability 1, packed: (N,) bool.

    Their kept set contains one id, or is not recorded although the settings truncate.
    """
    lengths = batch.lengths.numpy()
    settings = batch.objects("sampling") if batch.has("sampling") else [{}] * len(batch)
    truncated = [bool(row) and row.get("logprobs") == "processed" and _truncates(row) for row in settings]
    alone = np.repeat(truncated, lengths)
    usable = _rows_with_sets(batch)
    if usable.any():
        alone[np.repeat(usable, lengths)] = _select_rows(batch, usable).kept_sets().offsets.diff().numpy() <= 1
    return alone


def _truncates(row: Mapping[str, Any]) -> bool:
    top_k, top_p, min_p = (row.get(name) for name in ("top_k", "top_p", "min_p"))
    return (top_k or -1) > 0 or (1.0 if top_p is None else top_p) < 1 or (min_p or 0.0) > 0


def _error(code: str, column: str, title: str, fix: str, reason: str = "") -> Finding:
    return Finding(code=code, column=column, title=title, reason=reason, fix=fix, severity="error")


def _locate(batch: RolloutBatch, row_of: np.ndarray, finding: Finding) -> tuple[np.ndarray, Finding]:
    """Compute the rows with a bad value, and add the counts to the finding.

    Args:
        batch: rows of a log.
        row_of: the row of each bad value.
        finding: the finding of these values.

    Returns:
        (B,) bool, and the finding with the count in the first such row and in all rows.
    """
    counts = np.bincount(row_of, minlength=len(batch))
    here = f"{counts[(counts > 0).argmax()]} in this row"
    reason = f"{here}; {finding.reason}" if finding.reason else here
    return counts > 0, replace(finding, reason=reason, tokens=int(counts.sum()))


def _recorded_tokens(batch: RolloutBatch, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a token column, packed, and the tokens where it is recorded and the mask is true: both (N,)."""
    recorded = np.repeat(_ragged_numbers(batch, column)[2], batch.lengths.numpy())
    return batch.packed(column).numpy(), recorded & batch.packed("response_mask").numpy()


def _ragged_numbers(batch: RolloutBatch, column: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return `ragged` of a list of numbers as arrays; the batch may lack the column."""
    array = batch.records.column(column) if column in batch.columns else pa.nulls(len(batch), arrow_type(column))
    values, sizes, recorded = ragged(array)
    return values.to_numpy(zero_copy_only=False), sizes, recorded


def _row_of_value(sizes: np.ndarray | Tensor) -> np.ndarray:
    """Compute the row of each value from the number of values of each row."""
    return np.repeat(np.arange(len(sizes)), sizes)
