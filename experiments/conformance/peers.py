"""Other frameworks' corrections in the form of `rollcorr conformance`: each calls the framework's own code.

A function of this file takes the framework's definitions, unchanged, from its files (`definitions`), and translates
options and outputs only. It raises `NotImplementedError` for a combination that the framework does not have. Where a
framework has a loss instead of weights, the weight of a token is its gradient: at π_θ = π_old and advantage 1,
∂loss/∂log π_θ = −w / n.
"""

from __future__ import annotations

import ast
import functools
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import torch

Names = dict[str, Any]


def definitions(file: Path, names: str, **given: object) -> Names:
    """Run the named definitions of a file, unchanged, and return their names.

    Args:
        file: the framework's file.
        names: top-level functions, classes and constants, or `Class.method`, separated by spaces.
        given: what else the definitions refer to.
    """
    wanted, nodes = names.split(), []
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        inside = node.body if isinstance(node, ast.ClassDef) else []
        nodes += [x for x in inside if f"{getattr(node, 'name', '')}.{getattr(x, 'name', '')}" in wanted]
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if {getattr(node, "name", None), *(getattr(target, "id", None) for target in targets)} & set(wanted):
            nodes.append(node)
    missing = {name.split(".")[-1] for name in wanted} - {getattr(x, "name", None) for x in nodes}
    if missing - {target.id for x in nodes for target in getattr(x, "targets", [getattr(x, "target", None)]) if target}:
        raise ImportError(f"{file} does not define {sorted(missing)}")
    return run_nodes(nodes, file, **given)


def run_nodes(nodes: list[ast.stmt], file: Path, **given: object) -> Names:
    """Run statements of a file in a namespace with torch, and return it."""
    usual = {"torch": torch, "nn": torch.nn, "math": math, "functools": functools, "field": field, "Any": Any}
    space = {"__name__": __name__, "dataclass": dataclass, "Optional": typing.Optional, **usual, **given}
    flags = annotations.compiler_flag
    exec(compile(ast.Module(body=nodes, type_ignores=[]), str(file), "exec", flags=flags, dont_inherit=True), space)
    return space


def unless(unsupported: bool, reason: str) -> None:
    """Raise if the framework does not have what is asked for."""
    if unsupported:
        raise NotImplementedError(reason)


def numbers(metrics: dict[str, Any], **own_names: str) -> Names:
    """Return metrics with the suite's names of two of them."""
    return metrics | {name: metrics[theirs] for name, theirs in own_names.items() if theirs in metrics}


# --- from the index ---


def verl(root: Path) -> Callable[..., Names]:
    helper, functional = root / "verl/trainer/ppo/rollout_corr_helper.py", root / "verl/utils/torch_functional.py"
    masked = SimpleNamespace(**definitions(functional, "masked_sum masked_mean"))
    container = SimpleNamespace(from_dict=lambda tensors: tensors)
    names = (
        "SAFETY_BOUND SUPPORTED_ROLLOUT_RS_OPTIONS TOKEN_LEVEL_ROLLOUT_RS_OPTIONS _parse_rollout_is_threshold "
        "_parse_rollout_rs_thresholds compute_rollout_rejection_mask compute_rs_metrics compute_is_metrics "
        "compute_rollout_correction_weights compute_rollout_correction_and_rejection_mask compute_offpolicy_metrics"
    )
    theirs = definitions(helper, names, verl_F=masked, DataProto=container)

    def correct(train, rollout, mask, *, level="token", ceiling=2.0, token_band=None, geometric_band=None):
        bands = {"token_k1": token_band, "seq_mean_k1": geometric_band}
        rs = {name: f"{band[0]}_{band[1]}" for name, band in bands.items() if band}
        weights, kept, metrics = theirs["compute_rollout_correction_and_rejection_mask"](
            old_log_prob=train,
            rollout_log_prob=rollout,
            response_mask=mask.float(),
            rollout_is=level,
            rollout_is_threshold=ceiling,
            rollout_rs=",".join(rs) or None,
            rollout_rs_threshold=",".join(rs.values()) or None,
        )
        metrics = {name.removeprefix("rollout_corr/"): value for name, value in metrics.items()}
        output = {"loss_mask": kept, **numbers(metrics, ess="rollout_is_eff_sample_size", k3="k3_kl")}
        return output | ({} if weights is None else {"weights": weights["rollout_is_weights"]})

    return correct


def trl(root: Path) -> Callable[..., Names]:
    file = root / "trl/trainer/grpo_trainer.py"
    method = "_generate_and_score_completions"
    [body] = [x for x in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if getattr(x, "name", "") == method]
    [block] = [
        x
        for x in ast.walk(body)
        if isinstance(x, ast.If) and "per_token_logps_diff =" in ast.unparse(ast.Module(x.body[1:2], []))
    ]

    def correct(train, rollout, mask, *, level="token", ceiling=2.0, token_band=None):
        unless(level is None, "TRL computes the mask from the weights")
        trainer = SimpleNamespace(
            use_vllm=True,
            vllm_importance_sampling_correction=True,
            vllm_importance_sampling_mode="token_mask" if token_band else f"{level}_truncate",
            vllm_importance_sampling_clip_min=token_band[0] if token_band else None,
            vllm_importance_sampling_clip_max=token_band[1] if token_band else ceiling,
        )
        old, sampling = {"old_per_token_logps": train}, {"sampling_per_token_logps": rollout}
        space = run_nodes([block], file, self=trainer, completion_mask=mask.int(), tool_mask=None, **old, **sampling)
        weights = space["vllm_importance_sampling_ratio"]
        return {"weights": weights, "loss_mask": mask & (weights != 0) if token_band else None}

    return correct


def openrlhf(root: Path) -> Callable[..., Names]:
    masked_mean = definitions(root / "openrlhf/models/utils.py", "masked_mean")["masked_mean"]
    loss_file = root / "openrlhf/models/loss.py"
    theirs = definitions(loss_file, "aggregate_loss PolicyLoss", masked_mean=masked_mean)

    def correct(train, rollout, mask, *, level="token", ceiling=2.0, token_band=None, geometric_band=None):
        unless(level != "token", "OpenRLHF weighs tokens, and rejects with weights only")
        unless(bool(token_band and geometric_band), "OpenRLHF has one filter at a time")
        loss_function = theirs["PolicyLoss"](
            is_correction_level="seq" if geometric_band else "token",
            is_correction_mode="mask" if token_band or geometric_band else "clip",
            is_correction_threshold=list(token_band or geometric_band or (0.0, ceiling)),
        )
        current, ones = train.clone().requires_grad_(), torch.ones_like(train)
        loss, clip_ratio, ppo_kl, vllm_kl, filtered = loss_function(current, train, ones, mask.float(), rollout)
        loss.backward()
        weights = -current.grad * mask.sum()
        kept = mask & (weights != 0) if token_band or geometric_band else None
        statistics = {
            "loss": loss,
            "clip_ratio": clip_ratio,
            "ppo_kl": ppo_kl,
            "vllm_kl": vllm_kl,
            "filtered": filtered,
        }
        return {"weights": weights, "loss_mask": kept, **{name: x.detach() for name, x in statistics.items()}}

    return correct


def ms_swift(root: Path) -> Callable[..., Names]:
    methods = (
        "_get_rollout_is_correction _compute_sequence_level_ratios _apply_rollout_importance_sampling "
        "_compute_rollout_offpolicy_metrics _compute_is_correction_metrics"
    )
    names = " ".join(f"GRPOTrainer.{name}" for name in methods.split())
    theirs = definitions(root / "swift/rlhf_trainers/grpo_trainer.py", names)

    def correct(train, rollout, mask, *, level="token", ceiling=2.0):
        trainer = SimpleNamespace(
            rollout_importance_sampling_mode=level and f"{level}_truncate",
            rollout_importance_sampling_threshold=ceiling,
            disable_rollout_importance_sampling=False,
        )
        for name in methods.split():
            setattr(trainer, name, MethodType(theirs[name], trainer))
        metrics = trainer._compute_rollout_offpolicy_metrics(train, rollout, mask)
        log_ratio, weights = trainer._get_rollout_is_correction(train, rollout, mask)
        metrics |= {} if weights is None else trainer._compute_is_correction_metrics(log_ratio, weights, mask)
        return {"weights": weights, **numbers(metrics, k3="k3_kl")}

    return correct


def skyrl(root: Path) -> Callable[..., Names]:
    folder = root / "skyrl/backends/skyrl_train/utils"
    helpers = definitions(folder / "torch_utils.py", "masked_mean safe_exp_delta")
    parts = "compute_tis_ratio compute_outlier_token_mask compute_token_mask compute_sequence_mask"
    names = f"off_policy_correction_enabled {parts} compute_off_policy_correction"
    given = {name: helpers[name] for name in ("masked_mean", "safe_exp_delta")}
    theirs = definitions(folder / "off_policy_correction_utils.py", names, **given)

    def correct(train, rollout, mask, *, level="token", ceiling=2.0, token_band=None, geometric_band=None, veto=None):
        low, high = token_band or (None, None)
        geo_low, geo_high = geometric_band or (None, None)
        config = SimpleNamespace(
            tis_ratio_type=level,
            token_tis_ratio_clip_high=ceiling,
            sequence_tis_ratio_clip_high=ceiling,
            token_mask_is_threshold_low=low,
            token_mask_is_threshold_high=high,
            sequence_mask_metric="geometric" if geometric_band else None,
            geo_mask_low=geo_low,
            geo_mask_high=geo_high,
            outlier_token_is_threshold_low=veto,
            outlier_token_is_threshold_high=None,
        )
        weights, metrics, kept = theirs["compute_off_policy_correction"](train, rollout, mask.float(), config)
        return {"weights": weights, "loss_mask": kept, **metrics}

    return correct


def areal(root: Path) -> Callable[..., Names]:
    config = definitions(root / "areal/api/cli_args.py", "RejectionSamplingConfig")["RejectionSamplingConfig"]
    estimator = definitions(root / "areal/utils/data.py", "KLEstimator")["KLEstimator"]
    names = "RejectionSamplingResult _check_bounds apply_rejection_sampling"
    given = {"KLEstimator": estimator, "RejectionSamplingConfig": config}
    theirs = definitions(root / "areal/utils/functional/functional.py", names, **given)

    def correct(train, rollout, mask, *, level="token", ceiling=2.0, token_band=None, geometric_band=None):
        unless(level is None, "AReaL computes the weights in the same step")
        unless(bool(token_band and geometric_band), "AReaL has one filter at a time")
        low, high = token_band or geometric_band or (None, ceiling)
        options = config(
            level="sequence" if geometric_band else level,
            action="mask" if token_band or geometric_band else "clamp",
            metric="ratio",
            lower=low,
            upper=high,
        )
        result = theirs["apply_rejection_sampling"](train, rollout, mask.float(), None, options)
        output = {"weights": result.behave_imp_weight, "filtered_fraction": result.filtered_fraction}
        return output | {"loss_mask": result.loss_mask if token_band or geometric_band else None}

    return correct


# --- from checkouts ---


def slime(root: Path) -> Callable[..., Names]:
    names = "vanilla_tis_function icepop_function"
    theirs = definitions(root / "slime/backends/megatron_utils/loss.py", names)

    def correct(train, rollout, mask, *, level="token", ceiling=2.0, token_band=None):
        unless(level != "token", "these functions weigh tokens")
        low, high = token_band or (0.0, ceiling)
        function = theirs["icepop_function" if token_band else "vanilla_tis_function"]
        weighted, _, _ = function(
            SimpleNamespace(tis_clip_low=low, tis_clip=high),
            pg_loss=torch.ones(mask.numel()),
            train_log_probs=list(train),
            rollout_log_probs=list(rollout),
            loss_masks=list(mask.int()),
        )
        weights = weighted.view(mask.shape)
        return {"weights": weights, "loss_mask": mask & (weights != 0) if token_band else None}

    return correct


def slime_mis(root: Path) -> Callable[..., Names]:
    parts = "masked_sum masked_mean masked_min masked_max metrics_append calculate_veto_mask truncate clip mask"
    file = root / "examples/train_infer_mismatch_helper/mis.py"
    theirs = definitions(file, f"{parts} compute_mis_weights add_ppl_metrics")

    def correct(train, rollout, mask, *, level="token", ceiling=2.0, token_band=None, geometric_band=None, veto=None):
        unless(bool(token_band and geometric_band), "mis.py has one band at a time")
        low, high = token_band or geometric_band or (1e-30, 1e30)
        arguments = SimpleNamespace(
            use_tis=level is not None,
            tis_level=level,
            tis_mode="truncate",
            tis_lower_bound=0.0,
            tis_upper_bound=ceiling,
            tis_batch_normalize=False,
            use_rs=bool(token_band or geometric_band or veto),
            rs_level="geometric" if geometric_band else "token",
            rs_lower_bound=low,
            rs_upper_bound=high,
            rs_veto_threshold=veto,
        )
        lists = {"train_log_probs": list(train), "rollout_log_probs": list(rollout)}
        weights, kept, _ = theirs["compute_mis_weights"](arguments, **lists, loss_masks=list(mask.int()))
        return {"weights": None if weights is None else torch.stack(weights), "loss_mask": torch.stack(kept)}

    return correct


def roll(root: Path) -> Callable[..., Names]:
    helpers = definitions(root / "roll/utils/functionals.py", "masked_mean masked_sum agg_loss")
    segments = definitions(root / "roll/pipeline/agentic/utils.py", "compute_segment_masked_mean", **helpers)
    parts = "_compute_all_granularity _infer_global_valid_samples_from_mask _infer_global_valid_tokens_from_mask"
    names = f"{parts} compute_train_infer_correction"
    theirs = definitions(root / "roll/utils/train_infer_corrections.py", names, **segments)

    def correct(train, rollout, mask, *, level="token", ceiling=2.0, token_band=None, geometric_band=None):
        bands = {"token": token_band, "geometric": geometric_band}
        filters = [
            SimpleNamespace(
                enabled=True, agg_type=name, ratio_enabled=True, ratio_low=x[0], ratio_high=x[1], diff_enabled=False
            )
            for name, x in bands.items()
            if x
        ]
        weight = SimpleNamespace(enabled=level is not None, weight_type=level, upper_bound=ceiling, detach=True)
        config = SimpleNamespace(is_weight=weight, filters=filters)
        weights, kept, metrics = theirs["compute_train_infer_correction"](config, mask.long(), train, rollout)
        return {"weights": weights, "loss_mask": mask * kept, **metrics}

    return correct


def prime_rl(root: Path) -> Callable[..., Names]:
    names = "LossInputs LossOutputs _safe_mean compute_importance_ratio_and_mismatch_kl default_loss_fn"
    theirs = definitions(root / "src/prime_rl/trainer/rl/loss.py", names)
    settings = SimpleNamespace(dppo_mask_high=math.inf, dppo_mask_low=math.inf, adv_tau=1.0, kl_tau=0.0)

    def correct(train, rollout, mask):
        current, loss = train.clone().requires_grad_(), 0.0
        for row, mu, valid in zip(current, rollout, mask, strict=True):
            inputs = theirs["LossInputs"](row, mu, None, torch.ones_like(mu), valid)
            loss = loss + theirs["default_loss_fn"](inputs, settings).loss
        loss.backward()
        return {"weights": -current.grad, "loss": loss.detach()}

    return correct


def nemo_rl(root: Path) -> Callable[..., Names]:
    folder = root / "nemo_rl/algorithms"
    helpers = definitions(folder / "utils.py", "calculate_kl masked_mean")
    enums = {"enum": __import__("enum"), "Enum": __import__("enum").Enum, "StrEnum": str}
    kinds = definitions(folder / "loss/interfaces.py", "LossType LossInputType MetricNormalizer", **enums)
    given = {name: helpers[name] for name in ("calculate_kl", "masked_mean")}
    given |= {name: kinds[name] for name in ("LossType", "LossInputType", "MetricNormalizer")}
    theirs = definitions(folder / "loss/loss_functions.py", "ClippedPGLossFn", LossFunction=object, **given)
    defaults = {"disable_ppo_ratio": False, "token_level_loss": True, "ratio_clip_min": 0.2, "ratio_clip_max": 0.2}
    defaults |= {"ratio_clip_c": None, "reference_policy_kl_penalty": 0.0, "reference_policy_kl_type": "k3"}
    defaults |= {"kl_input_clamp_value": 20.0, "kl_output_clamp_value": 10.0, "use_kl_in_reward": False}
    defaults |= {"use_on_policy_kl_approximation": False, "force_on_policy_ratio": False, "use_cispo": False}
    defaults |= {"positive_example_nll_weight": 0.0, "use_importance_sampling_correction": True}

    def correct(train, rollout, mask, *, level="token", ceiling=2.0, token_band=None, geometric_band=None):
        unless(level != "token", "truncation is for token weights, and rejection needs them")
        unless(bool(token_band and geometric_band), "NeMo-RL has one filter at a time")
        kind = {(True, False): "icepop", (False, True): "seq-mask-tis"}.get((bool(token_band), bool(geometric_band)))
        low, high = token_band or geometric_band or (None, ceiling)
        bounds = {
            "truncated_importance_sampling_type": kind or "tis",
            "truncated_importance_sampling_ratio": high,
            "truncated_importance_sampling_ratio_min": low,
            "sequence_level_importance_ratios": False,
        }
        function = theirs["ClippedPGLossFn"](SimpleNamespace(**defaults, **bounds))

        # Every tensor but the log-probs has the first token of the prompt in front.
        current = train.clone().requires_grad_()
        shifted = {name: torch.nn.functional.pad(x, (1, 0)) for name, x in zip(FIELDS, (train, rollout), strict=True)}
        token_mask, advantages = (torch.nn.functional.pad(x, (1, 0)) for x in (mask.float(), torch.ones_like(train)))
        data = {**shifted, "token_mask": token_mask, "advantages": advantages, "sample_mask": mask.any(dim=-1).float()}
        loss, metrics = function(current, data, data["sample_mask"].sum(), mask.sum())
        loss.backward()
        weights = -current.grad * (mask.sum() + 1e-8)
        kept = mask & (weights != 0) if kind else None
        scalars = {name: float(value) for name, value in metrics.items() if "min" not in name and "max" not in name}
        return {"weights": weights, "loss_mask": kept, **scalars}

    return correct


def unsloth(root: Path) -> Callable[..., Names]:
    theirs = definitions(root / "unsloth_zoo/rl_replacements.py", "grpo_compute_loss")["grpo_compute_loss"]

    def correct(train, rollout, mask, *, level="token", ceiling=2.0, token_band=None):
        unless(level is None, "Unsloth weighs every batch of vLLM")
        current, ids = train.clone().requires_grad_(), torch.zeros_like(train, dtype=torch.long)
        modes = {
            "vllm_importance_sampling_mode": "token_mask" if token_band else f"{level}_truncate",
            "vllm_importance_sampling_clip_min": token_band[0] if token_band else None,
            "vllm_importance_sampling_clip_max": token_band[1] if token_band else ceiling,
        }
        options = {"loss_type": "bnpo", "use_vllm": True, **modes}
        policies = (None, current, train, rollout)
        loss, *_ = theirs(*policies, ids, mask, 0.0, torch.ones(len(train)), **options)
        loss.backward()
        weights = -current.grad * mask.sum().clamp(min=1)
        return {"weights": weights, "loss_mask": mask & (weights != 0) if token_band else None, "loss": loss.detach()}

    return correct


FIELDS = ("prev_logprobs", "generation_logprobs")
