"""The metrics of a correction in the log of TRL's trainers, and the losses of the steps that a Monitor counts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.core.metric_registry import PREFIX
from rollcorr.integrations.trl.generation_batch import Trainer, train_or_eval
from rollcorr.integrations.trl.monitored_steps import MonitoredSteps, console_metrics

if TYPE_CHECKING:
    from rollcorr.core.mergeable_statistics import Statistics
    from rollcorr.correction import Correction

logger = logging.getLogger(__name__)


class LoggedCorrection:
    """Base class of the mixins: logs the statistics that `keep_statistics` collected since the last call of `log`."""

    _correction_config: RolloutCorrectionConfig
    _correction_statistics: dict[str, Statistics]
    _monitored_steps: MonitoredSteps | None

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        """Run TRL's training step on one micro-batch, and return its loss, which a Monitor counts.

        Args:
            args: passed on to TRL's method.
            kwargs: passed on to TRL's method.
        """
        loss: Tensor = cast("Any", super()).training_step(*args, **kwargs)
        if self._monitored_steps is not None:
            self._monitored_steps.add_loss(loss)
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Log as TRL does, with the metrics of all generation batches since the last call: one transfer.

        Without a tracker (`report_to`) five keys are printed; the log history and the caller have all metrics.

        Args:
            logs: name → number; the metrics are added.
            args: passed on to TRL's method.
            kwargs: passed on to TRL's method.
        """
        trainer: Trainer = self
        mode = train_or_eval(trainer)
        statistics = self._correction_statistics.pop(mode, None)
        metrics = {} if statistics is None else statistics.metrics(prefix="")

        # A printed line has room for a few numbers, and a tracker for all.
        printed, steps = metrics, self._monitored_steps if mode == "train" else None
        if metrics and not getattr(trainer.args, "report_to", ()):
            try:
                printed = console_metrics(metrics, self._correction_config, steps)
            except Exception as error:  # a judgment must not end the training
                logger.error("the metrics of a printed line could not be judged: %r", error)
                printed = {}

        # The callers of `log` and the history read more than a line.
        prefix = PREFIX if mode == "train" else f"eval_{PREFIX}"
        logs.update({f"{prefix}{name}": value for name, value in printed.items()})
        entries = len(trainer.state.log_history)
        cast("Any", super()).log(logs, *args, **kwargs)
        for written in (logs, *trainer.state.log_history[entries:]):
            written.update({f"{prefix}{name}": value for name, value in metrics.items()})


def keep_statistics(trainer: Trainer, correction: Correction) -> None:
    """Merge the statistics of a correction into those that the next call of `log` reads."""
    # Statistics merge exactly. So the log contains the metrics of all tokens since the last call, not a mean of means.
    statistics, mode = correction.statistics, train_or_eval(trainer)
    assert statistics is not None
    earlier = trainer._correction_statistics.get(mode)
    trainer._correction_statistics[mode] = statistics if earlier is None else earlier.merge(statistics)
