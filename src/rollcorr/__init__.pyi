# The front door: every name that is stable at the top level, by group. docs/reference/stable.md lists the rooms behind
# it.

__version__: str
__all__: list[str]

# What to do.
from .config import LossConfig as LossConfig
from .config import RolloutCorrectionConfig as RolloutCorrectionConfig
from .config import SamplingSpec as SamplingSpec
from .config import check_compatible as check_compatible

# Log-probs of sampled tokens, without the logits.
from .core import KeptSets as KeptSets
from .core import Statistics as Statistics

# Advantages.
from .core import dr_grpo_advantages as dr_grpo_advantages
from .core import gae_advantages as gae_advantages
from .core import grpo_advantages as grpo_advantages
from .core import merge_statistics as merge_statistics
from .core import rloo_advantages as rloo_advantages

# Weights, loss mask and statistics of a batch; losses, and the optimizer step that divides them.
from .correction import Correction as Correction
from .correction import Detail as Detail
from .correction import PolicyLogProbs as PolicyLogProbs
from .correction import TrainingStep as TrainingStep
from .correction import correct as correct
from .correction import loss_metrics as loss_metrics
from .correction import policy_loss as policy_loss

# Diagnosis.
from .diagnostics import check_logs as check_logs
from .diagnostics import estimate_provenance as estimate_provenance
from .diagnostics.health import health as health
from .kernels import linear_log_prob as linear_log_prob

# Compile ahead of time.
from .kernels import warm as warm

# Metrics, alarms and logs over a run, in any training loop.
from .monitor import Monitor as Monitor
from .monitor import RolloutSample as RolloutSample

# Rollout logs and run directories.
from .rollout_log import RolloutBatch as RolloutBatch
from .rollout_log import RolloutLogWriter as RolloutLogWriter
from .rollout_log import read_rollout_log as read_rollout_log
from .run_directory import read_run as read_run
