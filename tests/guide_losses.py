"""Items of the guides about losses, the stages of a weight, and code; `tests/test_guides.py` runs them."""

import math

import torch
from guide_calls import (
    LOG_PROBS,
    TOKEN,
    VETOED,
    A,
    Item,
    block,
    gradient,
    loss,
    october,
    october_arrays,
    sides,
    train,
    unbiased,
    weight_of,
)

from rollcorr import RolloutCorrectionConfig as Config
from rollcorr.integrations.verl import v2025_10

SAFE = math.exp(-20), math.exp(20)
GEO = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.6_1.9"}
LOG_PI = [-6 + math.log(1.65), -6 + math.log(2.8)]
"""log π_θ of the two sequences of `loss`: ratios π_θ / μ are 2.2 and 0.75, 2.8 and 1."""

LOSSES = [
    Item("001:128", "PPO", lambda: loss(None), -1.0),
    Item("001:212", "PPO with token weights", lambda: loss(TOKEN), -1.3),
    Item("001:252", "PPO with sequence weights", lambda: loss(Config(rollout_is="sequence")), -1.425),
    Item("001:308", "PPO against the rollout policy", lambda: loss(Config.bypass_ppo_clip()), -1.0375),
    Item(
        "001:346",
        "PPO with sequence weights and rejection",
        lambda: loss(Config(rollout_is="sequence", rollout_rs="seq_sum_k1", rollout_rs_threshold="0.5_2")),
        -1.15,
    ),
    Item("001:383", "PPO with rejection by the geometric mean", lambda: loss(Config(**GEO)), -1.15),
    Item(
        "001:161",
        "REINFORCE with sequence weights",
        lambda: loss(Config.bypass_pg_is()),
        -(1.65 * LOG_PI[0] + 2 * LOG_PI[1]) / 2,
    ),
    Item(
        "001:167",
        "gradient of REINFORCE with sequence weights",
        lambda: gradient(Config.bypass_pg_is()),
        [[-0.825, -0.825], [-1.0, -1.0]],
    ),
    Item("001:178", "weights without ceiling are unbiased", lambda: unbiased("sequence"), 0.0),
    Item("002:94", "weights carry no gradient", lambda: gradient(Config.bypass_pg_is())[0][0], -1.65 / 2),
    Item(
        "002:109",
        "REINFORCE with token weights",
        lambda: loss(Config(bypass_mode=True, loss_type="reinforce", rollout_is="token"), loss_agg_mode="token-mean"),
        -sum(w * (-3 + math.log(r)) for w, r in ((2, 2.2), (0.75, 0.75), (2, 2.8), (1, 1))) / 4,
        "the default here is the sum per sequence, as in 001:161; loss_agg_mode sets it; docs/coming_from/verl.md",
    ),
    # The sequences' geometric means are 1.28 and 1.67, outside 0.999 to 1.001: nothing is left.
    Item(
        "002:138",
        "REINFORCE with rejection by the geometric mean",
        lambda: loss(Config.bypass_pg_geo_rs()),
        0.0,
    ),
    Item("002:38", "PPO's ratio in bypass mode", lambda: loss(Config(bypass_mode=True)), -1.0375),
    Item("002:44", "decoupled PPO", lambda: loss(Config.decoupled_token_is()), -1.3),
    Item("003:18", "gradient of the rollout policy's sample without a correction", lambda: loss(None), -1.0),
]

STAGES = [
    Item("000:35", "token ratios are bounded", lambda: weight_of(25.0, "token"), SAFE[1]),
    Item("000:36", "products are bounded", lambda: weight_of(12.5, "sequence"), SAFE[1]),
    Item("000:37", "geometric means are bounded", lambda: weight_of(25.0, "geometric"), SAFE[1]),
    Item("000:181", "products are bounded below", lambda: weight_of(-12.5, "sequence"), SAFE[0]),
    Item("003:227", "clamped weight at log w = -25", lambda: weight_of(-12.5, "sequence"), SAFE[0]),
    Item("003:229", "clamped weight at log w = 25", lambda: weight_of(12.5, "sequence"), SAFE[1]),
    *[
        Item(
            f"000:{line}",
            f"thresholds at {level} level",
            lambda level=level, ends=ends: [
                Config(rollout_is=level, rollout_is_threshold=end).is_upper for end in ends
            ],
            ends,
        )
        for line, level, ends in (
            (128, "token", [1.5, 5.0]),
            (129, "sequence", [2.0, 10.0]),
            (130, "geometric", [1.0002, 1.001]),
        )
    ],
    Item(
        "000:133",
        "lower threshold is the reciprocal",
        lambda: Config(**{**GEO, "rollout_rs_threshold": 4.0}).criteria[0].lower,
        0.25,
    ),
    Item("000:168", "veto is off", lambda: Config().rollout_token_veto_threshold, None),
    Item(
        "000:171",
        "veto in both modes",
        lambda: [october_arrays(mode=mode, data=VETOED)[1] for mode in ("truncate", "mask")],
        [[[0.0] * 4] * 2] * 2,
    ),
    Item(
        "000:167",
        "veto at every level",
        lambda: [october_arrays(level=level, data=VETOED)[1] for level in ("token", "sequence", "geometric")],
        [[[0.0] * 4] * 2] * 3,
    ),
    Item(
        "000:173", "veto leaves weights", lambda: october_arrays(mode="mask", data=VETOED)[0], [[math.exp(-11)] * 4] * 2
    ),
    Item("000:185", "truncate mode", lambda: october_arrays()[0], [[2.0, 0.5], [2.0, 1.0]]),
    Item("000:186", "mask mode", lambda: october_arrays(mode="mask")[0], [[2.0, 0.5], [4.0, 1.0]]),
    Item("000:193", "outliers leave by the mask", lambda: october_arrays(mode="mask")[1], [[1.0, 1.0], [0.0, 1.0]]),
    Item(
        "000:46",
        "rejected tokens leave the denominator",
        lambda: loss(Config(rollout_rs="token_k1", rollout_rs_threshold=2.0)),
        -(1.1 + 1.2 + 1.0) / 3,
    ),
    # Insights: rejection acts with the mask mode, whatever rollout_is is.
    *[
        Item(
            f"000:{line}",
            f"rollout_is {on}, {mode}",
            lambda on=on, mode=mode: sides(
                block(f"{{rollout_is_threshold: 2.0, rollout_is: {on}, rollout_is_mode: {mode}}}")
            ),
            (on == "true", mode == "mask"),
        )
        for line, on, mode in (
            (220, "false", "mask"),
            (221, "true", "truncate"),
            (222, "true", "mask"),
            (223, "false", "truncate"),
        )
    ],
    *[
        Item(
            f"000:{line}",
            f"workflow: {text}",
            lambda text=text: sides(block(f"{{rollout_is_threshold: 2.0, {text}}}")),
            expected,
        )
        for line, text, expected in (
            (230, "rollout_is: false, rollout_is_mode: truncate", (False, False)),
            (239, "rollout_is: false, rollout_is_mode: mask", (False, True)),
            (247, "rollout_is: true, rollout_is_mode: mask", (True, True)),
            (567, "rollout_is: true, rollout_is_level: token, rollout_is_mode: truncate", (True, False)),
            (577, "rollout_is: false, rollout_is_level: token, rollout_is_mode: truncate", (False, False)),
        )
    ],
    Item(
        "000:257", "basic setup", lambda: train(f"{A}rollout_is_threshold=2.0", f"{A}rollout_is=true", LOG_PROBS), TOKEN
    ),
    Item("000:87", "compute_rollout_importance_weights", lambda: callable(v2025_10.compute_rollout_importance_weights)),
    Item("000:87", "compute_is_metrics", lambda: callable(v2025_10.compute_is_metrics)),
    Item("000:413", "three results", lambda: len(october_arrays()), 3),
    Item(
        "000:448",
        "weights of valid tokens are positive",
        lambda: torch.tensor(october_arrays(mode="mask")[0]).min().item() > 0,
    ),
    Item("000:453", "rejected tokens keep weights", lambda: october_arrays(mode="mask")[0][1][0], 4.0),
    Item("000:454", "truncated weights", lambda: max(max(row) for row in october_arrays()[0]), 2.0),
    Item(
        "000:458",
        "alerts",
        lambda: october("rollout_is_mean") > 2 or october("rollout_is_eff_sample_size") < 0.3,
        False,
    ),
    Item("000:493", "response_mask takes the rejection", lambda: sum(map(sum, october_arrays(mode="mask")[1])), 3.0),
    Item("000:105", "example scripts", reason="files of verl's repository; their options are rows of this table"),
    Item("000:88", "places in verl's code", reason="other files than verl's functions, which the adapter has"),
]
