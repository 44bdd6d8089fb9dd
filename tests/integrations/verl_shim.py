"""A pytest plugin for verl's own tests: before they are collected, verl's rollout-correction functions become ours.

ROLLCORR_VERL_GENERATION names the generation. For "newest", `install` does it, as in a run of verl; for 2025-11 and
2025-10, whose functions the installed verl no longer has, the modules of that generation take its helper's place. verl
itself (its DataProto, its ActorConfig) is the installed one.
"""

import inspect
import os
import sys
import warnings

import pytest

from rollcorr.integrations import verl
from rollcorr.integrations.verl import v2025_10 as verl_2025_10
from rollcorr.integrations.verl import v2025_11 as verl_2025_11

OLDER = {
    "2025-11": ("verl.trainer.ppo.rollout_corr_helper", verl_2025_11),
    "2025-10": ("verl.trainer.ppo.mismatch_helper", verl_2025_10),
}

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from verl.trainer.config import algorithm
    from verl.trainer.ppo import core_algos

if os.environ["ROLLCORR_VERL_GENERATION"] == "newest":
    module = verl
    verl.install()
else:
    name, module = OLDER[os.environ["ROLLCORR_VERL_GENERATION"]]
    sys.modules[name] = module
    for function in ("agg_loss", "compute_policy_loss", "compute_policy_loss_vanilla"):
        setattr(core_algos, function, getattr(module, function, getattr(verl, function)))
    if hasattr(module, "RolloutCorrectionConfig"):
        algorithm.RolloutCorrectionConfig = module.RolloutCorrectionConfig


def pytest_collection_finish(session):
    """Refuse to run if a test module still references one of verl's own functions."""
    for test_module in {item.module for item in session.items}:
        for attribute in set(module.__all__) & set(vars(test_module)):
            function = getattr(test_module, attribute)
            if inspect.isfunction(function) and not function.__module__.startswith("rollcorr."):
                raise pytest.UsageError(f"{test_module.__name__}.{attribute} comes from {function.__module__}")
