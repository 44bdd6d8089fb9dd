"""Names of metrics in verl's guides of 2025, the names of today, and the changes of meaning.

    2025-10   mismatch/rollout_is_…, mismatch/mismatch_…
    2025-11   rollout_corr/rollout_is_…, rollout_corr/rollout_rs_… of the ratio, rollout_corr/…
    newest    the metric registry

`rollcorr explain` and docs/reference/metrics.md read this table. `rollcorr.integrations.verl` contains the functions of
the older generations, which report the older names.
"""

from __future__ import annotations

from typing import NamedTuple


class OlderName(NamedTuple):
    """The metric that an older name stands for.

    Attributes:
        newest: name of today, without prefix.
        change: change of meaning; empty if there is none.
    """

    newest: str
    change: str = ""


_APPLIED = "describes applied weights; in 2025, weights before truncation"
_CLIPPED = "describes applied weights; in 2025, ratios clipped to [lower, upper]"
_CRITERION = (
    "describes −log ρ in nats; in 2025, the ratio. For seq_sum_k1 and seq_mean_k1, today's name contains the criterion"
)
_SIGN = "train − rollout; in 2025, rollout − train"

_CHANGED_WEIGHTS = {
    "mean": f"{_APPLIED} (today rollout_is_raw_mean)",
    "std": _CLIPPED,
    "min": f"{_APPLIED} (today rollout_is_raw_min; of sequence weights, exp(rollout_is_log_min))",
    "max": f"{_APPLIED} (today rollout_is_raw_max; of sequence weights, exp(rollout_is_log_max))",
    "ratio_fraction_high": "over sequences at the geometric level; in 2025, over tokens",
    "ratio_fraction_low": "over sequences at the geometric level; in 2025, over tokens",
    "eff_sample_size": "over tokens or sequences, in [0, 1]; in 2025, over tokens, of ratios clipped to [lower, upper]",
    "seq_mean": "mean over sequences of the applied weights. It equals rollout_is_mean, a mean over tokens, only if "
    "all lengths are equal",
    "seq_std": _APPLIED,
    "seq_min": _APPLIED,
    "seq_max": _APPLIED,
    "seq_max_deviation": _APPLIED,
    "seq_fraction_high": "",
    "seq_fraction_low": "",
    "veto_fraction": "",
    "catastrophic_token_fraction": "",
}
_GAP = {
    "training_ppl": "",
    "training_log_ppl": "",
    "rollout_ppl": "",
    "rollout_log_ppl": "",
    "kl": "",
    "k3_kl": "",
    "log_ppl_diff": _SIGN,
    "log_ppl_abs_diff": "",
    "log_ppl_diff_max": f"{_SIGN}, so it is minus the older minimum",
    "log_ppl_diff_min": f"{_SIGN}, so it is minus the older maximum",
    "ppl_ratio": "mean of exponentials; in 2025, exponential of the mean (today ppl_ratio_geo)",
}
_REJECTED = "of all criteria and the veto together; of one criterion, rollout_rs_{criterion}_"
_BAND = ("mean", "std", "min", "max", "seq_mean", "seq_std", "seq_min", "seq_max", "seq_max_deviation")
_BAND_SIDES = ("seq_fraction_high", "seq_fraction_low", "ratio_fraction_high", "ratio_fraction_low")

OLDER_NAMES: dict[str, OlderName] = {
    **{f"mismatch/rollout_is_{name}": OlderName(f"rollout_is_{name}", text) for name, text in _CHANGED_WEIGHTS.items()},
    **{
        f"rollout_corr/rollout_is_{name}": OlderName(f"rollout_is_{name}", text)
        for name, text in _CHANGED_WEIGHTS.items()
    },
    **{
        f"{prefix}rollout_is_{name}": OlderName(f"rollout_rs_{name}", f"{_REJECTED}{name}")
        for prefix in ("mismatch/", "rollout_corr/")
        for name in ("masked_fraction", "seq_masked_fraction")
    },
    **{
        f"rollout_corr/rollout_rs_{name}": OlderName(f"rollout_rs_{name}", f"{_REJECTED}{name}")
        for name in ("masked_fraction", "seq_masked_fraction")
    },
    **{f"rollout_corr/rollout_rs_{name}": OlderName(f"rollout_rs_token_k1_{name}", _CRITERION) for name in _BAND},
    **{
        f"rollout_corr/rollout_rs_{name}": OlderName(
            f"rollout_rs_token_k1_{name.removeprefix('ratio_')}",
            "for seq_sum_k1 and seq_mean_k1, today's name contains the criterion",
        )
        for name in _BAND_SIDES
    },
    "rollout_corr/rollout_rs_eff_sample_size": OlderName(
        "rollout_is_eff_sample_size", "today reported only for weights"
    ),
    **{f"mismatch/mismatch_{name}": OlderName(name, text) for name, text in _GAP.items()},
    **{f"rollout_corr/{name}": OlderName(name) for name in ("chi2_token", "chi2_seq", *_GAP)},
}
"""Prefixed name of 2025 → name of today and change of meaning."""
