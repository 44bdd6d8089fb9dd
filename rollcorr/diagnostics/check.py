"""Check a rollout log: stream it through the correction, merge the statistics, and judge them.

One batch is in memory at a time. The verdict is about all rows together, exactly as one call on all of them would give
it (statistics merge exactly); the panels show each training step, where the log records steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.core.metrics import finalize
from rollcorr.core.statistics import Statistics, merge_statistics
from rollcorr.correction import Correction, correct
from rollcorr.diagnostics.evidence import Finding, bare_metrics
from rollcorr.diagnostics.health import HealthReport, health
from rollcorr.diagnostics.labels import Label, Provenance
from rollcorr.diagnostics.pair_sample import PairSample
from rollcorr.diagnostics.run_directory import BadInputError
from rollcorr.rollout_log import Problem, RolloutBatch, log_files, read_rollout_log, validate_batch
from rollcorr.sampling import SamplingSpec, compare
from rollcorr.schemas import resolve
from rollcorr.yaml_text import load_yaml

DIAGNOSIS = RolloutCorrectionConfig(
    rollout_is="token", rollout_is_threshold=2.0, rollout_token_veto_threshold=1e-4, apply_is=False
)
"""What `rollcorr check` measures by default: token weights truncated at 2 and the veto's share, no rejection criterion.

Token weights are the ones that stay informative at any length; the other levels and criteria say little before a level
and a band have been chosen, and are measured with `--preset` or `--config`.
"""

SENTINEL = -9999.0
CONTRADICTION = -1.0
"""Where one side is exactly 0.0 (probability 1) and the other below this, in nats, one of them was not computed."""

_COLUMNS = ("step", "response_mask", "rollout_log_prob", "old_log_prob", "log_prob", "reward", "sampling", "engine")
_RAW_FINDINGS: Mapping[str, tuple[str, str, str]] = {
    "positive": (
        "log-probs above zero",
        "the probability of a token cannot exceed 1; densities of a diffusion sampler can",
        "look for logits, densities or half-precision rounding in the column; for a diffusion sampler pass --diffusion",
    ),
    "sentinel": (
        "placeholder log-probs (−9999)",
        "an engine writes −9999 for minus infinity; it was read as missing here",
        "store NaN (null in JSONL) for what is missing; the sampled token lay outside the set that was scored",
    ),
    "zeros": (
        "sequences of mostly zero log-probs",
        "probability 1 on most tokens: filled in, or taken after greedy sampling",
        "store NaN (null in JSONL) for what is missing; log the log-probs of the distribution that was sampled",
    ),
}
"""Findings of the log's validation that are about the policies: title, reason, remedy. The rest become remarks."""
_NOT_SUBTRACTABLE: Mapping[str, tuple[str, str]] = {
    "tempered": ("temperature_ratio", "1"),
    "truncated": ("kept_mass", "1"),
    "raw": ("mean_ratio", "1"),
    "shifted": ("lag", "0"),
}
"""Labels of provenance that become findings: the number that shows each, and what it should be."""


def choose_config(*, preset: str | None = None, file: Path | None = None) -> RolloutCorrectionConfig:
    """What to measure: a preset, a YAML file of any generation, or `DIAGNOSIS` when neither is given.

    Raises:
        BadInputError: both are given, or what is given is no configuration or switches the correction off.
    """
    if preset is not None and file is not None:
        raise BadInputError(f"--preset {preset} and --config {file} exclude each other; give one")
    if preset is None and file is None:
        return DIAGNOSIS
    try:
        config = resolve(preset if file is None else load_yaml(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise BadInputError(f"{file or '--preset'}: {error}") from error
    if config is None:
        raise BadInputError(f"{file}: no rollout correction there, so nothing to measure; try --preset disabled")
    return config


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What a log says about the mismatch.

    Attributes:
        health: the verdict over all rows.
        metrics: every metric over all rows, prefixed.
        series: the metrics of each step, with "step" and, where recorded, "reward/mean"; one entry without steps.
        rows: rows read.
        files: files of the log.
        train_column: the column that π was taken from.
        provenance: what the log-probs imply about the sampling behind them, from a spread sample of the rows.
        config: the configuration that was measured.
        remarks: what the reader should know about the input.
        interrupted: reading stopped before the end.
    """

    health: HealthReport
    metrics: Mapping[str, float]
    series: tuple[Mapping[str, float], ...]
    rows: int
    files: tuple[str, ...]
    train_column: str
    provenance: Provenance
    config: RolloutCorrectionConfig
    remarks: tuple[str, ...]
    interrupted: bool


@dataclass
class _Part:
    """What was seen of one step: the correction's statistics, and sums over the raw columns."""

    statistics: Statistics
    zeros: int
    contradicted: int
    rewards: int
    reward: float


@dataclass
class _Tally:
    """What was seen so far."""

    parts: dict[int | None, _Part] = field(default_factory=dict)
    problems: dict[tuple[str, str | None], Problem] = field(default_factory=dict)
    sample: PairSample = field(default_factory=PairSample)
    claims: dict[str, str] = field(default_factory=dict)
    rows: int = 0
    train_column: str | None = None


def check_logs(
    paths: Sequence[str | Path],
    config: RolloutCorrectionConfig = DIAGNOSIS,
    *,
    train_column: str | None = None,
    diffusion: bool = False,
    batch_size: int = 256,
    on_rows: Callable[[int], None] | None = None,
) -> CheckResult:
    """Judge rollout logs, Parquet or JSONL, without a training run.

    Args:
        paths: files, folders (also run folders) or patterns.
        config: what to measure; nothing is trained, so what it would apply is only counted.
        train_column: where π is: old_log_prob or log_prob. None takes old_log_prob where recorded, else log_prob; with
            `bypass_mode` the other way round, for there old_log_prob is a copy of rollout_log_prob.
        diffusion: the log-probs are densities: positive ones are no finding, and the diffusion rules warn.
        batch_size: most rows in memory at once.
        on_rows: called with the number of rows after each batch, for a progress bar.

    Returns:
        The result. After a KeyboardInterrupt it covers the rows read until then, and says so.

    Raises:
        BadInputError: there is no row, or a column that is needed is not recorded.
        RolloutLogError: a log cannot be read; the message names file, row and column.
    """
    if train_column not in (None, "old_log_prob", "log_prob"):
        raise BadInputError(f"the training side is old_log_prob or log_prob, not {train_column!r}")
    if config.nonfinite == "raise":  # A check counts what is missing and goes on.
        config = replace(config, nonfinite="reject_token")
    tally, interrupted = _Tally(train_column=train_column), False
    try:
        for batch in read_rollout_log([str(path) for path in paths], columns=_COLUMNS, batch_size=batch_size):
            _add(tally, batch, config)
            if on_rows is not None:
                on_rows(len(batch))
    except KeyboardInterrupt:
        interrupted = True
    files = tuple(str(file) for file in log_files([str(path) for path in paths]))
    if not tally.parts or tally.train_column is None:
        seen = "nothing was read before the interrupt" if interrupted else "there is no row"
        raise BadInputError(f"{', '.join(map(str, paths))}: {seen}; give a log with at least one sequence")
    return _result(tally, config, files=files, diffusion=diffusion, interrupted=interrupted)


def _add(tally: _Tally, batch: RolloutBatch, config: RolloutCorrectionConfig) -> None:
    """Take one batch into the tally, step by step."""
    for problem in validate_batch(batch):
        key = (problem.code, problem.column)
        known = tally.problems.get(key)
        tally.problems[key] = problem if known is None else replace(known, rows=known.rows + problem.rows)
    if not len(batch):
        return
    if tally.train_column is None:
        tally.train_column = _train_column(batch, config)
    rollout, train = batch.packed("rollout_log_prob"), batch.packed(tally.train_column)
    mask = batch.packed("response_mask")
    rollout, train = (x.masked_fill(x == SENTINEL, torch.nan) for x in (rollout, train))
    tally.sample.add(train, rollout, mask, batch.lengths)
    tally.claims.update(_claims(batch))
    rewards = batch.values("reward") if batch.has("reward") else rollout.new_full((len(batch),), torch.nan)
    for step, rows in _by_step(batch):
        tokens = rows.repeat_interleave(batch.lengths)
        lengths = batch.lengths[rows]
        cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        correction = correct(train[tokens], rollout[tokens], mask[tokens], config, cu_seqlens=cu_seqlens)
        valid = tokens & mask
        part = _part(correction, train[valid], rollout[valid], rewards[rows])
        tally.parts[step] = _merged([tally.parts[step], part]) if step in tally.parts else part
    tally.rows += len(batch)


def _part(correction: Correction, train: Tensor, rollout: Tensor, rewards: Tensor) -> _Part:
    """What one stretch of rows shows; `train` and `rollout` hold the valid tokens only."""
    if correction.statistics is None:
        raise ValueError("a configuration that corrects nothing has nothing to measure; use the preset 'disabled'")
    contradicted = ((rollout == 0) & (train < CONTRADICTION)) | ((train == 0) & (rollout < CONTRADICTION))
    return _Part(
        correction.statistics,
        zeros=int(((rollout == 0) | (train == 0)).sum()),
        contradicted=int(contradicted.sum()),
        rewards=int((~rewards.isnan()).sum()),
        reward=float(rewards.nansum()),
    )


def _merged(parts: Iterable[_Part]) -> _Part:
    parts = list(parts)
    return _Part(
        merge_statistics(part.statistics for part in parts),
        zeros=sum(part.zeros for part in parts),
        contradicted=sum(part.contradicted for part in parts),
        rewards=sum(part.rewards for part in parts),
        reward=sum(part.reward for part in parts),
    )


def _train_column(batch: RolloutBatch, config: RolloutCorrectionConfig) -> str:
    order = ("log_prob", "old_log_prob") if config.bypass_mode else ("old_log_prob", "log_prob")
    found = next((name for name in order if batch.has(name)), None)
    if found is None:
        recorded = ", ".join(name for name in batch.columns if batch.has(name)) or "none"
        raise BadInputError(
            f"{batch.file}, column old_log_prob: not recorded, nor is log_prob, so there is no training side; recorded "
            f"are {recorded}. Score the tokens with the trainer and log that"
        )
    return found


def _by_step(batch: RolloutBatch) -> Iterator[tuple[int | None, Tensor]]:
    """Each step of a batch, None when none is recorded, with a mask of its rows."""
    if not batch.has("step"):
        yield None, torch.ones(len(batch), dtype=torch.bool)
        return
    steps = batch.values("step")
    for step in steps.unique().tolist():
        yield step, steps == step


def _result(
    tally: _Tally, config: RolloutCorrectionConfig, *, files: tuple[str, ...], diffusion: bool, interrupted: bool
) -> CheckResult:
    whole = _metrics(_merged(tally.parts.values()))
    steps = sorted(step for step in tally.parts if step is not None)
    series = tuple({"step": step, **_metrics(tally.parts[step])} for step in steps) or ({"step": 0, **whole},)
    verdict = health(whole, config, series=series if len(steps) > 1 else (), diffusion=diffusion)
    judged = [p for p in tally.problems.values() if p.code in _RAW_FINDINGS]
    found = [_finding(problem) for problem in judged if not (diffusion and problem.code == "positive")]
    provenance = tally.sample.estimate()
    if not diffusion:
        found += [_claimed(reason, mend) for reason, mend in tally.claims.items()]
        found += [_implied(label) for label in provenance.wrong if label.name in _NOT_SUBTRACTABLE]
    remarks = [f"π is the column {tally.train_column}, μ is rollout_log_prob"]
    remarks += [str(problem) for problem in tally.problems.values() if problem.code not in _RAW_FINDINGS]
    if interrupted:
        remarks.append(f"interrupted: this covers the first {tally.rows} rows only")
    return CheckResult(
        health=replace(verdict, findings=(*verdict.warnings, *found, *verdict.notes)),
        metrics=whole,
        series=series,
        rows=tally.rows,
        files=files,
        train_column=str(tally.train_column),
        provenance=provenance,
        config=config,
        remarks=tuple(remarks),
        interrupted=interrupted,
    )


def _metrics(part: _Part) -> dict[str, float]:
    """The metrics of a part: the registry's, the reward, and what was counted in the raw log-probs."""
    metrics = finalize(part.statistics.read())
    tokens = bare_metrics(metrics).get("token_count", 0.0)
    if part.rewards:
        metrics["reward/mean"] = part.reward / part.rewards
    metrics["log/zero_fraction"] = part.zeros / tokens if tokens else 0.0
    metrics["log/contradicted_zero_count"] = float(part.contradicted)
    return metrics


def _finding(problem: Problem) -> Finding:
    title, reason, remedy = _RAW_FINDINGS[problem.code]
    return Finding(
        metric=f"log/{problem.column}",
        title=title,
        value=float(problem.rows),
        limit="0 sequences",
        reason=f"{reason}; first in {problem.file}, row {problem.row}: {problem.message}",
        remedy=remedy,
    )


def _claims(batch: RolloutBatch) -> dict[str, str]:
    """Reason → mend, where the recorded settings say that the log-probs are not those of what was sampled."""
    if not batch.has("sampling"):
        return {}
    engines = batch.objects("engine") if batch.has("engine") else [None] * len(batch)
    settings = {
        (*((name, value) for name, value in row.items() if value is not None), ("engine", engine))
        for row, engine in zip(batch.objects("sampling"), engines, strict=True)
        if row
    }
    claims = {}
    for row in settings:
        try:
            spec = SamplingSpec(**dict(row))
        except (TypeError, ValueError):  # settings of another framework, out of these limits
            continue
        itself = compare(spec, spec)
        if itself.verdict == "different":
            claims[itself.reason] = itself.mend
    return claims


def _claimed(reason: str, mend: str) -> Finding:
    return Finding(
        metric="log/sampling",
        title="log-probs are of different things: the recorded settings say so",
        value=1.0,
        limit="0",
        reason=reason,
        remedy=mend,
    )


def _implied(label: Label) -> Finding:
    number, limit = _NOT_SUBTRACTABLE[label.name]
    return Finding(
        metric=f"log/{number}",
        title=f"log-probs are of different things: {label.name}",
        value=label.evidence[number],
        limit=limit,
        reason=label.says,
        remedy=label.remedy,
    )
