"""Named configurations as one table of plain data: what each preset sets, what can be passed, and where it comes from.

`RolloutCorrectionConfig.preset(name, **arguments)` and the classmethods of the same names read this table, and so
does the generator of docs/presets.md. A field that `values` leaves out has the configuration's own default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

VERL = "verl 0.9.1"
VERL_2025_11 = "verl, November 2025"
VERL_2025_12 = "verl, December 2025"

# Not a field of the configuration: the lower end of the band whose upper end is `rollout_rs_threshold`.
BAND_LOWER = "rollout_rs_threshold_lower"


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One named configuration.

    Attributes:
        description: what it does, in one line.
        values: field → value; unnamed fields keep their defaults. `rollout_rs_threshold_lower` is no field: it is
            joined with `rollout_rs_threshold` to a band; None means the reciprocal, 0 an open side.
        parameters: argument → the fields it sets.
        source: the release that brought the name.
    """

    description: str
    values: Mapping[str, object]
    parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    source: str = VERL


_IS = {"threshold": ("rollout_is_threshold",)}
_RS = {"rs_threshold": ("rollout_rs_threshold",)}
_IS_RS = {"is_threshold": ("rollout_is_threshold",), **_RS}

_TOKEN_IS = {"rollout_is": "token", "rollout_is_threshold": 2.0}
_SEQ_IS = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
_TOKEN_ICEPOP = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
_GEO_RS = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3_RS = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
_BYPASS_PPO = {"bypass_mode": True, "loss_type": "ppo_clip"}
_BYPASS_PG = {"bypass_mode": True, "loss_type": "reinforce"}

_OLDER_GEO_RS = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.001, "rollout_token_veto_threshold": 1e-4}
_OLDER_GEO_RS_PARAMETERS = {
    **_RS,
    "rs_threshold_lower": (BAND_LOWER,),
    "veto_threshold": ("rollout_token_veto_threshold",),
}

PRESETS: dict[str, Preset] = {
    "decoupled_token_is": Preset(
        description="Decoupled PPO; each token weighted by its own ratio, truncated (Token-TIS).",
        values=_TOKEN_IS,
        parameters=_IS,
    ),
    "decoupled_seq_is": Preset(
        description="Decoupled PPO; each sequence weighted by its product of ratios, truncated (Seq-TIS).",
        values=_SEQ_IS,
        parameters=_IS,
    ),
    "decoupled_token_icepop": Preset(
        description="Decoupled PPO; token weights inside a band, zero outside it (IcePop).",
        values=_TOKEN_ICEPOP,
        parameters=_IS,
    ),
    "decoupled_seq_is_rs": Preset(
        description="Decoupled PPO; Seq-TIS, sequences whose product of ratios leaves a band are rejected (Seq-MIS).",
        values={**_SEQ_IS, "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
        parameters=_IS_RS,
    ),
    "decoupled_geo_rs": Preset(
        description="Decoupled PPO; no weights, sequences rejected on the geometric mean of their ratios (Geo-RS).",
        values=_GEO_RS,
        parameters=_RS,
    ),
    "decoupled_geo_rs_seq_tis": Preset(
        description="Decoupled PPO; Geo-RS filter with sequence weights.",
        values={**_SEQ_IS, **_GEO_RS},
        parameters=_IS_RS,
    ),
    "decoupled_geo_rs_token_tis": Preset(
        description="Decoupled PPO; Geo-RS filter with token weights.",
        values={**_TOKEN_IS, **_GEO_RS},
        parameters=_IS_RS,
    ),
    "decoupled_k3_rs": Preset(
        description="Decoupled PPO; no weights, sequences rejected on their mean k3 divergence (K3-RS).",
        values=_K3_RS,
        parameters=_RS,
    ),
    "decoupled_k3_rs_seq_tis": Preset(
        description="Decoupled PPO; K3-RS filter with sequence weights.",
        values={**_SEQ_IS, **_K3_RS},
        parameters=_IS_RS,
    ),
    "decoupled_k3_rs_token_tis": Preset(
        description="Decoupled PPO; K3-RS filter with token weights.",
        values={**_TOKEN_IS, **_K3_RS},
        parameters=_IS_RS,
    ),
    "bypass_ppo_clip": Preset(
        description="PPO clipped against the rollout policy itself; no old log-probs, no weights, no rejection.",
        values=_BYPASS_PPO,
    ),
    "bypass_ppo_clip_geo_rs": Preset(
        description="PPO clipped against the rollout policy, with the Geo-RS filter.",
        values={**_GEO_RS, **_BYPASS_PPO},
        parameters=_RS,
    ),
    "bypass_ppo_clip_k3_rs": Preset(
        description="PPO clipped against the rollout policy, with the K3-RS filter.",
        values={**_K3_RS, **_BYPASS_PPO},
        parameters=_RS,
    ),
    "bypass_pg_is": Preset(
        description="REINFORCE with truncated sequence weights against the rollout policy; no clipping.",
        values={**_SEQ_IS, **_BYPASS_PG},
        parameters=_IS,
    ),
    "bypass_pg_token_icepop": Preset(
        description="REINFORCE with banded token weights (IcePop) against the rollout policy.",
        values={**_TOKEN_ICEPOP, **_BYPASS_PG},
        parameters=_IS,
    ),
    "bypass_pg_geo_rs": Preset(
        description="REINFORCE without weights; the Geo-RS filter alone.",
        values={**_GEO_RS, **_BYPASS_PG},
        parameters=_RS,
    ),
    "bypass_pg_geo_rs_seq_tis": Preset(
        description="REINFORCE with sequence weights and the Geo-RS filter.",
        values={**_SEQ_IS, **_GEO_RS, **_BYPASS_PG},
        parameters=_IS_RS,
    ),
    "bypass_pg_geo_rs_token_tis": Preset(
        description="REINFORCE with token weights and the Geo-RS filter.",
        values={**_TOKEN_IS, **_GEO_RS, **_BYPASS_PG},
        parameters=_IS_RS,
    ),
    "disabled": Preset(
        description="Metrics only: the mismatch is measured, nothing is weighted or rejected.",
        values={},
    ),
    "token_is": Preset(
        description="Older name of `decoupled_token_is`.", values=_TOKEN_IS, parameters=_IS, source=VERL_2025_11
    ),
    "token_tis": Preset(description="The same as `token_is`.", values=_TOKEN_IS, parameters=_IS, source=VERL_2025_11),
    "seq_is": Preset(
        description="Older name of `decoupled_seq_is`.", values=_SEQ_IS, parameters=_IS, source=VERL_2025_11
    ),
    "seq_is_rs": Preset(
        description="Seq-TIS with rejection on the product of ratios; the band is given by its two ends.",
        values={**_SEQ_IS, "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": 2.0},
        parameters={**_IS_RS, "rs_threshold_lower": (BAND_LOWER,)},
        source=VERL_2025_11,
    ),
    "seq_mis": Preset(
        description="`seq_is_rs` with one threshold for weights and rejection; lower=0 leaves small ratios in.",
        values={**_SEQ_IS, "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": 2.0},
        parameters={"threshold": ("rollout_is_threshold", "rollout_rs_threshold"), "lower": (BAND_LOWER,)},
        source=VERL_2025_11,
    ),
    "geo_rs": Preset(
        description="Geo-RS with the band [1/1.001, 1.001] and the per-token veto.",
        values=_OLDER_GEO_RS,
        parameters=_OLDER_GEO_RS_PARAMETERS,
        source=VERL_2025_11,
    ),
    "geo_mis": Preset(
        description="Geo-RS with the band [0.999, 1.001] and the per-token veto.",
        values={**_OLDER_GEO_RS, BAND_LOWER: 0.999},
        parameters=_OLDER_GEO_RS_PARAMETERS,
        source=VERL_2025_11,
    ),
    "ppo_is_bypass": Preset(
        description="PPO clipped against the rollout policy; token weights are measured and stay out of the loss.",
        # Applying them would count the behaviour ratio twice; saying so here keeps the preset free of the warning.
        values={**_TOKEN_IS, **_BYPASS_PPO, "apply_is": False},
        parameters=_IS,
        source=VERL_2025_11,
    ),
    "pure_is": Preset(
        description="Older name of `bypass_pg_is`.",
        values={**_SEQ_IS, **_BYPASS_PG},
        parameters=_IS,
        source=VERL_2025_11,
    ),
    "bypass_pg_rs": Preset(
        description="Older name of `bypass_pg_geo_rs`.",
        values={**_GEO_RS, **_BYPASS_PG},
        parameters=_RS,
        source=VERL_2025_12,
    ),
}
