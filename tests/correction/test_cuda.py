"""CUDA tensors: no step between the log-probs and the gradient waits, reads a value, or copies from the host.

There is no GPU here: the tensors are fake (`tests/fake_cuda.py`), and the tests count the calls to torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from counting import Counts
from fake_cuda import fake_cuda, numbers_are_one

from rollcorr import correct
from rollcorr.config import InertOptionWarning, LossConfig, RolloutCorrectionConfig
from rollcorr.config.loss_options import LOSS_AGG_MODES
from rollcorr.config.sampling_spec import SamplingSpec
from rollcorr.core import advantages
from rollcorr.core.logprobs import kept_entropy, kept_log_mass, kept_log_prob, token_entropy, token_log_prob
from rollcorr.core.mergeable_statistics import merge_statistics
from rollcorr.core.metric_registry import CRITERIA
from rollcorr.core.sampling import KeptSets
from rollcorr.correction.denominators import count_denominators, rescaling
from rollcorr.correction.losses import PolicyLogProbs, policy_loss
from rollcorr.correction.scoring import actor_entropy, actor_log_prob
from rollcorr.correction.training_step import TrainingStep
from rollcorr.diffusion import DiffusionActorConfig, diffusion_loss
from rollcorr.integrations import verl

B, T = 4, 16
LEVELS = (None, "token", "sequence", "geometric")
REJECTION = {"rollout_rs": ",".join(CRITERIA), "rollout_rs_threshold": 2.0, "rollout_token_veto_threshold": 1e-4}
OPTIONS = {
    "alone": {},
    "rejection": REJECTION,
    "floor": {"rollout_is_floor": 0.1},
    "IcePop": {"rollout_is_threshold": "0.5_2.0", "nonfinite": "neutral"},
    "normalized": {"rollout_is_batch_normalize": True, "batch_normalize_over": "kept", "nonfinite": "reject_sequence"},
    "normalized, no bound": {"rollout_is_threshold": None, "rollout_is_batch_normalize": True, "safety_bound": 10.0},
}
both_layouts = pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])


@pytest.fixture(autouse=True)
def cuda():
    with warnings.catch_warnings(), fake_cuda():
        warnings.simplefilter("ignore", InertOptionWarning)
        yield


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda")


def batch(packed: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """log π, log μ, the response mask and the offsets."""
    shape = (B * T,) if packed else (B, T)
    offsets = tensor(B + 1, dtype=torch.int64) if packed else None
    return tensor(*shape), tensor(*shape), tensor(*shape, dtype=torch.bool), offsets


def assert_no_wait(counts: Counts) -> None:
    assert counts.operations > 0
    assert counts.culprits == []
    assert (counts.waits, counts.transfers, counts.uploads) == (0, 0, 0)


@pytest.mark.parametrize(
    ("level", "options", "impl", "packed"),
    [
        *((level, "alone", "torch", packed) for level in LEVELS for packed in (False, True)),
        *((level, "rejection", "torch", level == "sequence") for level in LEVELS),
        *(("token", options, "torch", False) for options in OPTIONS if options not in ("alone", "rejection")),
        *(("geometric", options, "torch", True) for options in ("IcePop", "normalized")),
        *(("token", "rejection", "reference", packed) for packed in (False, True)),
    ],
)
def test_a_correction_neither_reads_nor_sends_a_value(level, options, impl, packed):
    train, rollout, mask, cu_seqlens = batch(packed)
    config = RolloutCorrectionConfig(rollout_is=level, **OPTIONS[options])
    with Counts() as counts:
        correction = correct(train, rollout, mask, config, cu_seqlens=cu_seqlens, impl=impl)
        for normalizer in ("kept", "original", "weights"):
            correction.denominators(normalizer)
        merge_statistics([correction.statistics] * 2).pack()
    assert_no_wait(counts)
    assert correction.loss_mask.is_cuda
    assert correction.statistics.pack().is_cuda


@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="torch 2.6 cannot split a fake tensor without rows")
@both_layouts
def test_everything_else_that_correct_can_be_asked_for_waits_no_more(packed):
    train, rollout, mask, cu_seqlens = batch(packed)
    layout = {"cu_seqlens": cu_seqlens}
    out = tensor(*train.shape), tensor(*train.shape, dtype=torch.bool)
    with Counts() as counts:
        correct(train, rollout, mask, "disabled", **layout, detail=True)
        correct(train, rollout, mask, rollout_is="token", **layout, detail=True, fill=1.0, out=out)
        correct(train.bfloat16(), rollout.double(), mask.long(), rollout_is="token", **layout)
        correct(train, rollout, mask, RolloutCorrectionConfig().to_dict(), **layout)
        correct(train[:0], rollout[:0], mask[:0], **({"cu_seqlens": cu_seqlens[:1]} if packed else {}))
    assert_no_wait(counts)


def test_the_parts_of_a_correction_wait_for_nothing():
    train, rollout, mask, _ = batch()
    rows = tensor(2, dtype=torch.int64)
    with Counts() as counts:
        correction = correct(train, rollout, mask, rollout_is="token")
        correction[rows]
        correction[1:]
        correction.split(2)
        correction.mini_batch(rows).denominators("weights")
    assert_no_wait(counts)


def test_metrics_are_one_transfer():
    train, rollout, mask, _ = batch()
    correction = correct(train, rollout, mask, rollout_is="token")
    with Counts() as counts, pytest.raises(Exception, match="_local_scalar_dense"):
        correction.metrics()
    assert counts.transfers == 1


# --- Losses --------------------------------------------------------------------------------------------------------

MODES = {
    "plain": None,
    "decoupled": {"rollout_is": "token", "rollout_is_batch_normalize": True, "normalizer": "weights", **REJECTION},
    "decoupled, neutral": {"rollout_is": "sequence", "nonfinite": "neutral", "normalizer": "original"},
    "bypass": {"bypass_mode": True, **REJECTION},
    "bypass, REINFORCE": {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "geometric"},
}


def policies_of(
    parameter: torch.Tensor, log_prob: torch.Tensor, *, bypass: bool, plain: bool = False
) -> PolicyLogProbs:
    return PolicyLogProbs(
        log_prob=log_prob + parameter,
        old_log_prob=None if bypass else log_prob,
        rollout_log_prob=None if plain else log_prob + 1,
        ref_log_prob=log_prob,
    )


@pytest.mark.parametrize(
    ("mode", "aggregation", "packed"),
    [
        *((mode, "token-mean", False) for mode in MODES),
        *((mode, "seq-mean-token-mean", True) for mode in MODES),
        *(("plain", aggregation, False) for aggregation in LOSS_AGG_MODES),
    ],
)
def test_a_loss_and_its_gradient_neither_read_nor_send_a_value(mode, aggregation, packed):
    log_prob, rollout, mask, cu_seqlens = batch(packed)
    settings = None if MODES[mode] is None else RolloutCorrectionConfig(**MODES[mode])
    bypass = settings is not None and settings.bypass_mode
    scale = 8.0 if aggregation.endswith("norm") else None
    loss = LossConfig(
        loss_agg_mode=aggregation, loss_scale_factor=scale, kl_coef=0.1, entropy_coef=0.01, clip_ratio_c=3.0
    )
    parameter = tensor().requires_grad_()
    with Counts() as counts:
        policies = policies_of(parameter, log_prob, bypass=bypass, plain=settings is None)
        correction = None
        if settings is not None and not bypass:
            correction = correct(log_prob, rollout, mask, settings, cu_seqlens=cu_seqlens)
        output = policy_loss(
            policies,
            log_prob,
            mask,
            config=settings,
            loss=loss,
            correction=correction,
            whole_step=True,
            entropy=-policies.log_prob,
            cu_seqlens=cu_seqlens,
        )
        output.loss.backward()
    assert_no_wait(counts)
    assert parameter.grad.is_cuda
    assert output.statistics.pack().is_cuda


@pytest.mark.parametrize("aggregation", LOSS_AGG_MODES[:3])
@pytest.mark.parametrize("empty", [False, True], ids=["two micro-batches", "a rank without data"])
def test_a_step_in_bypass_mode_waits_for_nothing(aggregation, empty):
    log_prob, rollout, mask, _ = batch()
    config = RolloutCorrectionConfig(bypass_mode=True, rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0")
    model = torch.nn.ParameterList([torch.nn.Parameter(tensor())])
    loss = LossConfig(loss_agg_mode=aggregation, kl_coef=0.1)
    with Counts() as counts:
        with TrainingStep(model, config, loss=loss) as step:
            for _ in range(0 if empty else 2):
                output = step.policy_loss(policies_of(model[0], log_prob, bypass=True), log_prob, mask)
                step.backward(output)
            step.finish()
        count_denominators(mask, weights=rollout)
    assert_no_wait(counts)


# --- Log-probs and advantages --------------------------------------------------------------------------------------


def test_log_probs_and_their_gradients_wait_for_nothing():
    logits, ids = tensor(6, 32).requires_grad_(), tensor(6, dtype=torch.int64)
    kept = KeptSets(tensor(12, dtype=torch.int32), tensor(7, dtype=torch.int64))
    truncated = SamplingSpec(temperature=0.7, top_k=8, top_p=0.9, min_p=0.01, logprobs="processed", engine="vllm")
    with Counts() as counts:
        total = token_log_prob(logits, ids, temperature=0.7).sum() + token_entropy(logits).sum()
        total = total + kept_log_prob(logits, ids, kept).log_prob.sum() + kept_log_mass(logits, ids, kept).sum()
        total = total + kept_entropy(logits, ids, kept).sum()
        for spec in (SamplingSpec(), truncated, replace(truncated, support="recomputed")):
            total = total + actor_log_prob(logits, ids, spec).log_prob.sum() + actor_entropy(logits, ids, spec).sum()
        total.backward()
    assert_no_wait(counts)


@both_layouts
def test_advantages_wait_for_nothing(packed):
    rewards, values, mask, cu_seqlens = batch(packed)
    of_sequences, groups, keep = tensor(B), tensor(B, dtype=torch.int64), tensor(B, dtype=torch.bool)
    with Counts() as counts:
        for estimate in (advantages.grpo_advantages, advantages.dr_grpo_advantages, advantages.rloo_advantages):
            estimate(of_sequences, groups, keep=keep)
        advantages.terminal_rewards(of_sequences, mask, cu_seqlens=cu_seqlens)
        advantages.gae_advantages(rewards, values, mask, keep=keep, gamma=0.9, cu_seqlens=cu_seqlens)
    assert_no_wait(counts)


# --- verl's functions, denoising steps, and mixed devices ------------------------------------------------------------


@pytest.fixture
def read_as_one():
    """Values that are read are 1, so that functions which return numbers come to their end."""
    with numbers_are_one():
        yield


def of_device(counts: Counts) -> list[str]:
    """Count the waits for the device, by kind."""
    return [culprit.split(":")[0] for culprit in counts.culprits if "(cpu)" not in culprit]


def actor(correction: dict | None) -> SimpleNamespace:
    """The fields of the actor's configuration that verl's losses read."""
    return SimpleNamespace(
        clip_ratio=0.2,
        clip_ratio_low=None,
        clip_ratio_high=0.3,
        get={"clip_ratio_c": 3.0}.get,
        global_batch_info={},
        policy_loss={"rollout_correction": correction},
    )


def test_the_correction_that_verl_calls_waits_once_for_its_numbers(read_as_one):
    train, rollout, mask, _ = batch()
    options = {"rollout_is": "token", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
    with Counts() as counts:
        _, kept, metrics = verl.compute_rollout_correction_and_rejection_mask(train, rollout, mask, **options)
    assert of_device(counts) == ["transfer"]
    assert kept.is_cuda
    assert metrics["rollout_corr/kl"] == -1.0


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_the_bypass_loss_that_verl_calls_waits_twice_for_its_numbers(loss_type, read_as_one):
    log_prob, rollout, mask, _ = batch()
    settings = {"bypass_mode": True, "loss_type": loss_type, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2"}
    parameter = tensor().requires_grad_()
    with Counts() as counts:
        loss, _ = verl.compute_policy_loss_bypass_mode(
            rollout, log_prob + parameter, log_prob, mask, "token-mean", actor(settings)
        )
        loss.backward()
    assert of_device(counts) == ["transfer", "transfer"]  # the correction's numbers, and the loss's
    assert parameter.grad.is_cuda


def added_to_batch(d: torch.Tensor, mask: torch.Tensor) -> object:
    names = {"old_log_probs": d.detach(), "rollout_log_probs": d.detach(), "response_mask": mask}
    return verl.compute_rollout_correction_and_add_to_batch(verl.TensorBatch(names), {"rollout_is": "token"})


# verl's other functions, on log-probs d, which carry a gradient, and a mask.
OTHER_FUNCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "add to batch": added_to_batch,
    "weights": lambda d, mask: verl.compute_rollout_correction_weights(d, mask),
    "rejection": lambda d, mask: verl.compute_rollout_rejection_mask(d, mask, "token_k1", "0.5_2.0"),
    "mismatch": lambda d, mask: verl.compute_offpolicy_metrics(d, d, mask),
    "mismatch of log-probs": lambda d, mask: verl.compute_rollout_corr_metrics_from_logprobs(d, d, mask),
    "weights described": lambda d, mask: verl.compute_is_metrics(d, d, d, mask, "token", 2.0),
    "PPO": lambda d, mask: verl.compute_policy_loss_vanilla(
        d.detach(), d, d.detach(), mask, "token-mean", actor(None), d.detach()
    ),
    "REINFORCE": lambda d, mask: verl.compute_policy_loss_reinforce(
        d.detach(), d, d.detach(), mask, config=actor(None), rollout_is_weights=d.detach()
    ),
    "older PPO": lambda d, mask: verl.compute_policy_loss(d.detach(), d, d.detach(), mask, 0.2),
    "aggregation": lambda d, mask: verl.agg_loss(d, mask, "seq-mean-token-sum"),
}


@pytest.mark.parametrize("name", OTHER_FUNCTIONS)
def test_what_else_verl_calls_waits_once_where_it_returns_numbers(name, read_as_one):
    """verl returns metrics as floats; a loss that returns tensors never waits."""
    parameter, mask = tensor().requires_grad_(), tensor(B, T, dtype=torch.bool)
    with Counts() as counts:
        found = OTHER_FUNCTIONS[name](tensor(B, T) + parameter, mask)
        results = found if isinstance(found, tuple) else (found,)
        if isinstance(results[0], torch.Tensor) and results[0].requires_grad:
            results[0].backward()
    returns_numbers = any(isinstance(result, dict) for result in results)
    assert of_device(counts) == ["transfer"] * returns_numbers


@pytest.mark.parametrize("mode", ["decoupled", "bypass", "reinforce"])
def test_the_loss_of_denoising_steps_waits_for_nothing(mode):
    options = {
        "decoupled": {"rollout_is": "sequence"},
        "bypass": {"bypass_mode": True, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_2.0"},
        "reinforce": {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token"},
    }[mode]
    config = DiffusionActorConfig(rollout_correction=RolloutCorrectionConfig(**options), reduction="sum", kl_coef=0.1)
    parameter, means = tensor().requires_grad_(), (B, 2, 3, 4)
    data = {name: tensor(B, 2) for name in ("rollout_log_probs", "old_log_probs", "std", "dt", "rollout_is_weights")}
    data |= {f"{name}prev_sample_mean": tensor(*means) for name in ("", "old_", "ref_")}
    data |= {"advantages": tensor(B), "timesteps": tensor(B, 2), "rollout_keep_mask": tensor(B, 2, dtype=torch.bool)}
    with Counts() as counts:
        output = {"log_probs": tensor(B, 2) + parameter, "prev_sample_mean": tensor(*means) + parameter}
        found = diffusion_loss(config, output, data, total_steps=16, schedule=(1.0, 0.5))
        found.loss.backward()
        rescaling(16.0, found.counts.tokens)
    assert_no_wait(counts)
    assert parameter.grad.is_cuda


@pytest.mark.parametrize("place", range(3))
def test_a_batch_on_two_devices_is_refused_by_name(place):
    given = list(batch()[:3])
    given[place] = given[place].cpu()
    names = ("train_log_prob", "rollout_log_prob", "response_mask")
    devices = ["cpu" if i == place else "cuda:0" for i in range(3)]
    other = place or 1
    with pytest.raises(ValueError, match=f"{names[0]} is on {devices[0]} and {names[other]} is on {devices[other]}"):
        correct(*given)


def test_a_loss_on_two_devices_is_refused_by_name():
    log_prob, _, mask, _ = batch()
    policies = policies_of(tensor(), log_prob, bypass=False)
    with pytest.raises(ValueError, match="log_prob is on cuda:0 and advantages is on cpu"):
        policy_loss(policies, log_prob.cpu(), mask)
    with pytest.raises(ValueError, match="log_prob is on cuda:0 and old_log_prob is on cpu"):
        PolicyLogProbs(log_prob=log_prob, old_log_prob=log_prob.cpu())
    with pytest.raises(ValueError, match="logits is on cuda:0 and token_ids is on cpu"):
        token_log_prob(tensor(6, 32), tensor(6, dtype=torch.int64).cpu())
    kept = KeptSets(tensor(12, dtype=torch.int32).cpu(), tensor(7, dtype=torch.int64).cpu())
    with pytest.raises(ValueError, match=r"logits is on cuda:0 and kept\.ids is on cpu"):
        kept_log_prob(tensor(6, 32), tensor(6, dtype=torch.int64), kept)
    correction = correct(log_prob, log_prob, mask).to("cpu")
    with pytest.raises(ValueError, match=r"response_mask is on cuda:0 and correction\.loss_mask is on cpu"):
        policy_loss(policies, log_prob, mask, correction=correction)


# --- Allocations and launches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "packed", "launches"),
    [({}, False, 240), ({}, True, 248), ({"rollout_rs": ",".join(CRITERIA), "rollout_rs_threshold": 1.0}, False, 493)],
    ids=["one criterion", "one criterion, packed", "every criterion"],
)
def test_a_micro_batch_is_few_launches(options, packed, launches):
    """At most 250. verl 0.9.1 asks for 308 with one criterion, and waits 49 times.

    Count allocations like launches: a launch writes to new or existing memory.
    """
    train, rollout, mask, cu_seqlens = batch(packed)
    standard = {"rollout_is": "token", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
    with Counts() as counts:
        correct(train, rollout, mask, RolloutCorrectionConfig(**standard | options), cu_seqlens=cu_seqlens)
    assert counts.operations <= launches
    assert counts.allocations <= counts.operations + 12
