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
    from rollcorr.correction.rollout_correction import Correction as Correction
    from rollcorr.correction.rollout_correction import Detail as Detail
    from rollcorr.correction.rollout_correction import correct as correct
    from rollcorr.correction.losses import PolicyLogProbs as PolicyLogProbs
    from rollcorr.config.sampling_spec import SamplingSpec as SamplingSpec
    from rollcorr.config.sampling_spec import check_compatible as check_compatible

__version__ = "0.1.0"

_HOME = {
    "Correction": "rollcorr.correction.rollout_correction",
    "Detail": "rollcorr.correction.rollout_correction",
    "LossConfig": "rollcorr.config",
    "PolicyLogProbs": "rollcorr.correction.losses",
    "RolloutCorrectionConfig": "rollcorr.config",
    "SamplingSpec": "rollcorr.config.sampling_spec",
    "Statistics": "rollcorr.core.statistics",
    "check_compatible": "rollcorr.config.sampling_spec",
    "correct": "rollcorr.correction.rollout_correction",
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
