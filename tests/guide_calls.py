"""Calls of the items in `tests/test_guides.py`: options, metrics, weights and masks of two short sequences."""

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from rollcorr import LossConfig, PolicyLogProbs, correct, policy_loss
from rollcorr import RolloutCorrectionConfig as Config
from rollcorr.config import InertOptionWarning, load_yaml
from rollcorr.config.conversion import resolve
from rollcorr.diffusion import (
    DiffusionActorConfig,
    apply_bypass_mode_to_diffusion_batch,
    apply_rollout_correction_to_diffusion_batch,
    diffusion_loss,
    loss_step_metrics,
)
from rollcorr.integrations.verl.v2025_10 import compute_rollout_importance_weights
from rollcorr.train import load_config
from rollcorr.train.grpo import hard_gated_reward
from rollcorr.train.grpo.policy import make_byte_tokenizer


class Item(NamedTuple):
    """One item.

    Attributes:
        place: document:line, of 004 (which is one line) document:section.
        name: the subject.
        call: runs it; None if a lane or nothing here can.
        expected: the result.
        reason: why the item is partial, or cannot run here; empty for a full item.
        lane: the command that runs it instead of `make test`.
    """

    place: str
    name: str
    call: Callable[[], Any] | None = None
    expected: Any = True
    reason: str = ""
    lane: str = ""


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
VETOED = torch.full((2, 4), -12.0), torch.full((2, 4), -1.0), torch.ones(2, 4)
CURRENT = TRAIN + torch.tensor([[1.1, 1.5], [0.7, 1.0]]).log()


def loss_output(
    config: Config | None, rollout: torch.Tensor = ROLLOUT, old: torch.Tensor = TRAIN, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss at π_θ / π_old of 1.1, 1.5, 0.7 and 1 with advantage 1, and π_θ's log-probs."""
    current = CURRENT.clone().requires_grad_()
    bypass = config is not None and config.bypass_mode
    correction = None if config is None or bypass else correct(old, rollout, MASK, config)
    given = PolicyLogProbs(
        log_prob=current,
        old_log_prob=None if bypass else old,
        rollout_log_prob=None if config is None else rollout,
    )
    output = policy_loss(
        given, torch.ones(2), MASK, config=config, correction=correction, whole_step=True, loss=LossConfig(**options)
    )
    return output.loss, current


def loss(config: Config | None, **options: Any) -> float:
    """The loss of `loss_output`."""
    return loss_output(config, **options)[0].item()


def gradient(config: Config) -> list[list[float]]:
    """The gradient of `loss_output` with respect to log π_θ."""
    value, current = loss_output(config)
    return torch.autograd.grad(value, current)[0].tolist()


def unbiased(what: str) -> float:
    """E_μ[w f] − E_π[f] over all sequences of two binary tokens; for "k3", E_μ[k3] − KL(μ‖π) of a token."""
    mu, pi = torch.tensor([0.3, 0.7]).double(), torch.tensor([0.6, 0.4]).double()
    if what == "k3":
        metrics = [
            correct(pi[a].log().view(1, 1), mu[a].log().view(1, 1), torch.ones(1, 1)).metrics(prefix="") for a in (0, 1)
        ]
        return float(sum(mu[a] * metrics[a]["k3_kl"] for a in (0, 1)) - (mu * (mu / pi).log()).sum())
    tokens = torch.cartesian_prod(torch.arange(2), torch.arange(2))
    values = torch.tensor([1.0, -2.0, 0.5, 3.0]).double()
    weight = correct(
        pi[tokens].log(), mu[tokens].log(), torch.ones(4, 2), Config(rollout_is=what, rollout_is_threshold=None)
    ).weights[:, 0]
    return float((mu[tokens].prod(1) * weight * values).sum() - (pi[tokens].prod(1) * values).sum())


def october_arrays(
    level: str = "token", mode: str = "truncate", data: Any = (TRAIN, ROLLOUT, MASK)
) -> tuple[Any, Any, Any]:
    """Weights, mask and metrics of October 2025."""
    batch, mask, metrics = compute_rollout_importance_weights(*data, level, mode, 2.0, 0.5, 1e-4)
    return batch.batch["rollout_is_weights"].tolist(), mask.tolist(), metrics


def shifted(log_ratio: float, tokens: int, config: Config) -> Any:
    """The correction of a sequence whose tokens all have this log-ratio."""
    rollout = torch.full((1, tokens), -40.0, dtype=torch.float64)
    return correct(rollout + log_ratio, rollout, torch.ones(1, tokens), config)


def weight_of(log_ratio: float, level: str, tokens: int = 2) -> float:
    """The weight of a sequence whose tokens all have this log-ratio, without a ceiling."""
    return shifted(log_ratio, tokens, Config(rollout_is=level, rollout_is_threshold=None)).weights[0, 0].item()


def sequence_kept(threshold: Any, ratio: float = 1.01) -> bool:
    """Whether 100 tokens of this ratio pass a threshold on their geometric mean."""
    return bool(
        shifted(math.log(ratio), 100, Config(rollout_rs="seq_mean_k1", rollout_rs_threshold=threshold)).loss_mask.any()
    )


def reward(text: str) -> float:
    """The reward of a response where the answer is 5 and 10 tokens earn the full bonus."""
    tokenizer = make_byte_tokenizer()
    return hard_gated_reward(tokenizer.encode(text, add_special_tokens=False), "5", tokenizer, bonus_length=10).value


def parts(config: Config | None) -> tuple[Any, ...]:
    """Level, criteria, mode and loss."""
    return config.rollout_is, config.rollout_rs, config.bypass_mode, config.loss_type


def sides(config: Config) -> tuple[bool, bool]:
    """Whether weights reach the loss, and whether anything is rejected."""
    return config.weights_reach_loss, config.rollout_rs is not None


def bypass_metric(name: str) -> float:
    """A metric of π_θ / μ in bypass mode."""
    policies = PolicyLogProbs(log_prob=CURRENT.clone().requires_grad_(), rollout_log_prob=ROLLOUT)
    output = policy_loss(policies, torch.ones(2), MASK, config=Config(bypass_mode=True), whole_step=True)
    return output.correction.metrics(prefix="")[name]


PICTURES = {
    "disabled": {},
    "weighted": {"rollout_is": "sequence"},
    "decoupled": {"rollout_is": "sequence", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_1.9"},
    "bypass": {
        "bypass_mode": True,
        "rollout_is": "sequence",
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": "0.6_3",
    },
    "bypass by token": {"bypass_mode": True, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_3"},
    "bypass without weights": {"bypass_mode": True, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.6_3"},
}


def pictures(mode: str, *, loss_mode: str = "flow_grpo", denominator: Any = None) -> dict[str, Any]:
    """Two pictures of two steps with the log-probs of the two sequences: weights, loss, gradient, metrics."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InertOptionWarning)
        config = DiffusionActorConfig(
            rollout_correction=PICTURES[mode], loss_mode=loss_mode, clip_ratio=0.5, rs_denominator=denominator
        )
        batch: dict[str, Any] = {"rollout_log_probs": ROLLOUT, "advantages": torch.ones(2), "old_log_probs": TRAIN}
        batch |= {"std": torch.full((2, 2), 0.5), "dt": torch.full((2, 2), -0.1)}
        batch |= {
            "latents": torch.zeros(2, 3, 4),
            "prev_sample_mean": torch.zeros(2, 2, 4),
            "timesteps": torch.tensor([[9.0, 8.0]] * 2),
        }
        metrics = {}
        if config.bypass_mode:
            del batch["old_log_probs"]
            apply_bypass_mode_to_diffusion_batch(batch)
        else:
            batch["old_prev_sample_mean"] = torch.zeros(2, 2, 4)
            batch, metrics = apply_rollout_correction_to_diffusion_batch(batch, config)
        current = TRAIN.clone().requires_grad_()
        output = diffusion_loss(
            config, {"log_probs": current, "prev_sample_mean": torch.zeros(2, 2, 4)}, batch, whole_step=True
        )
        output.loss.backward()
        metrics = metrics or loss_step_metrics([output], config)
    return {
        "batch": batch,
        "weights": batch.get("rollout_is_weights"),
        "loss": output.loss.item(),
        "gradient": float(current.grad.norm()),
        "prefix": {name.rpartition("rollout_corr/")[0] for name in metrics if "rollout_corr/" in name},
    }
