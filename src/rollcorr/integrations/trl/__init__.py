"""Rollout correction in TRL's `GRPOTrainer` and `RLOOTrainer`, without a fork: a mixin, or `attach(trainer)`.

Both act after TRL has sampled and scored a generation batch, and do not change its loss. They pass weights, the mask of
tokens in the loss and the kept count, and add the metrics to TRL's log. This package never imports TRL, so it works
with the installed version; it is tested with 1.16.0. docs/coming_from/trl.md describes the switch and its effects.
"""

from rollcorr.integrations.trl.corrected_trainer import RolloutCorrectionMixin, attach
from rollcorr.integrations.trl.options import config_from_trl

__all__ = ["RolloutCorrectionMixin", "attach", "config_from_trl"]
