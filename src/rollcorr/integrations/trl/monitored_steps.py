"""A `rollcorr.Monitor` in TRL's training loop: each optimizer step of the trainer is one step of the Monitor.

The adapter corrects by the Monitor, which counts and logs the batch; a callback of the trainer ends the step. Batches
of an evaluation are corrected without the Monitor.

    loss              the step's loss, as TRL logs it: the sum over the micro-batches of the step
    reward/…          of the completions that were corrected in the step: the weighted sum of TRL's reward functions
    trl/NAME          TRL's own metrics, each the mean of the values since the last step
"""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollcorr.diagnostics.health.health_check import health

if TYPE_CHECKING:
    from rollcorr.config import RolloutCorrectionConfig
    from rollcorr.correction import Correction
    from rollcorr.monitor import Monitor

Trainer = Any  # one of TRL's trainers: they are not imported here


def console_metrics(
    metrics: dict[str, float], config: RolloutCorrectionConfig, steps: MonitoredSteps | None
) -> dict[str, Any]:
    """Return the five keys of a printed line: mismatch, kept tokens, effective sample size, verdict, alarms.

    Args:
        metrics: of all batches of the line, merged, so that k3 is a mean over tokens; without a prefix.
        config: the configuration behind them.
        steps: optional; their Monitor returns verdict and number of alarms. By default only these metrics are judged.
    """
    if steps is None:
        report = health(metrics, config)
        verdict, alarms = report.verdict, len(report.warnings)
    else:
        verdict, alarms = steps.monitor.verdict, len(steps.monitor.alarms)
    return {
        **{name: metrics[name] for name in ("k3_kl", "rollout_is_eff_sample_size") if name in metrics},
        "kept_fraction": 1.0 - metrics.get("rollout_rs_masked_fraction", 0.0),
        "verdict": verdict,
        "alarms": alarms,
    }


class MonitoredSteps:
    """The steps of a trainer that a Monitor counts.

    Args:
        trainer: one of TRL's trainers.
        monitor: counts the steps. Its configuration is set to the trainer's.
        config: the trainer's correction.
        group: the trainer's data-parallel ranks; None for a single rank.

    Raises:
        ValueError: the Monitor was made for different ranks.
    """

    def __init__(
        self,
        trainer: Trainer,
        monitor: Monitor,
        config: RolloutCorrectionConfig,
        group: torch.distributed.ProcessGroup | None,
    ) -> None:
        ranks = 1 if group is None else group.size()
        if monitor.ranks != ranks:
            raise ValueError(
                f"the trainer has {ranks} ranks and the Monitor counts {monitor.ranks}: make it after the trainer, on "
                "every rank, with group=torch.distributed.group.WORLD where there are several"
            )
        monitor.use_config(config)
        self.monitor = monitor
        self._trainer = trainer
        self._loss: Tensor | None = None
        self._rewards: list[Tensor] = []
        self._rows, self._own_rows = 0, 0  # of the step's batches: over all ranks, and of this one

        # TRL starts a new list for a metric when it logs, so identify a list by its identity and not by its name.
        self._read: dict[str, tuple[list[float], int]] = {
            name: (values, len(values)) for name, values in trainer._metrics["train"].items()
        }

    def remember_rewards(self, of_functions: Tensor, own_rows: int) -> None:
        """Keep the rewards of this rank's completions until the step ends.

        Args:
            of_functions: of all ranks, (rows, functions); NaN where a function returned no reward.
            own_rows: number of this rank's rows.
        """
        # A subclass may compute rewards differently; its steps have no rewards then.
        weights = getattr(self._trainer, "reward_weights", None)
        if weights is None or not isinstance(of_functions, Tensor) or of_functions.shape[1:] != weights.shape:
            return

        weighted = of_functions * weights.to(of_functions.device)
        rewards = weighted.nansum(1).masked_fill(of_functions.isnan().all(1), torch.nan)
        first = self._trainer.accelerator.process_index * own_rows
        self._rewards.append(rewards[first : first + own_rows].detach())

    def correct(self, batch: dict[str, Any], old: Tensor, rollout: Tensor, mask: Tensor) -> Correction:
        """Correct a batch with the Monitor, which also logs it."""
        columns: dict[str, object] = {"response_ids": batch["completion_ids"], "advantages": batch["advantages"]}
        generations = getattr(self._trainer, "num_generations", None)
        if generations is not None:
            # The completions of one prompt are consecutive, counted over all ranks and all batches of the step.
            accelerator, step = self._trainer.accelerator, self.monitor.steps + 1
            first = self._rows + accelerator.process_index * len(mask)
            columns["group_id"] = [f"{step}-{(first + row) // generations}" for row in range(len(mask))]
            self._rows += accelerator.num_processes * len(mask)

        correction = self.monitor.correct(old, rollout, mask, columns=columns, fill=1.0, densities=True)
        self._own_rows += len(mask)
        return correction

    def add_loss(self, loss: Tensor) -> None:
        """Add the loss of a micro-batch to the step's loss."""
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()

    def check_start(self, step: int) -> None:
        """Check that the Monitor continues at the trainer's step.

        Raises:
            ValueError: it has more or fewer steps; the message names the fix.
        """
        if self.monitor.steps != step:
            raise ValueError(
                f"the trainer goes on after step {step} and the Monitor after step {self.monitor.steps}: make the "
                f"Monitor with start={step}, or with another directory"
            )

    def end_step(self) -> None:
        """Pass the data of a finished optimizer step to the Monitor, which writes and judges it."""
        own: dict[str, object] = {} if self._loss is None else {"loss": self._loss}
        own |= {f"trl/{name}": value for name, value in self._new_metrics().items()}

        # The Monitor needs one reward for each row. A subclass may drop rows, and a batch may stay uncorrected.
        fits = sum(map(len, self._rewards)) == self._own_rows > 0
        reward = torch.cat(self._rewards) if fits else None
        self._loss, self._rewards, self._rows, self._own_rows = None, [], 0, 0
        self.monitor.step(reward=reward, **own)

    def callback(self) -> Any:  # noqa: ANN401 (a `transformers.TrainerCallback`, which is not imported at the top)
        """Return the trainer callback for its start and the end of each step."""
        from transformers import TrainerCallback

        callback = TrainerCallback()
        callback.on_train_begin = lambda args, state, *_, **__: self.check_start(state.global_step)
        callback.on_step_end = lambda *_, **__: self.end_step()
        return callback

    def _new_metrics(self) -> dict[str, float]:
        """Return the mean of each TRL metric's new values, without NaN, as TRL itself logs it."""
        found = {}
        for name, values in self._trainer._metrics["train"].items():
            before, count = self._read.get(name, ([], 0))
            added = values[count:] if values is before else values
            self._read[name] = (values, len(values))
            valid = [float(value) for value in added if isinstance(value, Real) and not math.isnan(value)]
            if valid:
                found[name] = sum(valid) / len(valid)
        return found
