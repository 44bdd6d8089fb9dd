"""The correction of a batch, the losses, and what they are divided by."""

from rollcorr.correction.denominators import aggregate, aggregation_mode, loss_denominators
from rollcorr.correction.losses import PolicyLogProbs, PolicyLossOutput, loss_metrics, policy_loss
from rollcorr.correction.process_groups import gather_statistics, sum_gradients
from rollcorr.correction.result import Correction
from rollcorr.correction.rollout_correction import Detail, check_mask, correct
from rollcorr.correction.scoring import actor_entropy, actor_log_prob, linear_actor_log_prob
from rollcorr.correction.training_step import StepOutcome, TrainingStep

__all__ = [
    "Correction",
    "Detail",
    "PolicyLogProbs",
    "PolicyLossOutput",
    "StepOutcome",
    "TrainingStep",
    "actor_entropy",
    "actor_log_prob",
    "aggregate",
    "aggregation_mode",
    "check_mask",
    "correct",
    "gather_statistics",
    "linear_actor_log_prob",
    "loss_denominators",
    "loss_metrics",
    "policy_loss",
    "sum_gradients",
]
