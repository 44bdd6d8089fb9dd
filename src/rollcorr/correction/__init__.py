"""The correction of a batch, the losses, and their denominators."""

from rollcorr.correction.denominators import loss_denominators
from rollcorr.correction.losses import PolicyLogProbs, loss_metrics, policy_loss
from rollcorr.correction.process_groups import gather_statistics, sum_gradients
from rollcorr.correction.result import Correction
from rollcorr.correction.rollout_correction import Detail, correct
from rollcorr.correction.scoring import actor_log_prob, linear_actor_log_prob
from rollcorr.correction.training_step import TrainingStep

__all__ = [
    "Correction",
    "Detail",
    "PolicyLogProbs",
    "TrainingStep",
    "actor_log_prob",
    "correct",
    "gather_statistics",
    "linear_actor_log_prob",
    "loss_denominators",
    "loss_metrics",
    "policy_loss",
    "sum_gradients",
]
