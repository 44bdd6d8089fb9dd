"""Calls of the items in `tests/test_guides.py`: options, metrics, weights and masks of two short sequences."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from rollcorr import RolloutCorrectionConfig as Config
from rollcorr import correct
from rollcorr.config import InertOptionWarning, load_yaml
from rollcorr.config.conversion import resolve
from rollcorr.integrations.verl.v2025_10 import compute_rollout_importance_weights
from rollcorr.train import load_config


class Item(NamedTuple):
    """One item: its place, its name, the call, the expected result, and why it is partial or cannot run."""

    place: str
    name: str
    call: Callable[[], Any] | None = None
    expected: Any = True
    reason: str = ""


# Two sequences of two tokens, with ratios 2 and 0.5, 4 and 1. log μ is -3 everywhere.
ROLLOUT = torch.full((2, 2), -3.0)
TRAIN = ROLLOUT + torch.tensor([[2.0, 0.5], [4.0, 1.0]]).log()
MASK = torch.ones(2, 2)


def train(*overrides: str) -> Config | None:
    """The correction of `rollcorr train` with these overrides."""
    return load_config(None, list(overrides)).algorithm.correction


def refused(*overrides: str) -> bool:
    """Whether `rollcorr train` refuses these overrides because the two log-probs differ."""
    try:
        load_config(None, list(overrides))
    except ValueError as error:
        return "not comparable" in str(error)
    return False


def raises(call: Callable[[], Any], message: str) -> bool:
    """Whether a call raises ValueError with this message."""
    with pytest.raises(ValueError, match=message):
        call()
    return True


def quiet(call: Callable[[], Any]) -> Any:
    """The result of a call that warns of an option without effect, as the guide itself says that it has none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InertOptionWarning)
        return call()


def measured(name: str, **options: Any) -> float:
    """A metric of the two sequences."""
    return correct(TRAIN, ROLLOUT, MASK, Config(**options)).metrics(prefix="")[name]


def october(name: str, level: str = "token", mode: str = "truncate", data: Any = (TRAIN, ROLLOUT, MASK)) -> float:
    """A metric of October 2025; names begin with mismatch/."""
    return compute_rollout_importance_weights(*data, level, mode, 2.0, 0.5, 1e-4)[2][f"mismatch/{name}"]


def kept(criterion: str, threshold: Any) -> list[list[float]]:
    """The mask after one rejection criterion."""
    options = {"rollout_rs": criterion, "rollout_rs_threshold": threshold}
    return correct(TRAIN, ROLLOUT, MASK, Config(**options)).loss_mask.double().tolist()


def block(text: str) -> Config | None:
    """The correction of a YAML block under `algorithm`."""
    return resolve({"algorithm": load_yaml(text)})


def weights(**options: Any) -> list[list[float]]:
    """The weights of the two sequences."""
    return correct(TRAIN, ROLLOUT, MASK, Config(**options)).weights.tolist()


def padded_weight() -> float:
    """The weight of a padded token."""
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    return correct(TRAIN, ROLLOUT, mask, Config(rollout_is="token")).weights[1, 1].item()


def longest(kl: float) -> float:
    """The longest response before the clamp, where each log-ratio is -kl."""
    rollout = ROLLOUT.double()
    return correct(rollout - kl, rollout, MASK, Config()).metrics(prefix="")["max_viable_length"]


def outlier(config: Config) -> list[list[float]]:
    """The mask where one token's ratio is e^-25, beyond the safety bound."""
    there = ROLLOUT + torch.tensor([[-25.0, 0.0], [0.0, 0.0]])
    return correct(there, ROLLOUT, MASK, config).loss_mask.double().tolist()


def share_is_small() -> bool:
    """Whether the committed measurement of `benchmarks/step_share.py` stays within the guide's shares."""
    path = Path(__file__).parents[1] / "benchmarks" / "results" / "step_share_cpu.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    return result["time_share"] <= 0.03 and result["memory_share"] <= 0.01


def combined(level: Any, criterion: str) -> tuple[Any, ...]:
    """Level and criterion of a configuration by hand."""
    config = Config(rollout_is=level, rollout_rs=criterion, rollout_rs_threshold="0.5_2.0")
    return config.rollout_is, config.criteria[0].name


R, A = "algorithm.rollout_correction.", "algorithm."
TOKEN = Config(rollout_is="token")
FLAT = (
    f"{A}rollout_is_threshold=2.0",
    f"{A}rollout_is=true",
    f"{A}rollout_is_level=token",
    f"{A}rollout_is_mode=truncate",
)
LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs=true"
PROCESSED = "+actor_rollout_ref.rollout.engine_kwargs.vllm.logprobs_mode=processed_logprobs"
LONG = torch.full((2, 4), -1.0), torch.full((2, 4), -10.0), torch.ones(2, 4)
UNEQUAL = TRAIN, ROLLOUT, torch.tensor([[1.0, 1.0], [1.0, 0.0]])
