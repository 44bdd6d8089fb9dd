"""This library's correction in the form that the suite calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rollcorr.config import Implementation, RolloutCorrectionConfig
from rollcorr.core.mergeable_statistics import merge_statistics
from rollcorr.core.metric_registry import finalize
from rollcorr.correction.rollout_correction import correct


def own_correction(
    train_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    *,
    level: str | None = "token",
    ceiling: float | None = None,
    token_band: tuple[float, float] | None = None,
    geometric_band: tuple[float, float] | None = None,
    veto: float | None = None,
    impl: Implementation = "auto",
) -> dict[str, Any]:
    """Call `correct` with the suite's options: `rollcorr conformance rollcorr.conformance:own_correction`.

    Args:
        train_log_prob: log π, nats. (B, T).
        rollout_log_prob: log μ, nats. Same shape.
        response_mask: non-zero on response tokens. Same shape.
        level: "token", "sequence" or None, for no weights.
        ceiling: upper bound of the weights; None for the safety bound alone.
        token_band: smallest and largest ratio of a kept token.
        geometric_band: the same for the geometric mean of a sequence's ratios.
        veto: a ratio below it rejects its sequence.
        impl: implementation of the correction; "auto" reads ROLLCORR_IMPL.

    Returns:
        "weights" and "loss_mask", (B, T); "ess", "k3" and every other metric; "sums", which `merge` adds up.
    """
    bands = {"token_k1": token_band, "seq_mean_k1": geometric_band}
    used = {name: f"{band[0]}_{band[1]}" for name, band in bands.items() if band is not None}
    weighted = {} if level is None else {"rollout_is": level, "rollout_is_threshold": ceiling}
    config = RolloutCorrectionConfig(
        **weighted,  # type: ignore[arg-type]
        rollout_rs=",".join(used) or None,
        rollout_rs_threshold=",".join(used.values()) or None,
        rollout_token_veto_threshold=veto,
    )
    correction = correct(train_log_prob, rollout_log_prob, response_mask, config, impl=impl)
    output = {
        "loss_mask": correction.loss_mask,
        "sums": correction.statistics,
        **_add_suite_names(correction.metrics(prefix="")),
    }
    return output if correction.weights is None else output | {"weights": correction.weights}


def _merge(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    return _add_suite_names(finalize(merge_statistics([result["sums"] for result in results]).read(), prefix=""))


def _add_suite_names(metrics: dict[str, float]) -> dict[str, float]:
    # The suite's names of two metrics; without weights there is no effective sample size.
    names = {"k3": "k3_kl", "ess": "rollout_is_eff_sample_size"}
    return metrics | {short: metrics[name] for short, name in names.items() if name in metrics}


own_correction.merge = _merge  # type: ignore[attr-defined]
