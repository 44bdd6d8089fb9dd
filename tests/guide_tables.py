"""Items of the guides about methods, the study of sampling, and pictures; `tests/test_guides.py` runs them."""

import math

import torch
from guide_calls import (
    ROLLOUT,
    TOKEN,
    Item,
    R,
    bypass_metric,
    kept,
    longest,
    loss,
    measured,
    outlier,
    parts,
    pictures,
    raises,
    refused,
    reward,
    sequence_kept,
    shifted,
    train,
    unbiased,
    weight_of,
    weights,
)

from rollcorr import RolloutCorrectionConfig as Config
from rollcorr.integrations.verl.v2025_11 import RolloutCorrectionConfig as NovemberConfig

GEO = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.6_1.9"}


def estimator(level: str | None, criterion: str | None, bypass: bool, loss_type: str) -> Config:
    """A configuration of the newest document's table."""
    bound = {None: None, "seq_mean_k3": 0.01}.get(criterion, "0.5_2.0")
    return Config(
        rollout_is=level, rollout_rs=criterion, rollout_rs_threshold=bound, bypass_mode=bypass, loss_type=loss_type
    )


# November: method → weights, rejection, bypass mode, loss.
METHODS = {
    508: ("token_is", ("token", None, False, "ppo_clip")),
    509: ("seq_is", ("sequence", None, False, "ppo_clip")),
    510: ("seq_is_rs", ("sequence", "seq_sum_k1", False, "ppo_clip")),
    511: ("geo_rs", (None, "seq_mean_k1", False, "ppo_clip")),
    512: ("ppo_is_bypass", ("token", None, True, "ppo_clip")),
    513: ("pure_is", ("sequence", None, True, "reinforce")),
}
EXPLICIT = {
    149: (
        "pure_is",
        {"rollout_is": "sequence", "bypass_old_logprob_for_rollout": True, "use_pure_rollout_correction": True},
    ),
    200: ("token_is", {"rollout_is": "token"}),
    240: ("seq_is", {"rollout_is": "sequence"}),
    278: ("ppo_is_bypass", {"rollout_is": "token", "bypass_old_logprob_for_rollout": True}),
}
# The newest document: estimator → options; each runs in both modes.
ESTIMATORS = {
    "Token-TIS": ("token", None),
    "Seq-TIS": ("sequence", None),
    "Seq-MIS": ("sequence", "seq_sum_k1"),
    "Geo-RS": (None, "seq_mean_k1"),
    "Geo-RS-Token-TIS": ("token", "seq_mean_k1"),
    "K3-RS": (None, "seq_mean_k3"),
    "K3-RS-Token-TIS": ("token", "seq_mean_k3"),
}
TABLES = [
    *[
        Item(
            f"001:{line}",
            f"method {name}",
            lambda name=name: parts(getattr(NovemberConfig, name)().to_config()),
            expected,
        )
        for line, (name, expected) in METHODS.items()
    ],
    *[
        Item(
            f"001:{line}",
            f"{name} by its options",
            lambda name=name, options=options: (
                NovemberConfig(rollout_is_threshold=2.0, rollout_rs=None, **options)
                == getattr(NovemberConfig, name)(threshold=2.0)
            ),
            True,
        )
        for line, (name, options) in EXPLICIT.items()
    ],
    *[
        Item(
            "002:198",
            f"{name}, {loss_type}",
            lambda pair=pair, bypass=bypass, loss_type=loss_type: parts(estimator(*pair, bypass, loss_type)),
            (*pair, bypass, loss_type),
        )
        for name, pair in ESTIMATORS.items()
        for bypass, loss_type in ((False, "ppo_clip"), (True, "reinforce"))
    ],
    Item("001:366", "alias geo_mis", lambda: parts(NovemberConfig.geo_mis().to_config()), METHODS[511][1]),
    Item("001:404", "product of 100 ratios of 1.01", lambda: weight_of(math.log(1.01), "sequence", 100), 1.01**100),
    Item("001:405", "geometric mean of 100 ratios of 1.01", lambda: weight_of(math.log(1.01), "geometric", 100), 1.01),
    Item("001:408", "mean deviation above 0.1 % is rejected", lambda: sequence_kept(1.001), False),
    Item(
        "001:420",
        "veto beside rejection",
        lambda: outlier(Config(rollout_token_veto_threshold=1e-4, rollout_rs="token_k3", rollout_rs_threshold=1e9)),
        [[0.0, 0.0], [1.0, 1.0]],
    ),
    Item("001:501", "chi2 of equal policies", lambda: shifted(0.0, 4, Config()).metrics(prefix="")["chi2_token"], 0.0),
    Item(
        "001:501",
        "chi2 of equal policies, sequences",
        lambda: shifted(0.0, 4, Config()).metrics(prefix="")["chi2_seq"],
        0.0,
    ),
    Item(
        "001:440",
        "bypass mode compares the current policy",
        lambda: bypass_metric("kl"),
        -(math.log(1.65) + math.log(2.8)) / 4,
    ),
    Item("001:546", "three policies", lambda: loss(TOKEN) != loss(Config.bypass_ppo_clip())),
    Item(
        "002:126",
        "the product falls with length",
        lambda: weight_of(math.log(0.99), "sequence", 1000) < weight_of(math.log(0.99), "sequence", 10),
    ),
    Item("002:133", "band 0.999_1.001", lambda: sequence_kept("0.999_1.001"), False),
    Item("002:157", "K3 estimates KL(rollout||old)", lambda: unbiased("k3"), 0.0),
    *[
        Item(
            "002:152",
            f"threshold of {name}",
            lambda name=name, bound=bound: Config(rollout_rs=name, rollout_rs_threshold=bound).criteria[0].upper,
            bound,
        )
        for name, bound in (("token_k2", 2.0), ("seq_mean_k2", 2.5), ("seq_sum_k2", 4.0), ("seq_max_k2", 2.0))
    ],
    *[
        Item(
            f"002:{line}",
            f"{name} with token weights",
            lambda name=name, bound=bound: weights(rollout_is="token", rollout_rs=name, rollout_rs_threshold=bound),
            [[2, 0.5], [2, 1]],
        )
        for line, name, bound in ((155, "seq_mean_k2", 2.0), (168, "seq_mean_k3", 2.0))
    ],
    Item("002:188", "sequence band 0.5_2.0", lambda: kept("seq_sum_k1", "0.5_2.0"), [[1, 1], [0, 0]]),
    Item("002:190", "mean k3 at most 0.01", lambda: kept("seq_mean_k3", 0.01), [[0, 0], [0, 0]]),
    Item(
        "002:176",
        "sequence weights with mean 1",
        lambda: weights(rollout_is="sequence", rollout_is_batch_normalize=True),
        [[2 / 3, 2 / 3], [4 / 3, 4 / 3]],
    ),
    *[
        Item(f"002:{line}", f"metric {name}", lambda name=name: measured(name), value)
        for line, name, value in (
            (259, "kl", -math.log(4) / 4),
            (261, "k3_kl", (7.5 - math.log(4)) / 4 - 1),
            (265, "rollout_ppl", math.exp(3)),
            (273, "chi2_token", 21.25 / 4 - 1),
            (275, "chi2_seq", 7.5),
        )
    ],
    Item("002:250", "naive PPO ignores the rollout policy", lambda: loss(None) == loss(None, rollout=ROLLOUT - 1)),
]

PRAXIS = [
    Item(
        "003:112",
        "the actor truncates like the sampler",
        lambda: refused(
            "rollout.sampling.logprobs=processed", "rollout.sampling.top_p=0.9", "actor.sampling=recompute"
        ),
        False,
    ),
    Item(
        "003:116",
        "keep sampling mask",
        lambda: refused("rollout.sampling.logprobs=processed", "rollout.sampling.top_p=0.9", "actor.sampling=replay"),
        False,
    ),
    Item(
        "003:369",
        "Qwen3's sampling without a mask",
        lambda: refused(
            "rollout.sampling.logprobs=processed",
            "rollout.sampling.temperature=0.7",
            "rollout.sampling.top_p=0.8",
            "rollout.sampling.top_k=20",
            "actor.sampling=full",
        ),
    ),
    Item(
        "003:369",
        "Qwen3's sampling with the mask",
        lambda: refused(
            "rollout.sampling.logprobs=processed",
            "rollout.sampling.temperature=0.7",
            "rollout.sampling.top_p=0.8",
            "rollout.sampling.top_k=20",
        ),
        False,
    ),
    Item(
        "003:146",
        "product of ratios",
        lambda: weights(rollout_is="sequence", rollout_is_threshold=None),
        [[1, 1], [4, 4]],
    ),
    Item("003:152", "token weights", lambda: weights(rollout_is="token", rollout_is_threshold=3.0), [[2, 0.5], [3, 1]]),
    Item("003:162", "sequence weights are unbiased", lambda: unbiased("sequence"), 0.0),
    Item("003:164", "0.99^1000", lambda: weight_of(math.log(0.99), "sequence", 1000), 0.99**1000),
    Item("003:205", "log w = -T KL", lambda: math.log(weight_of(math.log(0.99), "sequence", 50)), 50 * math.log(0.99)),
    Item("003:229", "viable length", lambda: longest(0.02), 1000.0),
    Item(
        "003:259",
        "effective sample size",
        lambda: measured("rollout_is_eff_sample_size", rollout_is="token", rollout_is_threshold=None),
        7.5**2 / (4 * 21.25),
    ),
    Item(
        "003:391",
        "clamped weights give an effective sample size of 1",
        lambda: shifted(-30.0, 2, Config(rollout_is="sequence")).metrics(prefix="")["rollout_is_eff_sample_size"],
        1.0,
    ),
    Item(
        "003:335",
        "share below 1/C",
        lambda: measured("rollout_is_ratio_fraction_low", rollout_is="token", rollout_is_threshold=1.9),
        0.25,
    ),
    *[
        Item(f"003:{line}", f"reward of {text!r}", lambda text=text: reward(text), value)
        for line, text, value in (
            (274, "no answer", 0.0),
            (274, "#### 4", 0.0),
            (276, "#### 5\n", 1.0),
            (276, "#### 5\n" + "x" * 5, 1.5),
            (278, "#### 5\n" + "x" * 90, 2.0),
        )
    ],
    Item("003:292", "Token-TIS at 2", lambda: Config.tis().is_upper, 2.0),
    Item("003:293", "Seq-TIS at 4", lambda: Config(rollout_is="sequence", rollout_is_threshold=4.0).is_upper, 4.0),
    Item("003:422", "Seq-MIS", lambda: parts(NovemberConfig.seq_is_rs().to_config()), METHODS[510][1]),
    Item("003:424", "Geo-RS rejects mean ratios of 1.01", lambda: sequence_kept(1.001), False),
    Item("003:426", "Geo-RS-Seq-TIS", lambda: weights(rollout_is="sequence", **GEO), [[1, 1], [2, 2]]),
]

PICTURES = [
    Item(
        "004",
        "bypass mode takes rollout log-probs",
        lambda: torch.equal(*(pictures("bypass")["batch"][name] for name in ("old_log_probs", "rollout_log_probs"))),
    ),
    Item(
        "004",
        "decoupled mode adds weights, 0 where rejected",
        lambda: pictures("decoupled")["weights"].tolist(),
        [[1.0, 1.0], [0.0, 0.0]],
    ),
    Item(
        "004",
        "decoupled mode rejects",
        lambda: pictures("decoupled")["batch"]["rollout_keep_mask"].tolist(),
        [[True, True], [False, False]],
    ),
    Item("004", "weights are clipped", lambda: pictures("weighted")["weights"].tolist(), [[1.0, 1.0], [2.0, 2.0]]),
    Item(
        "004",
        "rollout_is in bypass mode leaves the loss",
        lambda: pictures("bypass")["loss"] == pictures("bypass without weights")["loss"],
    ),
    Item("004", "metrics of bypass mode", lambda: pictures("bypass")["prefix"], {"actor/"}),
    Item("004", "metrics of decoupled mode", lambda: pictures("decoupled")["prefix"], {""}),
    Item(
        "004",
        "rejection dilutes the gradient",
        lambda: pictures("bypass", denominator="all")["gradient"] / pictures("bypass")["gradient"],
        0.5,
        "verl-omni's rule is rs_denominator=all; the default divides by the kept steps",
    ),
    Item(
        "004",
        "criteria agree per step in bypass mode",
        lambda: pictures("bypass")["loss"] == pictures("bypass by token")["loss"],
    ),
    Item(
        "004",
        "one outlier step rejects a picture of two steps",
        lambda: kept("seq_mean_k1", "0.5_1.9"),
        [[1, 1], [0, 0]],
    ),
    Item("004", "seq_max modes", lambda: kept("seq_max_k3", 1.0), [[1, 1], [0, 0]]),
    Item(
        "004",
        "flow_grpo multiplies by the weights",
        lambda: pictures("weighted")["loss"] / pictures("disabled")["loss"],
        1.5,
    ),
    Item(
        "004",
        "grpo_guard multiplies by the weights",
        lambda: (
            pictures("weighted", loss_mode="grpo_guard")["loss"] / pictures("disabled", loss_mode="grpo_guard")["loss"]
        ),
        1.5,
    ),
    Item("004", "a misspelled key is named", lambda: raises(lambda: train(f"{R}rollout_iz=token"), "rollout_is")),
]
