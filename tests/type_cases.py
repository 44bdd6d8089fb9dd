"""Calls that type checkers accept, and some that they reject (tools/docs_types.py, in `make check`)."""

import torch
from typing_extensions import assert_type

from rollcorr import Monitor, PolicyLogProbs, RolloutCorrectionConfig, TrainingStep, correct, policy_loss
from rollcorr.config import CorrectionOptions, PresetName

x = torch.zeros(1, 2)

assert_type(RolloutCorrectionConfig.decoupled_token_is(threshold=3.0), RolloutCorrectionConfig)
RolloutCorrectionConfig.decoupled_token_is("0.5_2.0")
RolloutCorrectionConfig.seq_mis(4.0, lower=0)
RolloutCorrectionConfig.disabled()
RolloutCorrectionConfig.decoupled_token_is(treshold=3.0)  # rejected
RolloutCorrectionConfig.decoupled_token_is(threshold=[3.0])  # rejected
RolloutCorrectionConfig.decoupled_token_iss()  # rejected
RolloutCorrectionConfig.disabled(2.0)  # rejected

correct(x, x, x, rollout_is="token", rollout_is_threshold=3.0)
correct(x, x, x, "seq_tis", impl="torch", detail=True)
correct(x, x, x, {"rollout_is": "token"})
correct(x, x, x, rollout_iss="token")  # rejected
correct(x, x, x, rollout_is="tokens")  # rejected
correct(x, x, x, rollout_is_threshold=[3.0])  # rejected
correct(x, x, x, "seq_tiss")  # rejected
correct(x, x, x, impl="cuda")  # rejected

RolloutCorrectionConfig().with_options(normalizer="kept", impl="torch")
RolloutCorrectionConfig().with_options(normaliser="kept")  # rejected

policies = PolicyLogProbs(log_prob=x, old_log_prob=x)
policy_loss(policies, x, x, config="bypass_pg_is")
policy_loss(policies, x, x, config="bypass_pg_iss")  # rejected

model = torch.nn.Linear(1, 1)
TrainingStep(model, "bypass_pg_is")
TrainingStep(model, {"bypass_mode": True})
TrainingStep(model, "bypass_pg_iss")  # rejected

monitor = Monitor("runs/a", "tis", rollout_is_threshold=3.0, impl="torch")
monitor.correct(x, x, x, detail=True, rollout_is_threshold=3.0)
Monitor("runs/a", rollout_iss="token")  # rejected
monitor.correct(x, x, x, rollout_iss="token")  # rejected

options: CorrectionOptions = {"rollout_is": "sequence"}
correct(x, x, x, **options)
preset: PresetName = "icepop"
correct(x, x, x, preset)
other: PresetName = "icepops"  # rejected
name = str(preset)
correct(x, x, x, RolloutCorrectionConfig.preset(name))
