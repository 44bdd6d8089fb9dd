"""Items of the guides about metrics, weights and rejection; `tests/test_guides.py` runs them."""

import math

from guide_calls import (
    LONG,
    MASK,
    ROLLOUT,
    TRAIN,
    UNEQUAL,
    Item,
    kept,
    longest,
    measured,
    october,
    outlier,
    padded_weight,
    weights,
)

from rollcorr import RolloutCorrectionConfig as Config
from rollcorr.diagnostics.metric_explanation import explain_metric

# Metrics of the guide of October, with their lines, and their values for the two sequences in mask mode.
OCTOBER = {
    274: ("rollout_is_mean", 7.5 / 4),
    278: ("rollout_is_std", math.sqrt(21.25 / 4 - 1.875**2)),
    282: ("rollout_is_min", 0.5),
    287: ("rollout_is_max", 4.0),
    295: ("rollout_is_eff_sample_size", 7.5**2 / (4 * 21.25)),
    303: ("rollout_is_veto_fraction", 0.0),
    311: ("rollout_is_catastrophic_token_fraction", 0.0),
    319: ("rollout_is_ratio_fraction_high", 0.25),
    325: ("rollout_is_ratio_fraction_low", 0.0),
    333: ("rollout_is_seq_mean", (1.25 + 2.5) / 2),
    336: ("rollout_is_seq_std", (2.5 - 1.25) / 2),
    338: ("rollout_is_seq_min", 1.25),
    340: ("rollout_is_seq_max", 2.5),
    342: ("rollout_is_seq_max_deviation", 1.5),
    346: ("rollout_is_seq_fraction_high", 0.5),
    348: ("rollout_is_seq_fraction_low", 0.0),
    352: ("rollout_is_masked_fraction", 0.25),
    358: ("rollout_is_seq_masked_fraction", 0.5),
    365: ("mismatch_training_ppl", math.exp(3) * 0.75),
    369: ("mismatch_rollout_ppl", math.exp(3)),
    372: ("mismatch_ppl_ratio", 2**-0.5),
    377: ("mismatch_training_log_ppl", 3 - math.log(2) / 2),
    380: ("mismatch_rollout_log_ppl", 3.0),
    382: ("mismatch_log_ppl_diff", math.log(2) / 2),
    387: ("mismatch_log_ppl_abs_diff", math.log(2) / 2),
    390: ("mismatch_log_ppl_diff_max", math.log(2)),
    393: ("mismatch_log_ppl_diff_min", 0.0),
    395: ("mismatch_kl", -math.log(4) / 4),
    401: ("mismatch_k3_kl", (7.5 - math.log(4)) / 4 - 1),
}
# Limits of these metrics: line → name, key of the explanation, text.
LIMITS = {
    275: ("rollout_is_mean", "healthy", "1"),
    276: ("rollout_is_mean", "a finding", "the value below 0.5 or above 2"),
    279: ("rollout_is_std", "healthy", "< 0.5"),
    280: ("rollout_is_std", "a finding", "the value above 1"),
    298: ("rollout_is_eff_sample_size", "healthy", "> 0.5"),
    299: ("rollout_is_eff_sample_size", "a finding", "the value below 0.3"),
    308: ("rollout_is_veto_fraction", "healthy", "< 0.05"),
    309: ("rollout_is_veto_fraction", "a finding", "the value above 0.1"),
    315: ("rollout_is_catastrophic_token_fraction", "a finding", "the value above 0.01"),
    323: ("rollout_is_ratio_fraction_high", "healthy", "< 0.1"),
    329: ("rollout_is_ratio_fraction_low", "healthy", "< 0.1"),
    343: ("rollout_is_seq_max_deviation", "healthy", "< 1"),
    355: ("rollout_is_masked_fraction", "healthy", "< 0.1"),
    356: ("rollout_is_masked_fraction", "a finding", "the value above 0.3"),
    374: ("mismatch_ppl_ratio", "healthy", "1"),
    397: ("mismatch_kl", "healthy", "0"),
    398: ("mismatch_kl", "a finding", "|kl| above 0.1"),
}
OMNI = (
    "rollout_is_mean", "rollout_is_max", "rollout_is_min", "rollout_is_eff_sample_size", "rollout_rs_masked_fraction",
    "rollout_rs_seq_masked_fraction", "kl", "k3_kl", "log_ppl_diff", "chi2_token", "chi2_seq", "log_ppl_abs_diff",
    "rejected_ratio",
)  # fmt: skip

METRICS = [
    *[
        Item(
            f"000:{line}",
            name,
            lambda name=name: [october(name, mode="mask"), float("formula" in explain_metric(f"mismatch/{name}"))],
            [value, 1.0],
        )
        for line, (name, value) in OCTOBER.items()
    ],
    *[
        Item(
            f"000:{line}",
            f"{name} is {limit}",
            lambda name=name, key=key: explain_metric(f"mismatch/{name}")[key],
            limit,
        )
        for line, (name, key, limit) in LIMITS.items()
    ],
    Item(
        "000:384",
        "mismatch_log_ppl_diff near 0",
        lambda: "healthy" in explain_metric("mismatch/mismatch_log_ppl_diff"),
        False,
        "explained without limits: ppl_ratio and kl, which have limits, measure the same gap",
    ),
    *[
        Item(
            "004:Metrics",
            f"metric {name}",
            lambda name=name: explain_metric(f"rollout_corr/{name}")["metric"].startswith("rollout_corr/"),
        )
        for name in OMNI
    ],
    Item(
        "000:270",
        "masked fraction under rollout_corr/",
        lambda: explain_metric("rollout_corr/rollout_is_masked_fraction")["metric"],
        "rollout_corr/rollout_rs_masked_fraction",
        "renamed: the old name is explained, and no longer logged",
    ),
    Item(
        "000:270",
        "sequence fraction under rollout_corr/",
        lambda: explain_metric("rollout_corr/rollout_is_seq_masked_fraction")["metric"],
        "rollout_corr/rollout_rs_seq_masked_fraction",
        "renamed: the old name is explained, and no longer logged",
    ),
    Item("000:383", "log_ppl_diff = rollout - train", lambda: october("mismatch_log_ppl_diff"), math.log(4) / 4),
    Item(
        "000:284",
        "minimum of sequences, unclamped",
        lambda: october("rollout_is_min", "sequence", data=(LONG[1], LONG[0], LONG[2])),
        math.exp(-36),
    ),
    Item(
        "000:289",
        "maximum of sequences, unclamped",
        lambda: october("rollout_is_max", "sequence", data=LONG),
        math.exp(36),
    ),
    Item(
        "000:334",
        "seq_mean at unequal lengths",
        lambda: [
            october("rollout_is_seq_mean", "sequence", data=data) - october("rollout_is_mean", "sequence", data=data)
            for data in ((TRAIN, ROLLOUT, MASK), UNEQUAL)
        ],
        [0.0, 1.5 - 4 / 3],
        reason="a mean over sequences equals a mean over tokens only at equal lengths",
    ),
    Item("000:373", "ppl_ratio = exp(mean log)", lambda: october("mismatch_ppl_ratio"), 2**-0.5),
    Item("000:396", "KL = mean(log mu - log pi)", lambda: october("mismatch_kl"), -math.log(4) / 4),
    Item("000:402", "K3 = mean(rho - log rho - 1)", lambda: october("mismatch_k3_kl"), (7.5 - math.log(4)) / 4 - 1),
    Item("001:448", "direct KL", lambda: measured("kl"), -math.log(4) / 4),
    Item("001:454", "K3 KL", lambda: measured("k3_kl"), (7.5 - math.log(4)) / 4 - 1),
    Item("001:464", "training perplexity", lambda: measured("training_ppl"), math.exp(3) * 0.75),
    Item("001:470", "rollout perplexity", lambda: measured("rollout_ppl"), math.exp(3)),
    Item("001:476", "perplexity ratio", lambda: measured("ppl_ratio"), 0.75),
    Item("001:490", "chi2 of tokens", lambda: measured("chi2_token"), 21.25 / 4 - 1),
    Item("001:498", "chi2 of sequences", lambda: measured("chi2_seq"), 7.5),
    Item(
        "002:182",
        "batch_norm_factor",
        lambda: measured("rollout_is_batch_norm_factor", rollout_is="token", rollout_is_batch_normalize=True),
        5.5 / 4,
    ),
]

FORMULAS = [
    Item("001:216", "token weights min(rho, C)", lambda: weights(rollout_is="token"), [[2, 0.5], [2, 1]]),
    Item("001:257", "sequence weights min(prod rho, C)", lambda: weights(rollout_is="sequence"), [[1, 1], [2, 2]]),
    Item(
        "000:145",
        "geometric weights",
        lambda: weights(rollout_is="geometric", rollout_is_threshold=None),
        [[1, 1], [2, 2]],
    ),
    Item(
        "000:429",
        "mask mode keeps weights",
        lambda: weights(rollout_is="token", rollout_is_threshold=None),
        [[2, 0.5], [4, 1]],
    ),
    Item("001:354", "band on the product", lambda: kept("seq_sum_k1", "0.5_2"), [[1, 1], [0, 0]]),
    Item("001:388", "band on the geometric mean", lambda: kept("seq_mean_k1", "0.6_1.9"), [[1, 1], [0, 0]]),
    Item("002:185", "band on token ratios", lambda: kept("token_k1", "0.6_1.6"), [[0, 0], [0, 1]]),
    Item("002:145", "k2 = log(rho)^2 / 2", lambda: kept("token_k2", 0.5), [[1, 1], [0, 1]]),
    Item("002:148", "seq_sum_k2", lambda: kept("seq_sum_k2", 0.6), [[1, 1], [0, 0]]),
    Item("002:148", "seq_max_k2", lambda: kept("seq_max_k2", 0.6), [[1, 1], [0, 0]]),
    Item("002:148", "seq_mean_k2", lambda: kept("seq_mean_k2", 0.4), [[1, 1], [0, 0]]),
    Item("002:158", "seq_mean_k3", lambda: kept("seq_mean_k3", 0.3), [[1, 1], [0, 0]]),
    Item(
        "002:146",
        "k2 clips log rho to 20",
        lambda: outlier(Config(rollout_rs="seq_sum_k2", rollout_rs_threshold=250)),
        [[0.0, 0.0], [1.0, 1.0]],
        "not clipped here: 25^2 / 2 is beyond 250, and 20^2 / 2 is not; docs/coming_from/verl.md",
    ),
    Item(
        "002:175",
        "batch normalization",
        lambda: weights(rollout_is="token", rollout_is_batch_normalize=True),
        [[2 / 1.375, 0.5 / 1.375], [2 / 1.375, 1 / 1.375]],
    ),
    Item(
        "002:142",
        "combined estimator",
        lambda: weights(rollout_is="token", rollout_rs="seq_mean_k1", rollout_rs_threshold=3.0),
        [[2, 0.5], [2, 1]],
        "weights per token, not their product; docs/coming_from/verl.md",
    ),
    Item(
        "001:547",
        "bypass recommended for most users",
        lambda: Config().bypass_mode,
        False,
        "the default is decoupled; docs/coming_from/verl.md",
    ),
    Item(
        "002:183",
        "criteria combine",
        lambda: len(Config(rollout_rs="token_k1,seq_mean_k3", rollout_rs_threshold="0.5_2.0,0.01").criteria),
        2,
    ),
    *[
        Item(
            f"003:{line}",
            f"T_max at KL {kl}",
            lambda kl=kl: longest(kl),
            20 / kl,
        )
        for line, kl in enumerate((0.0006, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05), 242)
    ],
    Item("000:189", "padding has weight 0", lambda: padded_weight(), 0.0),
    Item(
        "000:192",
        "veto takes unclamped ratios",
        lambda: outlier(Config(rollout_token_veto_threshold=1e-4)),
        [[0.0, 0.0], [1.0, 1.0]],
    ),
    Item(
        "001:419",
        "veto below every ratio",
        lambda: outlier(Config(rollout_token_veto_threshold=1e-12)),
        [[1.0, 1.0], [1.0, 1.0]],
    ),
    Item("000:296", "effective sample size", lambda: october("rollout_is_eff_sample_size"), 5.5**2 / (4 * 9.25)),
    Item(
        "003:239",
        "T_max = clamp / KL",
        lambda: longest(0.01),
        2000.0,
    ),
]
