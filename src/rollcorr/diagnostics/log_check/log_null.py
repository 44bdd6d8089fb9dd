"""The null of a log: `rollcorr null`, and the first steps of a log that is checked."""

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
from rollcorr.diagnostics.null.null_file import FEW_TOKENS, Kind, MismatchNull, NullPart, Sides, unvetted_by_ids
from rollcorr.diagnostics.null.other_rows import NOT_OF_THEIR_TOKENS, enough, other_rows
from rollcorr.diagnostics.null.picture_judgment import guarded_null
from rollcorr.diagnostics.null.token_share import FIRST_IDS
from rollcorr.diagnostics.null.weight_judgment import doubt_of, judge_weights
from rollcorr.diagnostics.provenance.pair_sample import PairSample
from rollcorr.rollout_log import FileLimits, RolloutBatch
from rollcorr.rollout_log.reader import Paths
from rollcorr.run_directory.stored_run import BadInputError

MEASUREMENT = RolloutCorrectionConfig(rollout_is="token", apply_is=False)
"""What a pass for a null measures besides the profile: as little as possible."""
QUANTIZED = ("fp8", "int8", "fp4", "int4")
"""Precisions of an engine that explain weights other than the trainer's."""


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
        paths: files, folders (also run folders) or patterns.
        name: what verdicts call it.
        kind: "log", or "engine" where an engine made the rollouts for this purpose.
        sides: which two log-probs the rollouts hold, as `rollcorr null --sides`; a null of one side compared with
            itself is refused where a run is judged.
        train_column: where π is: old_log_prob or log_prob; None as in `check_logs`.
        steps: first and last step that count; None for all rows.
        workers: processes that read.
        file_limits: what a file may hold; None for the defaults.
        column_names: column of the log → its name in the files.
        on_rows: called now and then with the rows read since the last call, and the rows of the whole log.
        engine_precision: of a quantized engine, one of `QUANTIZED`: its weights may differ from the trainer's, by token
            id as well. The null keeps the remark.

    Returns:
        The null, a `PictureNull` for denoising steps; its `save` writes it.

    Raises:
        BadInputError: there is no row or no row of these steps, the log lacks a side, or its two sides are visibly not
            of one policy: other sampling settings, also where only the recorded ones say so, a shift, or weights that
            differ so much that the token id tells, if no quantized engine is declared.
        RolloutLogError: a log cannot be read.
        KeyboardInterrupt: it was interrupted; part of a log is no null.
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
    """Return the null of a log's pictures, or of those of some steps.

    Raises:
        BadInputError: there are none, they have no exact KL, or they show two policies.
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
    """The same for rollouts in memory, as `rollcorr.engines.measure_null` returns them.

    Args:
        batch: rollouts whose two sides are the same policy, or several batches of them.
        name: what verdicts call the null.
        kind: who made the rollouts.
        sides: as in `null_of_logs`: "engine" for `measure_null` without `score`, "trainer" for one with `again`.
        train_column: where π is.
        engine_precision: as in `null_of_logs`.

    Raises:
        BadInputError: the two sides are visibly not of one policy, or the recorded settings contradict themselves.
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
    """The null of a tally, unless it shows two policies; `placed` gives a finding the file that its first row is in."""
    if engine_precision and engine_precision not in QUANTIZED:
        raise BadInputError(
            f"engine precision {engine_precision!r} is none of {', '.join(QUANTIZED)}; an engine in another precision "
            "needs no declaration"
        )
    if steps is not None:
        tally = replace(tally, sample=_sample_of_steps(tally))
    profile = tally.profile if steps is None else _of_steps(tally, steps)

    # Numbers may agree by chance where settings do not, as raw log-probs of short answers that a sampler is sure of.
    findings = (*tally.claims.values(), *(f for f in tally.sample.estimate().warnings if fault(f.code).number))
    two_weights = () if engine_precision else judge_weights(profile, None).findings
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
    """Return the fields of a null that its rollouts decide, by name."""
    low, high = steps or (-math.inf, math.inf)
    own = [step for step in tally.parts if step is not None and low <= step <= high]
    first, last = (min(own), max(own)) if own else (None, None)
    return {
        "profile": profile,
        "share": profile.share,
        "origin": tally.origin,
        "engine_precision": engine_precision,
        "unvetted": unvetted_by_ids(profile),
        "doubted": "" if engine_precision else doubt_of(profile),
        "measured": (NullPart(first, last, profile.row_count, profile.tokens, profile.k3),),
    }


def null_of_pictures(batches: Sequence[RolloutBatch], *, name: str, quantized: bool = False) -> PictureNull:
    """Return the null of pictures in memory, such as those of `rollcorr.train.fresh_pictures`.

    Raises:
        BadInputError: as `picture_null`.
    """
    tally = Measurement(
        config=MEASUREMENT, train_column="old_log_prob", batch_size=256, denoising=True, with_exact_kl=True
    ).of_batches(batches)
    return picture_null(tally, None, name=name, quantized=quantized)


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The steps of a log that are to be its null.

    Attributes:
        null: what they make; None where too few of their rows are of any use.
        steps: the first and the last of them.
        profile: the mismatch of all of their rows; these are not judged.
        remark: what was left out, or why they are no null; empty without either.
    """

    null: MismatchNull | None
    steps: tuple[int, int]
    profile: MismatchProfile
    remark: str = ""


def first_steps_null(tally: Tally, steps: tuple[int, int] | None) -> Baseline | None:
    """The null that the first steps of a log make, or the steps that were asked for.

    Rows that certainly hold other values than the log-probs of their tokens are left out. Without steps asked for, None
    where the log has fewer than twice `FIRST_STEPS`.

    Raises:
        BadInputError: the log has no step of those asked for, or no other.
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

    # Steps that the user vouches for pass the guard of every null. Others are a start that nobody judged.
    if steps is not None and (two := judge_weights(profile, None).findings):
        return replace(baseline, null=None, remark=f"they are no null: {two[0]}")
    return _without_certain_rows(baseline, _sample_of_steps(tally))


def _without_certain_rows(baseline: Baseline, sample: PairSample) -> Baseline:
    """A baseline without the rows of a certain finding; without a null where too few others are left."""
    others = other_rows(sample, sample.estimate())
    if others is None or baseline.null is None:
        return baseline
    others = others.alike()
    rest = others.profile.folded(FIRST_IDS)  # as the steps are, and as the others will be
    steps = f"{len(sample.rows)} rows of steps {baseline.steps[0]} to {baseline.steps[1]}"
    held = f"{others.left_out or others.in_part} of {steps} hold {NOT_OF_THEIR_TOKENS}"
    if not enough(rest):
        few = f"{rest.row_count} others with {rest.tokens:,} tokens are left, {MIN_ROWS} and {FEW_TOKENS:,} are needed"
        return replace(baseline, null=None, remark=f"they are no null: {held}; {few}")
    null = replace(baseline.null, profile=rest, share=rest.share)
    return replace(baseline, null=null, remark=f"{held}; these are left out of the null")


def _sample_of_steps(tally: Tally) -> PairSample:
    """The sequences of the steps that the tally kept apart."""
    return reduce(PairSample.merge, tally.first_samples.values(), PairSample())


def _of_steps(tally: Tally, steps: tuple[int, int]) -> MismatchProfile:
    """The profile of the steps that the tally kept apart.

    Raises:
        BadInputError: there are none.
    """
    profile = reduce(MismatchProfile.merge, tally.first.values(), MismatchProfile().folded(FIRST_IDS))
    if not profile.tokens:
        known = sorted(step for step in tally.parts if step is not None)
        has = f"it has {known[0]} to {known[-1]}" if known else "it records no steps"
        raise BadInputError(f"no row of steps {steps[0]}:{steps[1]} in this log; {has}")
    return profile
