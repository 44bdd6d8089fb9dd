"""Rollout correction for reinforcement learning, for any trainer.

    >>> from rollcorr import correct
    >>> correction = correct(train_log_prob, rollout_log_prob, response_mask, "decoupled_token_is")  # doctest: +SKIP

Names are imported on first use, so that `import rollcorr` and the command line start without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollcorr.config import LossConfig as LossConfig
    from rollcorr.config import RolloutCorrectionConfig as RolloutCorrectionConfig
    from rollcorr.core.statistics import Statistics as Statistics
    from rollcorr.core.statistics import merge_statistics as merge_statistics
    from rollcorr.correction import Correction as Correction
    from rollcorr.correction import Detail as Detail
    from rollcorr.correction import correct as correct
    from rollcorr.policy_loss import PolicyLogProbs as PolicyLogProbs
    from rollcorr.sampling import SamplingSpec as SamplingSpec
    from rollcorr.sampling import check_compatible as check_compatible

__version__ = "0.1.0"

_HOME = {
    "Correction": "rollcorr.correction",
    "Detail": "rollcorr.correction",
    "LossConfig": "rollcorr.config",
    "PolicyLogProbs": "rollcorr.policy_loss",
    "RolloutCorrectionConfig": "rollcorr.config",
    "SamplingSpec": "rollcorr.sampling",
    "Statistics": "rollcorr.core.statistics",
    "check_compatible": "rollcorr.sampling",
    "correct": "rollcorr.correction",
    "merge_statistics": "rollcorr.core.statistics",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> object:
    """Import a public name from its home on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'rollcorr' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
