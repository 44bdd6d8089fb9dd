"""Items of the guides about metrics, weights and rejection; `tests/test_guides.py` runs them."""

import math

from guide_calls import LONG, UNEQUAL, Item, kept, longest, measured, october, outlier, padded_weight, weights

from rollcorr import RolloutCorrectionConfig as Config
from rollcorr.core.metric_registry import metric
from rollcorr.diagnostics.metric_explanation import explain_metric

# Names of the guide of October, with their lines: reported by the function, and explained.
OCTOBER = {
    274: "rollout_is_mean",
    278: "rollout_is_std",
    282: "rollout_is_min",
    287: "rollout_is_max",
    295: "rollout_is_eff_sample_size",
    303: "rollout_is_veto_fraction",
    311: "rollout_is_catastrophic_token_fraction",
    319: "rollout_is_ratio_fraction_high",
    325: "rollout_is_ratio_fraction_low",
    333: "rollout_is_seq_mean",
    336: "rollout_is_seq_std",
    338: "rollout_is_seq_min",
    340: "rollout_is_seq_max",
    342: "rollout_is_seq_max_deviation",
    346: "rollout_is_seq_fraction_high",
    348: "rollout_is_seq_fraction_low",
    352: "rollout_is_masked_fraction",
    358: "rollout_is_seq_masked_fraction",
    365: "mismatch_training_ppl",
    369: "mismatch_rollout_ppl",
    372: "mismatch_ppl_ratio",
    377: "mismatch_training_log_ppl",
    380: "mismatch_rollout_log_ppl",
    382: "mismatch_log_ppl_diff",
    387: "mismatch_log_ppl_abs_diff",
    390: "mismatch_log_ppl_diff_max",
    393: "mismatch_log_ppl_diff_min",
    395: "mismatch_kl",
    401: "mismatch_k3_kl",
}
OMNI = (
    "rollout_is_mean", "rollout_is_max", "rollout_is_min", "rollout_is_eff_sample_size", "rollout_rs_masked_fraction",
    "rollout_rs_seq_masked_fraction", "kl", "k3_kl", "log_ppl_diff", "chi2_token", "chi2_seq", "log_ppl_abs_diff",
)  # fmt: skip

METRICS = [
    *[
        Item(f"000:{line}", name, lambda name=name: math.isfinite(october(name, mode="mask")))
        for line, name in OCTOBER.items()
    ],
    *[
        Item(f"000:{line}", f"explain {name}", lambda name=name: "formula" in explain_metric(f"mismatch/{name}"))
        for line, name in OCTOBER.items()
    ],
    *[Item("004", f"metric {name}", lambda name=name: metric(f"rollout_corr/{name}").name == name) for name in OMNI],
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
    Item("000:390", "log_ppl_diff_max", lambda: october("mismatch_log_ppl_diff_max"), math.log(2)),
    Item("000:393", "log_ppl_diff_min", lambda: october("mismatch_log_ppl_diff_min"), 0.0),
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
        "seq_mean at equal lengths",
        lambda: october("rollout_is_seq_mean", "sequence") - october("rollout_is_mean", "sequence"),
        0.0,
    ),
    Item(
        "000:334",
        "seq_mean at unequal lengths",
        lambda: (
            october("rollout_is_seq_mean", "sequence", data=UNEQUAL)
            != october("rollout_is_mean", "sequence", data=UNEQUAL)
        ),
        reason="partial: a mean over sequences equals a mean over tokens only at equal lengths",
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
        "002:172",
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
        "002:185-190",
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
    Item("000:185", "truncate clamps above", lambda: weights(rollout_is="token")[1], [2.0, 1.0]),
    Item("000:190", "padding has weight 0", lambda: padded_weight(), 0.0),
    Item(
        "000:194",
        "veto takes unclamped ratios",
        lambda: outlier(Config(rollout_token_veto_threshold=1e-4)),
        [[0.0, 0.0], [1.0, 1.0]],
    ),
    Item(
        "001:421",
        "veto below every ratio",
        lambda: outlier(Config(rollout_token_veto_threshold=1e-12)),
        [[1.0, 1.0], [1.0, 1.0]],
    ),
    Item("000:210", "mask mode keeps the ratio", lambda: october("rollout_is_max", mode="mask"), 4.0),
    Item("000:295", "effective sample size", lambda: october("rollout_is_eff_sample_size"), 5.5**2 / (4 * 9.25)),
    Item("000:319", "fraction above the threshold", lambda: october("rollout_is_ratio_fraction_high"), 0.25),
    Item("000:325", "fraction below the threshold", lambda: october("rollout_is_ratio_fraction_low"), 0.0),
    Item(
        "000:342", "deviation of sequences", lambda: measured("rollout_is_seq_max_deviation", rollout_is="token"), 0.5
    ),
    Item("000:352", "masked fraction", lambda: october("rollout_is_masked_fraction", mode="mask"), 0.25),
    Item("000:358", "sequences touched", lambda: october("rollout_is_seq_masked_fraction", mode="mask"), 0.5),
    Item(
        "003:239",
        "T_max = clamp / KL",
        lambda: longest(0.01),
        2000.0,
    ),
]
