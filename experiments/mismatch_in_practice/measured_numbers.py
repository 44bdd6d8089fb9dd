"""What recordings say: weights, effective sample size, χ², KL and the health rule, at every length.

Errors are those of the mean over streams: windows of one stream are not independent, streams are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from measured_rollouts import Recording, logits_in_chunks
from torch import Tensor, nn

from rollcorr import RolloutCorrectionConfig, correct, health

Row = dict[str, Any]

TOKEN_TIS = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=2.0)
SEQUENCE_TIS = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold=4.0)
FALSE_POSITIVE = "deceptive_effective_sample_size"
GEOMETRIC_BAND = 1.001
"""The widest band that is recommended for geometric rejection."""
HEAD = 0.9
"""The head is the smallest set of tokens with this mass under the engine at temperature 1."""


def windows(train: Tensor, rollout: Tensor, mask: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Streams cut into whole windows of `length` tokens: log π, log μ and the stream of each window."""
    count = train.shape[1] // length
    streams = torch.arange(len(train))[:, None].expand(-1, count).reshape(-1)
    cut = [x[:, : count * length].reshape(-1, length) for x in (train, rollout, mask)]
    whole = cut[2].all(1)
    return cut[0][whole], cut[1][whole], streams[whole]


def at_length(train: Tensor, rollout: Tensor, mask: Tensor, length: int) -> Row:
    """Everything about responses of `length` tokens."""
    log_pi, log_mu, streams = windows(train, rollout, mask, length)
    valid = torch.ones_like(log_pi, dtype=torch.bool)
    token = correct(log_pi, log_mu, valid, TOKEN_TIS).metrics(prefix="")
    sequence = correct(log_pi, log_mu, valid, SEQUENCE_TIS).metrics(prefix="")
    report = health(sequence, SEQUENCE_TIS)
    codes = {finding.code for finding in report.findings}

    # The registry's χ² stops at the safety bound, as a framework's does. This sum does not.
    log_weight = (log_pi - log_mu).double().sum(1)
    second_moment = torch.logsumexp(2 * log_weight, 0).item() - math.log(len(log_weight))
    return {
        "T": length,
        "windows": len(log_weight),
        "kl": sequence["kl"],
        "kl_error": _error((log_mu - log_pi).double().mean(1), streams),
        "k3": sequence["k3_kl"],
        "t_times_kl": length * sequence["kl"],
        "chi2_token": sequence["chi2_token"],
        "chi2_seq": sequence["chi2_seq"],
        "log_second_moment": second_moment,
        "log_second_moment_error": _log_error(2 * log_weight, streams),
        "log_weight_mean": log_weight.mean().item(),
        "log_weight_std": log_weight.std().item() if len(log_weight) > 1 else 0.0,
        "mean_weight": sequence["rollout_is_mean"],
        "raw_mean_weight": torch.logsumexp(log_weight, 0).sub(math.log(len(log_weight))).exp().item(),
        "ess": sequence["rollout_is_eff_sample_size"],
        "low_weight": sequence["rollout_is_low_weight_fraction"],
        "low_weight_error": _error((log_weight < -math.log(4.0)).double(), streams),
        "saturated_low": sequence["saturated_low_fraction"],
        "saturated_high": sequence["saturated_high_fraction"],
        "token_mean_weight": token["rollout_is_mean"],
        "token_ess": token["rollout_is_eff_sample_size"],
        "false_positive": int(FALSE_POSITIVE in codes),
        "saturation": int("saturation" in codes),
        "warnings": " ".join(sorted(f.code for f in report.findings if f.severity == "warning")),
        "verdict": report.verdict,
        "log_ratio_min": sequence["log_ratio_min"],
        "log_ratio_max": sequence["log_ratio_max"],
        "largest_probability_gap": sequence["prob_diff_abs_max"],
        "mean_log_prob": sequence["training_log_ppl"],
        "geometric_mean": (log_mu - log_pi).double().mean(1).abs().mean().exp().item(),
        "geometric_outside": ((log_mu - log_pi).double().mean(1).abs() > math.log(GEOMETRIC_BAND))
        .double()
        .mean()
        .item(),
    }


def clipped(train: Tensor, rollout: Tensor, mask: Tensor, length: int, ceiling: float) -> Row:
    """Sequence weights clipped on both sides, [1/C, C]: how many are alike, and how few decide."""
    log_pi, log_mu, _ = windows(train, rollout, mask, length)
    config = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold=ceiling, rollout_is_floor=1 / ceiling)
    valid = torch.ones_like(log_pi, dtype=torch.bool)
    metrics = correct(log_pi, log_mu, valid, config).metrics(prefix="")

    log_weight = (log_pi - log_mu).double().sum(1)
    bound = math.log(ceiling)
    weights = log_weight.clamp(-bound, bound).exp()
    largest = weights.sort(descending=True).values[: max(1, round(0.05 * len(weights)))]
    return {
        "T": length,
        "C": ceiling,
        "windows": len(weights),
        "t_times_kl": length * metrics["kl"],
        "at_lower": (log_weight <= -bound).double().mean().item(),
        "at_upper": (log_weight >= bound).double().mean().item(),
        "ess": metrics["rollout_is_eff_sample_size"],
        "share_of_largest": (largest.sum() / weights.sum()).item(),
    }


@torch.no_grad()
def against_temperature(
    trainer: nn.Module, engine: nn.Module, recording: Recording, temperatures: Sequence[float], tokens: int
) -> list[Row]:
    """KL(μ_τ‖π_τ) over the whole vocabulary, in the head and in the tail, in contexts sampled at temperature 1.

    A token's part is μ log(μ/π) − μ + π: never negative, and the parts of all tokens add up to the KL.
    """
    rows = recording.tokens.select(torch.arange(len(recording.tokens)))
    short = type(rows)(rows.prompt_ids, rows.prompt_mask, rows.response_ids[:, :tokens], rows.response_mask[:, :tokens])
    pairs = zip(logits_in_chunks(trainer, short), logits_in_chunks(engine, short), strict=True)
    sums: dict[float, list[Tensor]] = {temperature: [] for temperature in temperatures}
    for (_, pi_logits), (_, mu_logits) in pairs:
        pi_logits, mu_logits = pi_logits.double(), mu_logits.double()
        order = mu_logits.softmax(-1).sort(-1, descending=True)
        in_head = order.values.cumsum(-1) - order.values < HEAD
        head = torch.zeros_like(in_head).scatter(-1, order.indices, in_head)
        same_top = (pi_logits.argmax(-1) == mu_logits.argmax(-1)).double()
        for temperature, found in sums.items():
            log_pi = (pi_logits / temperature).log_softmax(-1)
            log_mu = (mu_logits / temperature).log_softmax(-1)
            mu, pi = log_mu.exp(), log_pi.exp()
            parts = mu * (log_mu - log_pi) - mu + pi
            columns = (
                parts.sum(-1),
                parts.masked_fill(~head, 0).sum(-1),
                parts.masked_fill(head, 0).sum(-1),
                mu.masked_fill(head, 0).sum(-1),
                head.double().sum(-1),
                1 - same_top,
            )
            found.append(torch.stack([column.mean(1) for column in columns], 1))  # (rows, columns)

    result = []
    for temperature, found in sums.items():
        per_stream = torch.cat(found)
        mean, error = per_stream.mean(0), per_stream.std(0) / math.sqrt(len(per_stream))
        result.append(
            {
                "temperature": temperature,
                "kl": mean[0].item(),
                "kl_error": error[0].item(),
                "kl_head": mean[1].item(),
                "kl_tail": mean[2].item(),
                "tail_mass": mean[3].item(),
                "head_tokens": mean[4].item(),
                "other_top": mean[5].item(),
            }
        )
    return result


def _error(values: Tensor, streams: Tensor) -> float:
    """Standard error of the mean of windows, by streams; 0 for a single stream."""
    means = torch.stack([values[streams == stream].mean() for stream in streams.unique()])
    return (means.std() / math.sqrt(len(means))).item() if len(means) > 1 else 0.0


def _log_error(log_values: Tensor, streams: Tensor) -> float:
    """Standard error of log mean exp, by streams: the relative error of the mean."""
    scaled = (log_values - log_values.max()).exp()
    return _error(scaled, streams) / scaled.mean().item()
