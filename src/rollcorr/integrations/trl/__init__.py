"""Rollout correction in TRL's `GRPOTrainer` and `RLOOTrainer`, without a fork: a mixin, or `attach(trainer)`.

Both act where TRL has sampled and scored a generation batch, and leave its loss as it is. They hand over weights, the
mask of tokens in the loss and the kept count, and put the metrics into TRL's log. Nothing here imports TRL, so this
works with the one that is installed; it is tested with 1.16.0. docs/coming_from/trl.md says how to switch and what
changes.
"""

from rollcorr.integrations.trl.corrected_trainer import RolloutCorrectionMixin, attach
from rollcorr.integrations.trl.options import config_from_trl

__all__ = ["RolloutCorrectionMixin", "attach", "config_from_trl"]
