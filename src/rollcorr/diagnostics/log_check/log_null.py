"""The null of a log: for `rollcorr null`, and from the first steps of a checked log."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from rollcorr.config import Finding, RolloutCorrectionConfig
from rollcorr.diagnostics.faults import fault
from rollcorr.diagnostics.log_check.log_tally import one_thread, read_log
from rollcorr.diagnostics.log_check.tally import FIRST_STEPS, Measurement, Tally
from rollcorr.diagnostics.null import MismatchProfile, PictureNull
from rollcorr.diagnostics.null.excess import MIN_ROWS
from rollcorr.diagnostics.null.null_file import FEW_TOKENS, Kind, MismatchNull, NullPart, Sides
from rollcorr.diagnostics.null.other_rows import NOT_OF_THEIR_TOKENS, enough, other_rows
from rollcorr.diagnostics.null.picture_judgment import guarded_null
from rollcorr.diagnostics.null.token_share import FIRST_IDS
from rollcorr.diagnostics.null.weight_judgment import doubt_of, judge_weights, share_of, unvetted_by_ids
from rollcorr.diagnostics.provenance.pair_sample import PairSample
from rollcorr.rollout_log import FileLimits, RolloutBatch
from rollcorr.rollout_log.reader import Paths
from rollcorr.run_directory.stored_run import BadInputError

MEASUREMENT = RolloutCorrectionConfig(rollout_is="token", apply_is=False)
"""Cheapest configuration for a pass that needs only the profile."""
QUANTIZED = ("fp8", "int8", "fp4", "int4")
"""Engine precisions whose weights may differ from the trainer's."""


@one_thread()
def null_of_logs(
    paths: Paths,
    *,
    name: str = "null.json",
    kind: Kind = "log",
    sides: Sides = "run",
    train_column: str | None = None,
    steps: tuple[int, int] | None = None,
    workers: int = 1,
    file_limits: FileLimits | None = None,
    column_names: Mapping[str, str] | None = None,
    on_rows: Callable[[int, int], None] | None = None,
    engine_precision: str = "",
) -> MismatchNull | PictureNull:
    """Measure the null of rollouts whose two sides are the same policy.

    Args:
        paths: files, folders (also run folders) or glob patterns.
        name: name of the null in verdicts.
        kind: "log", or "engine" if an engine generated the rollouts to measure a null.
        sides: which two log-probs the rollouts contain, as `rollcorr null --sides`. A null that compares one side with
            itself cannot judge a run.
        train_column: column that contains log π: old_log_prob or log_prob; default as in `check_logs`.
        steps: first and last step to include; default: all rows.
        workers: number of reader processes.
        file_limits: size limits of a file; default limits if omitted.
        column_names: mapping from the log's column to its name in the files.
        on_rows: progress callback: receives the rows read since the last call, and the total rows of the log.
        engine_precision: precision of a quantized engine, from `QUANTIZED`. Its weights may differ from the trainer's,
            also by token id. The null stores it as a remark.

    Returns:
        The null; a `PictureNull` for denoising steps. Its `save` method writes it.

    Raises:
        BadInputError: there is no row, or no row of these steps; the log lacks a side; or its two sides are visibly
            different policies: sampling settings differ (measured, or only recorded), log-probs are shifted, or weights
            differ by token id and no quantized engine is declared.
        RolloutLogError: a log cannot be read.
        KeyboardInterrupt: reading was interrupted; a partial log is not a null.
    """
    read = read_log(
        paths,
        MEASUREMENT,
        train_column=train_column,
        null_steps=steps,
        workers=workers,
        file_limits=file_limits,
        column_names=column_names,
        on_rows=on_rows,
    )
    if read.tally.interrupted:
        raise KeyboardInterrupt
    if read.measurement.denoising:
        return picture_null(read.tally, steps, name=name, quantized=bool(engine_precision))
    return _null_of(
        read.tally,
        name=name,
        kind=kind,
        sides=sides,
        steps=steps,
        placed=read.in_its_file,
        engine_precision=engine_precision,
    )


def picture_null(tally: Tally, steps: tuple[int, int] | None, *, name: str, quantized: bool = False) -> PictureNull:
    """Return the null of a log's pictures, or of the pictures of some steps.

    Raises:
        BadInputError: there are no pictures, they lack the exact KL, or they show two policies.
    """
    low, high = steps or (-math.inf, math.inf)
    of_step = tally.pictures.column("step")
    chosen = tally.pictures if steps is None else tally.pictures.where((of_step >= low) & (of_step <= high))
    if not len(chosen):
        raise BadInputError(f"no picture of steps {low}:{high} in this log")
    return guarded_null(chosen, name=name, origin=tally.origin, quantized=quantized)


def null_of_batch(
    batch: RolloutBatch | Sequence[RolloutBatch],
    *,
    name: str = "null.json",
    kind: Kind = "engine",
    sides: Sides = "run",
    train_column: str = "old_log_prob",
    engine_precision: str = "",
) -> MismatchNull:
    """Measure the null of rollouts in memory, such as `rollcorr.engines.measure_null` returns.

    Args:
        batch: one or several batches of rollouts whose two sides are the same policy.
        name: name of the null in verdicts.
        kind: origin of the rollouts, as in `null_of_logs`.
        sides: as in `null_of_logs`: "engine" for `measure_null` without `score`, "trainer" with `again`.
        train_column: column that contains log π.
        engine_precision: as in `null_of_logs`.

    Returns:
        The null.

    Raises:
        BadInputError: the two sides are visibly different policies, or the recorded settings contradict themselves.
    """
    batches = [batch] if isinstance(batch, RolloutBatch) else batch
    tally = Measurement(config=MEASUREMENT, train_column=train_column, batch_size=256).of_batches(batches)
    return _null_of(tally, name=name, kind=kind, sides=sides, engine_precision=engine_precision)


def _null_of(
    tally: Tally,
    *,
    name: str,
    kind: Kind,
    sides: Sides,
    steps: tuple[int, int] | None = None,
    placed: Callable[[Finding], Finding] | None = None,
    engine_precision: str = "",
) -> MismatchNull:
    """Return the null of a tally; `placed` adds to a finding the file of its first row.

    Raises:
        BadInputError: the rollouts show two policies, or the engine precision is unknown.
    """
    if engine_precision and engine_precision not in QUANTIZED:
        raise BadInputError(
            f"engine precision {engine_precision!r} is none of {', '.join(QUANTIZED)}; an engine in another precision "
            "needs no declaration"
        )
    if steps is not None:
        tally = replace(tally, sample=_sample_of_steps(tally))
    profile = tally.profile if steps is None else _of_steps(tally, steps)

    # Check recorded settings as well: raw log-probs of short, confident answers agree even if settings differ.
    findings = (*tally.claims.values(), *(f for f in tally.sample.estimate().warnings if fault(f.code).number))
    two_weights = () if engine_precision else judge_weights(profile, None, sample=tally.sample).findings
    for finding in findings or two_weights:
        raise BadInputError(f"these rollouts are no null: {finding if placed is None else placed(finding)}")

    rows = tally.sample.rows
    return MismatchNull(
        name=name,
        kind=kind,
        **_described(tally, profile, steps, engine_precision=engine_precision),
        sides=sides,
        sample=tuple(rows[index].log_ratio for index in sorted(rows)) if steps is None else (),
    )


def _described(
    tally: Tally, profile: MismatchProfile, steps: tuple[int, int] | None, *, engine_precision: str = ""
) -> dict[str, Any]:
    """Return the fields of a null that depend on its rollouts, by name."""
    low, high = steps or (-math.inf, math.inf)
    own = [step for step in tally.parts if step is not None and low <= step <= high]
    first, last = (min(own), max(own)) if own else (None, None)
    share = share_of(profile, tally.sample if steps is None else _sample_of_steps(tally))
    return {
        "profile": profile,
        "share": share,
        "origin": tally.origin,
        "engine_precision": engine_precision,
        "unvetted": unvetted_by_ids(profile, share),
        "doubted": "" if engine_precision else doubt_of(profile, share),
        "measured": (NullPart(first, last, profile.row_count, profile.tokens, profile.k3),),
    }


def null_of_pictures(batches: Sequence[RolloutBatch], *, name: str, quantized: bool = False) -> PictureNull:
    """Return the null of pictures in memory, for example from `rollcorr.train.fresh_pictures`.

    Args:
        batches: pictures whose two sides are the same policy.
        name: name of the null in verdicts.
        quantized: True if the engine is quantized.

    Raises:
        BadInputError: as in `picture_null`.
    """
    tally = Measurement(
        config=MEASUREMENT, train_column="old_log_prob", batch_size=256, denoising=True, with_exact_kl=True
    ).of_batches(batches)
    return picture_null(tally, None, name=name, quantized=quantized)


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Steps of a log that serve as its null.

    Attributes:
        null: the null of these steps; None if they cannot serve as one.
        steps: first and last step.
        profile: mismatch of all rows of these steps, which are not judged.
        remark: rows that were excluded, or the reason for a missing null; may be empty.
    """

    null: MismatchNull | None
    steps: tuple[int, int]
    profile: MismatchProfile
    remark: str = ""


def first_steps_null(tally: Tally, steps: tuple[int, int] | None) -> Baseline | None:
    """Return the null of a log's first steps, or of the requested steps.

    Rows whose values are certainly not the log-probs of their tokens are excluded.

    Args:
        tally: sums of the log.
        steps: first and last step; default: the first `FIRST_STEPS` of the log.

    Returns:
        The baseline; None by default if the log has fewer than twice `FIRST_STEPS` steps.

    Raises:
        BadInputError: the log contains none of the requested steps, or no step outside them.
    """
    recorded = [step for step in tally.parts if step is not None]
    if steps is None and len(recorded) < 2 * FIRST_STEPS:
        return None
    lowest, highest = steps or (min(tally.first), max(tally.first))
    profile = _of_steps(tally, (lowest, highest))
    if not any(step < lowest or step > highest for step in recorded):
        raise BadInputError(f"every step of this log lies in {lowest}:{highest}; nothing is left to be judged")

    name = f"steps {lowest} to {highest} of this log"
    baseline = Baseline(
        null=MismatchNull(name=name, kind="first steps", **_described(tally, profile, (lowest, highest))),
        steps=(lowest, highest),
        profile=profile,
    )

    # Requested steps must pass the same checks as any null. The default first steps are not claimed to be correct.
    if steps is not None and (two := judge_weights(profile, None, sample=_sample_of_steps(tally)).findings):
        return replace(baseline, null=None, remark=f"they are no null: {two[0]}")
    return _exclude_faulty_rows(baseline, _sample_of_steps(tally))


def _exclude_faulty_rows(baseline: Baseline, sample: PairSample) -> Baseline:
    """Return a baseline without the rows of findings with high confidence; it has no null if not enough rows remain."""
    others = other_rows(sample, sample.estimate())
    if others is None or baseline.null is None:
        return baseline
    others = others.alike()
    rest = others.profile.folded(FIRST_IDS)  # as folded as the profiles it is compared with
    steps = f"{len(sample.rows)} rows of steps {baseline.steps[0]} to {baseline.steps[1]}"
    held = f"{others.left_out or others.in_part} of {steps} hold {NOT_OF_THEIR_TOKENS}"
    if not enough(rest):
        few = f"{rest.row_count} others with {rest.tokens:,} tokens are left, {MIN_ROWS} and {FEW_TOKENS:,} are needed"
        return replace(baseline, null=None, remark=f"they are no null: {held}; {few}")
    null = replace(baseline.null, profile=rest, share=rest.share)
    return replace(baseline, null=null, remark=f"{held}; these are left out of the null")


def _sample_of_steps(tally: Tally) -> PairSample:
    """Merge the sequence samples of the first steps."""
    return reduce(PairSample.merge, tally.first_samples.values(), PairSample())


def _of_steps(tally: Tally, steps: tuple[int, int]) -> MismatchProfile:
    """Merge the profiles of the first steps.

    Raises:
        BadInputError: the log contains no row of `steps`.
    """
    profile = reduce(MismatchProfile.merge, tally.first.values(), MismatchProfile().folded(FIRST_IDS))
    if not profile.tokens:
        known = sorted(step for step in tally.parts if step is not None)
        has = f"it has {known[0]} to {known[-1]}" if known else "it records no steps"
        raise BadInputError(f"no row of steps {steps[0]}:{steps[1]} in this log; {has}")
    return profile
