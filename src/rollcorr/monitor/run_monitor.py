"""`Monitor`: correction, metrics, alarms and logs of a run, for any training loop."""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig, SamplingSpec
from rollcorr.config.documents import dump_yaml
from rollcorr.config.finding import Finding
from rollcorr.core.mergeable_statistics import Statistics
from rollcorr.core.metric_registry import PREFIX
from rollcorr.correction import Correction, correct
from rollcorr.correction.losses import PolicyLossOutput
from rollcorr.correction.process_groups import check_groups, members
from rollcorr.correction.rollout_correction import configuration_of
from rollcorr.correction.weight_probe import WeightProbe
from rollcorr.diagnostics.health.evidence import RECENT_STEPS, bare_metrics
from rollcorr.diagnostics.health.health_check import Verdict
from rollcorr.diagnostics.health.trend import AGE, NULL_IS_LARGE, NULL_IS_VETTED, NULL_K3, NULL_STD, WATCHED
from rollcorr.monitor.batch_at_hand import BatchAtHand, first_cause
from rollcorr.monitor.field_names import read_fields
from rollcorr.monitor.lag_split import LagSplit
from rollcorr.monitor.own_null import OwnNull
from rollcorr.monitor.rollout_sample import CollectedRollouts, HostRows, RolloutSample
from rollcorr.monitor.run_writer import ANALYSIS, CLOSING_SECONDS, CONFIG, LINE, ROWS, SINKS, RunWriter, WriteTask
from rollcorr.monitor.running_judge import COUNTS, RunningJudge, alarm_text
from rollcorr.monitor.step_totals import RankExchange, StepTotals, merged_metrics
from rollcorr.rollout_log import RolloutBatch
from rollcorr.rollout_log.arrow import pa as pyarrow
from rollcorr.run_directory.directory import RunDirectory
from rollcorr.run_directory.durable_files import write_text_durably
from rollcorr.run_directory.metrics_file import drop_later_steps, metrics_lines
from rollcorr.run_directory.run_lock import run_lock
from rollcorr.run_directory.sinks import JsonLines, Sink
from rollcorr.run_directory.tracker_sinks import Sinks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

    from rollcorr.config import ConfigOptions, PresetName
    from rollcorr.correction import Detail
    from rollcorr.kernels.correction.call import Out


logger = logging.getLogger("rollcorr.monitor")

OnAlarm = Callable[[Finding], object]

# Steps that are not yet written to metrics.jsonl after a failure, or are lost. Reported only if there are some.
UNWRITTEN = "monitor/unwritten_steps"
# Steps whose rollout log is lost, averaged over the ranks that lost some. Reported only if there are some.
LOST_ROLLOUTS = "monitor/lost_rollout_logs"
# Steps that no sink receives, because a sink hangs and the queue is full. Reported only if there are some.
LOST_FOR_SINKS = "monitor/lost_sink_steps"


class Monitor:
    """The monitor of a run: `correct` measures and corrects a batch, `step` ends a training step.

        with Monitor("runs/first", "decoupled_token_is") as monitor:
            for batch in batches:
                correction = monitor.correct(old_log_prob, rollout_log_prob, response_mask)
                ...  # the losses and the optimizer
                monitor.step(reward=rewards, loss=loss)

    A step contains one or more calls of `correct`; their statistics are merged exactly, over micro-batches and ranks.
    `step` copies all statistics to the host in one transfer, queues them for the thread that writes `metrics.jsonl`,
    and judges the recent steps. Problems are logged by `logging.getLogger("rollcorr.monitor")` and passed to
    `on_alarm`, once for as long as they persist.

    No call raises into a training step, or blocks it for more than 50 ms, because of files, trackers or judgments:
    errors are logged, and writes are retried. Invalid arguments raise. A collective waits for the slowest rank.

    Args:
        run_dir: the run's directory; `rollcorr report`, `watch` and `compare` read it.
        config: the correction, as in `rollcorr.correct`; defaults to the preset `measure`, or to `options`.
        group: the data-parallel ranks. Every rank creates a Monitor, and calls `step` the same number of times.
        context_group: the ranks with other tokens of the same sequences. Each of them creates a Monitor and calls
            `step` the same number of times.
        start: number of completed steps, for a run that resumes from a checkpoint. Later logged steps are dropped,
            because they are computed again.
        sinks: destinations of the metrics besides `metrics.jsonl`: "tensorboard", "wandb", "mlflow", "trackio",
            "stdout", or objects with `write(step, metrics)` and `close()`. Only the first rank uses them, in a
            background thread.
        on_alarm: callback for the `Finding` of each alarm that begins, called on every rank. Its exceptions are logged.
        null_steps: "auto" makes a null of the first steps with fresh weights, unless the directory has `null.json`.
        rollouts: the sampling of the rollout log, which has a file for each step and rank. By default no log is
            written.
        sampling: the sampler's settings, for the rollout log and config.yaml; without them no verdict is "healthy".
        strict: wait for the files and sinks in every step, and raise their errors and errors of the judgment.
        options: fields of `RolloutCorrectionConfig` that override `config`.

    Attributes:
        steps: completed steps.
        config: the default configuration of every call of `correct`.
        sampling: the sampler's settings.
        config_was_given: whether the constructor received a configuration, by `config` or by `options`.
        directory: the directory of the files.

    Raises:
        FileExistsError: the directory already has steps, and `start` is missing.
        ImportError: a sink or the rollout log needs a package that is missing; the message names the extra.
        ValueError, TypeError: the configuration is invalid, the groups overlap, or a sink is unknown.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        config: RolloutCorrectionConfig | PresetName | Mapping[str, Any] | None = None,
        *,
        group: ProcessGroup | None = None,
        context_group: ProcessGroup | None = None,
        start: int | None = None,
        sinks: str | Sequence[str | Sink] = (),
        on_alarm: OnAlarm | Sequence[OnAlarm] = (),
        rollouts: RolloutSample | None = None,
        sampling: SamplingSpec | None = None,
        null_steps: Literal["auto"] | None = None,
        strict: bool = False,
        **options: Unpack[ConfigOptions],
    ) -> None:
        if null_steps not in (None, "auto"):
            raise ValueError(f"null_steps is 'auto' or None, got {null_steps!r}; `rollcorr null --steps` takes others")
        self.config = configuration_of(config, options)
        self.config_was_given = config is not None or bool(options)
        self.directory = RunDirectory(Path(run_dir))
        self.steps = start or 0
        self._group, self._context_group = group, context_group
        check_groups(group, context_group)
        self._exchange = RankExchange(group, context_group)
        self._lags = LagSplit()
        self._writes = (context_group is None or context_group.rank() == 0) and self._exchange.rank == 0
        self._on_alarm = (on_alarm,) if callable(on_alarm) else tuple(on_alarm)
        given, noise = None, None
        if self.directory.null.exists():
            from rollcorr.diagnostics.null.run_null import noise_beside, null_beside  # it needs Arrow

            given, noise = null_beside(self.directory.path), noise_beside(self.directory.path)
        self._null = OwnNull(
            None if self.directory.null.exists() else self.directory.null, given, from_first_steps=null_steps == "auto"
        )

        # One rank analyzes rows. It needs complete rows, so there is no analysis with a context group's slices.
        self._analyzes = self._writes and self._exchange.context_ranks == 1 and find_spec("pyarrow") is not None
        self._unexplained: list[Finding] = []
        self.sampling = sampling
        self._judge = RunningJudge(noise, sampling=sampling is not None)
        self._judged_config = self.config
        self._sample = rollouts
        self._strict = strict
        self._errors: deque[BaseException] = deque(maxlen=1)  # of files and sinks, for `strict`
        self._files: RunWriter | None = None
        self._trackers: RunWriter | None = None
        self._file: JsonLines | None = None
        self._sinks: Sinks | None = None
        self._begin_step()

        # One rank prepares the directory and broadcasts the result, so that no rank hangs after an error, and all ranks
        # judge by the same steps.
        problem: Exception | None = None
        earlier: list[dict[str, Any]] = []
        try:
            if rollouts is not None or null_steps is not None:
                pyarrow.int64()  # imports it now: a missing extra is found before the first step

            # The writer thread owns the lock and the file: a write that hangs keeps them until it ends.
            held = ExitStack()
            if self._writes or rollouts is not None:
                self._files = RunWriter(self._errors.append, held.close)
            if self._writes:
                earlier = self._prepare_directory(start, sinks, held)
            self._write_config()
            self.flush()
        except Exception as error:  # trackers have errors of their own
            problem = error
        problem_anywhere, earlier = self._agree_on_start(problem, earlier)
        if problem_anywhere is not None:
            self.close()
            raise problem or problem_anywhere
        for metrics in earlier:
            self._judge.remember(metrics["step"], bare_metrics(metrics))

    def correct(
        self,
        train_log_prob: Tensor | object,
        rollout_log_prob: Tensor | None = None,
        response_mask: Tensor | None = None,
        *configuration: object,
        fields: str | Mapping[str, str] | None = None,
        cu_seqlens: Tensor | None = None,
        columns: Mapping[str, object] | None = None,
        position_ids: Tensor | None = None,
        over_ranks: bool = True,
        detail: Detail | bool = False,
        fill: float = 0.0,
        out: Out | None = None,
        densities: bool = False,
        **options: Unpack[ConfigOptions],
    ) -> Correction:
        """Compute `rollcorr.correct` and count the result in this step.

        Args:
            train_log_prob: log π, nats, (B, T), or (N,) with `cu_seqlens`; or a batch that contains all tensors by
                name, such as a mapping, a TensorDict or a DataProto.
            rollout_log_prob: log μ, nats, the same shape.
            response_mask: non-zero on sampled tokens, the same shape.
            fields: the framework whose names the batch has, or column of the rollout log → name in the batch. By
                default detected from the names.
            cu_seqlens: (B + 1,) token offsets, only when packed.
            columns: further columns of the rollout log: columns of the schema, and custom columns with names `x_…`, one
                value for each sequence. Used only if this step is logged, except `policy_versions`: one version, one
                per sequence, or one per token, by which the mismatch is split into engine and staleness.
            position_ids: position of each token in its response; only to sort a context group's slices in the log. By
                default, the slices are in the order of the ranks.
            over_ranks: compute batch normalization, counts and denominators over all ranks, by a collective, so that
                every rank must call this the same number of times. If false, they cover only this batch; the metrics of
                the step always cover all ranks.
            configuration: raises TypeError; the configuration belongs to the constructor.
            detail: as in `rollcorr.correct`.
            fill: as in `rollcorr.correct`.
            out: as in `rollcorr.correct`.
            densities: as in `rollcorr.correct`.
            options: further options of `rollcorr.correct`: configuration fields and `impl`.

        Raises:
            TypeError, ValueError: as in `rollcorr.correct`; or the calls of this step measure different rows; or a
                batch lacks a field.
        """
        if not isinstance(train_log_prob, Tensor):
            found = read_fields(train_log_prob, fields, context_group=self._context_group)
            train_log_prob, rollout_log_prob, response_mask = found[:3]
            cu_seqlens, columns = found.cu_seqlens, {**found.columns, **(columns or {})}
        if rollout_log_prob is None or response_mask is None:
            raise TypeError("correct takes train_log_prob, rollout_log_prob and response_mask, or one batch")
        if configuration or "config" in options:
            given = repr(configuration[0] if configuration else options.get("config"))
            raise TypeError(
                f"a run has one configuration: give it to the constructor, Monitor(run_dir, {given}), and call "
                "monitor.correct(train_log_prob, rollout_log_prob, response_mask) without it"
            )

        correction = correct(
            train_log_prob,
            rollout_log_prob,
            response_mask,
            self.config,
            cu_seqlens=cu_seqlens,
            group=self._group if over_ranks else "local",
            context_group=self._context_group,
            detail=detail,
            fill=fill,
            densities=densities,
            out=out,
            **options,
        )
        # Do not count a part of an invalid batch: the caller may catch the error, and retry.
        own = {"rollout_log_prob": rollout_log_prob, "old_log_prob": train_log_prob, "sampling": self.sampling}
        logged: dict[str, object] = {**own, **(columns or {})}
        sampled = None
        if self._rollouts is not None:
            sampled = self._rollouts.sampled(
                self.steps + 1,
                response_mask,
                logged,
                cu_seqlens=cu_seqlens,
                position_ids=position_ids,
                context_group=self._context_group,
            )
        self.add(correction)
        # The versions of the weights are not in the correction's statistics.
        versions = (columns or {}).get("policy_versions")
        log_probs = (train_log_prob, rollout_log_prob)
        split = self._lags.statistics(self.steps + 1, versions, *log_probs, response_mask, cu_seqlens)
        if split is not None:
            self._totals.add_statistics("lags", split)
        if self._rollouts is not None and sampled is not None:
            self._rollouts.keep(*sampled)
        if self._analyzes:
            self._at_hand.hold(response_mask, logged, cu_seqlens)
        return correction

    def add(self, measured: Correction | PolicyLossOutput | Statistics | WeightProbe | RolloutBatch) -> None:
        """Count a correction, a loss, or a loss's statistics that were computed without `Monitor.correct`.

        The result of `engine.probe` becomes the metrics `probe/…`, and vets a null of the first steps. Rollouts of
        `rollcorr.engines.measure_null`, sampled right after a weight sync, are merged into the null on the first rank.

        For a loss, the metrics of `rollcorr.loss_metrics` are added as `actor/…`, and those of the first loss of the
        step as `actor/first/…`: add it before the first update. In bypass mode the loss also measures
        the mismatch, and its correction is counted with it.

        Losses cover the rank's own tokens and add up over both groups. A correction that was computed with a group or
        a context group has the statistics of all its ranks, and is counted once, on the first of them.

        Raises:
            ValueError: its rows differ from the rows of this step.
        """
        if isinstance(measured, Statistics):
            self._totals.add_statistics("loss", measured)
        elif isinstance(measured, WeightProbe):
            self._probed.update({f"probe/{name}": value for name, value in asdict(measured).items()})
            self._queue_analyses(WriteTask(ANALYSIS, self.steps, partial(self._null.add_probe, measured)))
        elif isinstance(measured, RolloutBatch):
            self._queue_analyses(WriteTask(ANALYSIS, self.steps, partial(self._null.add_measurement, measured)))
        elif isinstance(measured, Correction):
            if measured.statistics is not None:
                counts = self._counts_here(measured)
                self._totals.add_statistics("correction" if counts else "counted elsewhere", measured.statistics)
                self._judged_config = measured.config
        else:
            measured_here = measured.correction
            config = None if measured_here is None else measured_here.config
            bypass = config is not None and config.bypass_mode

            # No update came before the first loss of a step: there π_θ is the policy that scored `old_log_prob`. In
            # bypass mode the sampler scored it.
            if not (bypass or self._totals.has_loss):
                self._totals.add_statistics("first loss", measured.statistics)
            self._totals.add_statistics("loss", measured.statistics)

            # A decoupled loss only applies a correction, which `correct` has counted.
            if measured_here is not None and bypass:
                self.add(measured_here)

    def step(self, *, reward: object | None = None, **own: object) -> dict[str, float]:
        """End a training step: merge, write, judge. With a group this is a collective, so every rank must call it.

        Args:
            reward: a metric as in `own`. If it has one value per sequence, it is also written to the rollout log.
            own: further metrics. A number or 0-d tensor is averaged over the ranks that pass it. A tensor or list has
                a mean, a standard deviation and extremes over its values on all ranks: `name/mean`, `/std`, `/min`,
                `/max`. In a context group each rank passes the values of its own tokens; equal values on all ranks of
                each context group, such as one reward per sequence, are counted once.

        Returns:
            The metrics of the step, the same on every rank. They may contain NaN and infinity.

        Raises:
            TypeError, ValueError: a metric is not a number, or its name is reserved or repeated, or the number of
                rewards differs from the number of sequences in the rollout log. The step has not ended: call it again.
            RuntimeError: a different rank is still in `correct`, or an exchange failed.
            TimeoutError: only with `strict`: files or sinks hang. The step has ended.
        """
        self._totals.forget_values()
        measured = {**self._count_unwritten_data(), **self._null.numbers, **self._probed}
        for name, value in {**measured, "reward": reward, **own}.items():
            if value is not None:
                self._totals.add_value(name, value)
        rewards = None if self._rollouts is None else self._rollouts.checked_rewards(reward)
        layout, vector = self._totals.pack()
        metrics = merged_metrics(self._exchange.read(layout, vector), self._exchange.context_ranks)

        # The step ends here, even if writing or judging fails.
        step, rollouts, at_hand = self.steps + 1, self._rollouts, self._at_hand
        self.steps = step
        self._begin_step()
        tasks = tuple(self._write_tasks(step, dict(metrics), rollouts, rewards))
        try:
            self._judge_step(step, metrics)
        finally:
            # Queue the writes last, because the woken threads compete with the judge for the GIL.
            if self._files is not None and self._files.put(*tasks) and self._trackers is not None and self._sinks:
                self._trackers.put(WriteTask(SINKS, step, partial(self._sinks.write, step, dict(metrics))))
        if self._analyzes:
            self._queue_analyses(*self._analysis_tasks(step, metrics, at_hand))
        if self._strict:
            self._flush_or_raise(step)
        return metrics

    def raise_alarm(self, finding: Finding) -> None:
        """Raise an alarm for a finding of the caller. It lasts until ten steps with a correction pass without it.

        Args:
            finding: a problem of the current step. Every rank must raise the same one, so that their verdicts agree.
        """
        if self._judge.raise_alarm(finding):
            self._sound_alarm(self.steps + 1, finding)

    def flush(self) -> bool:
        """Wait until all steps are written to the files and trackers; retry failed writes once.

        The timeout is half a minute for the files, and the same for the sinks.

        Returns:
            Whether all steps are written.
        """
        return all(writer.flush() for writer in self._writers())

    def use_config(self, config: RolloutCorrectionConfig, *, sampling: SamplingSpec | None = None) -> None:
        """Set the configuration of a trainer that uses this Monitor, also in the run's directory.

        Args:
            config: the configuration.
            sampling: the sampler's settings; defaults to those that are known.
        """
        self.config = self._judged_config = config
        self.sampling = sampling or self.sampling
        self._judge.sampling = self.sampling is not None
        self._write_config()

    @property
    def ranks(self) -> int:
        """Return the number of data-parallel ranks."""
        return 1 if self._group is None else self._group.size()

    @property
    def alarms(self) -> tuple[Finding, ...]:
        """Return the active alarms, the oldest first; an alarm passes after ten steps without it."""
        return self._judge.alarms

    @property
    def verdict(self) -> Verdict:
        """Return the verdict on the run so far: "healthy", "unhealthy" or "not judged", as in `rollcorr report`."""
        return self._judge.verdict

    @property
    def not_judged(self) -> tuple[str, ...]:
        """Return a sentence for each check without a verdict so far, with the reason."""
        return self._judge.not_judged

    def causes(self) -> tuple[Finding, ...]:
        """Return `rollcorr.diagnostics.causes` of the run directory. It reads files: call it outside the steps."""
        from rollcorr.diagnostics import causes

        return causes(self.directory.path)

    def close(self) -> None:
        """Close files and sinks, which may take half a minute each. An unfinished step is not logged.

        Never raises. A sink or a file that hangs stays open in its thread. Later steps are not written, and log an
        error. Has no effect in a forked child, because the parent owns the files and the lock.
        """
        for writer in self._writers():
            writer.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _counts_here(self, correction: Correction) -> bool:
        """Return whether the correction counts from this rank: every rank of its groups has the same statistics."""
        # A pickled correction has no groups; they default to the Monitor's groups.
        shared_over = (
            own if own is not None else given
            for own, given, ranks in zip(
                (members(correction.group), correction.context_group),
                (self._group, self._context_group),
                correction.ranks,
                strict=True,
            )
            if ranks > 1
        )
        return all(self._exchange.counts_for(group) for group in shared_over)

    def _begin_step(self) -> None:
        self._totals = StepTotals()
        self._at_hand = BatchAtHand()
        self._probed: dict[str, float] = {}
        self._rollouts: CollectedRollouts | None = None
        if self._sample is not None:
            first_of_context = self._context_group is None or self._context_group.rank() == 0
            self._rollouts = CollectedRollouts(self._sample, self._exchange.rank, writes=first_of_context)

    def _agree_on_start(
        self, problem: Exception | None, earlier: list[dict[str, Any]]
    ) -> tuple[Exception | None, list[dict[str, Any]]]:
        """Exchange the first problem of any rank, and the steps that the writing rank has read."""
        # Send the text of a package's error, because the error itself may not be picklable.
        if problem is not None and type(problem).__module__ != "builtins":
            problem = RuntimeError(f"{type(problem).__name__}: {problem}")
        told = self._exchange.of_all_ranks((problem, earlier))
        first_problem = next((other for other, _ in told if other is not None), None)
        return first_problem, next((steps for _, steps in told if steps), [])

    def _prepare_directory(
        self, start: int | None, sinks: str | Sequence[str | Sink], held: ExitStack
    ) -> list[dict[str, Any]]:
        """Create the directory, or resume its run after `start` steps. The lock and the file are added to `held`.

        Returns:
            The metrics of the previous steps: all metrics of the last steps, and only the watched metrics of earlier
            ones, by which changes since the start are detected.
        """
        if start is not None and start < 0:
            raise ValueError(f"start is the number of steps that are done already, at least 0; got {start}")
        held.enter_context(run_lock(self.directory.path))

        # Keep all metrics of the last steps, and only the metrics that the judge reads of earlier ones.
        read = (*WATCHED, AGE, *COUNTS, NULL_K3, NULL_STD, NULL_IS_VETTED, NULL_IS_LARGE)
        watched = ["step", *(prefix + name for name in read for prefix in ("", PREFIX))]
        earlier: list[dict[str, Any]] = []
        later: list[int] = []
        for line in metrics_lines(self.directory.metrics) if self.directory.metrics.exists() else ():
            if "step" not in line.metrics:
                continue
            if start is not None and line.metrics["step"] > start:
                later.append(line.metrics["step"])
                continue
            earlier.append(line.metrics)
            if len(earlier) > RECENT_STEPS:
                whole = earlier[-RECENT_STEPS - 1]
                earlier[-RECENT_STEPS - 1] = {name: whole[name] for name in watched if name in whole}
        if earlier and start is None:
            raise FileExistsError(
                f"{self.directory.path} has {len(earlier)} steps already: say how many of them count, start=N with the "
                "step of the checkpoint, or choose another directory"
            )

        self.directory.path.mkdir(parents=True, exist_ok=True)
        if start is not None:
            if later:
                logger.warning(
                    "%s: the steps %d to %d were logged after step %d, where this run goes on; they are dropped",
                    self.directory.path,
                    min(later),
                    max(later),
                    start,
                )
            drop_later_steps(self.directory, start)
        self._file = JsonLines(self.directory.metrics)
        held.callback(self._file.close)
        if sinks:
            self._sinks = Sinks(sinks, self.directory, self.steps, report=self._report_sink)
            self._trackers = RunWriter(self._errors.append, self._sinks.close)
        return earlier

    def _write_tasks(
        self, step: int, metrics: Mapping[str, float], rollouts: CollectedRollouts | None, rewards: Tensor | None
    ) -> Iterator[WriteTask]:
        """Return the writes of a step, in the order that a reader relies on. Rows are copied to the host here."""
        if rollouts is not None:
            task = None
            try:
                task = rollouts.task(self.directory.rollout_log(step, self._exchange.rank), step, rewards)
            except Exception as error:  # no memory on the host, for example: the line of the step is still written
                self._log_or_raise(error, "step %d: its rollouts are lost", step)
            if task is not None:
                yield task
        if self._file is not None:
            yield WriteTask(LINE, step, partial(self._file.write, step, metrics))

    def _writers(self) -> tuple[RunWriter, ...]:
        return tuple(writer for writer in (self._files, self._trackers) if writer is not None)

    def _flush_or_raise(self, step: int) -> None:
        """Wait for files and sinks, and raise their last error.

        Raises:
            TimeoutError: one of them hangs.
        """
        self.flush()
        if self._errors:
            error = self._errors.pop()
            raise error if isinstance(error, Exception) else RuntimeError(f"step {step}: a sink raised {error!r}")
        hanging = [writer.waiting() for writer in self._writers() if writer.waiting()]
        if hanging:
            raise TimeoutError(f"step {step}: not written within {CLOSING_SECONDS:g} s: {', '.join(hanging)}")

    def _write_config(self) -> None:
        if self._writes and self._files is not None and self.config is not None:
            # Reports and `watch` read from here that the settings are known.
            content: dict[str, object] = {"rollout_correction": self.config.to_dict()}
            if self.sampling is not None:
                content["sampling"] = asdict(self.sampling)
            text = dump_yaml(content)
            self._files.put(WriteTask(CONFIG, self.steps, partial(write_text_durably, self.directory.config, text)))

    def _report_sink(self, line: str, error: BaseException) -> None:
        logger.error("%s", line)
        self._errors.append(error)

    def _count_unwritten_data(self) -> dict[str, float | None]:
        """Return this rank's counts of unwritten data. As metrics of the step they are then equal on every rank."""
        counts: dict[str, int] = {}
        if self._files is not None:
            counts |= {UNWRITTEN: self._files.unwritten(LINE), LOST_ROLLOUTS: self._files.lost[ROWS]}
        if self._trackers is not None:
            counts[LOST_FOR_SINKS] = self._trackers.lost[SINKS]
        return {name: float(count) for name, count in counts.items() if count}

    def _judge_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Judge the step. Every rank has the same metrics, so every rank computes the same verdict."""
        try:
            # Only metrics of the correction have names that `bare_metrics` would shorten, and they have one prefix.
            bare = {name.removeprefix(PREFIX): value for name, value in metrics.items() if not math.isnan(value)}
            changes = self._judge.judge(step, bare, self._judged_config)
        except Exception as error:
            self._log_or_raise(error, "step %d could not be judged", step)
            return
        if self._writes:
            for finding in changes.passed:
                logger.info("step %d: has passed: %s", step, finding.title)
        self._unexplained = list(changes.began)
        for finding in changes.began:
            self._sound_alarm(step, finding)

    def _analysis_tasks(self, step: int, metrics: Mapping[str, float], at_hand: BatchAtHand) -> Iterator[WriteTask]:
        """Return the analyses of a step, for the writer thread: of the alarms that began, and for a null."""
        alarms, self._unexplained = self._unexplained, []
        for_null = self._null.wants(metrics)
        if not (for_null or alarms):
            return
        try:
            rows, size = at_hand.on_host(step)
        except Exception as error:  # columns that fit no log, for example: the step itself is right
            self._log_or_raise(error, "step %d: its rows cannot be analyzed", step)
            return
        if for_null:
            yield WriteTask(ANALYSIS, step, partial(self._null.add_step, step, rows), size)
        if rows and alarms:
            yield WriteTask(ANALYSIS, step, partial(self._find_cause, step, alarms, rows), size)

    def _find_cause(self, step: int, alarms: Sequence[Finding], rows: Sequence[HostRows]) -> None:
        """Attach the first cause to the alarms that began in a step. The writer thread calls this."""
        cause = first_cause(rows, self._null.null)
        if cause is not None:
            self._judge.explain(alarms, cause)
            logger.warning("%s", alarm_text(step, cause))

    def _queue_analyses(self, *tasks: WriteTask) -> None:
        """Queue analyses for the writer thread, on the rank that has one."""
        if tasks and self._analyzes and self._files is not None:
            self._files.put(*tasks)

    def _sound_alarm(self, step: int, finding: Finding) -> None:
        """Log an alarm that begins, and pass it to `on_alarm`."""
        if self._writes:
            logger.warning("%s", alarm_text(step, finding))
        for callback in self._on_alarm:
            try:
                callback(finding)
            except Exception as error:
                self._log_or_raise(error, "step %d: on_alarm failed", step)

    def _log_or_raise(self, error: Exception, line: str, step: int) -> None:
        if self._strict:
            raise error
        logger.error(line, step, exc_info=error)
