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
    514: ("token_is", ("token", None, False, "ppo_clip")),
    515: ("seq_is", ("sequence", None, False, "ppo_clip")),
    516: ("seq_is_rs", ("sequence", "seq_sum_k1", False, "ppo_clip")),
    517: ("geo_rs", (None, "seq_mean_k1", False, "ppo_clip")),
    518: ("ppo_is_bypass", ("token", None, True, "ppo_clip")),
    519: ("pure_is", ("sequence", None, True, "reinforce")),
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
MODES = (False, "ppo_clip"), (True, "reinforce")
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
            f"002:{line}",
            f"{name} in both modes",
            lambda pair=pair: [parts(estimator(*pair, *mode)) == (*pair, *mode) for mode in MODES],
            [True, True],
        )
        for line, (name, pair) in enumerate(ESTIMATORS.items(), 197)
    ],
    Item("001:367", "alias geo_mis", lambda: parts(NovemberConfig.geo_mis().to_config()), METHODS[517][1]),
    Item("001:400", "product of 100 ratios of 1.01", lambda: weight_of(math.log(1.01), "sequence", 100), 1.01**100),
    Item("001:401", "geometric mean of 100 ratios of 1.01", lambda: weight_of(math.log(1.01), "geometric", 100), 1.01),
    Item("001:403", "mean deviation above 0.1 % is rejected", lambda: sequence_kept(1.001), False),
    Item(
        "001:426",
        "veto beside rejection",
        lambda: outlier(Config(rollout_token_veto_threshold=1e-4, rollout_rs="token_k3", rollout_rs_threshold=1e9)),
        [[0.0, 0.0], [1.0, 1.0]],
    ),
    Item(
        "001:502",
        "chi2 of equal policies",
        lambda: [shifted(0.0, 4, Config()).metrics(prefix="")[name] for name in ("chi2_token", "chi2_seq")],
        [0.0, 0.0],
    ),
    Item(
        "001:439",
        "bypass mode compares the current policy",
        lambda: bypass_metric("kl"),
        -(math.log(1.65) + math.log(2.8)) / 4,
    ),
    Item("001:546", "three policies", lambda: loss(TOKEN) != loss(Config.bypass_ppo_clip())),
    Item(
        "002:128",
        "the product falls with length",
        lambda: weight_of(math.log(0.99), "sequence", 1000) < weight_of(math.log(0.99), "sequence", 10),
    ),
    Item("002:126", "band 0.999_1.001", lambda: sequence_kept("0.999_1.001"), False),
    Item("002:160", "K3 estimates KL(rollout||old)", lambda: unbiased("k3"), 0.0),
    *[
        Item(
            "002:153",
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
        for line, name, bound in ((156, "seq_mean_k2", 2.0), (169, "seq_mean_k3", 2.0))
    ],
    Item("002:188", "sequence band 0.5_2.0", lambda: kept("seq_sum_k1", "0.5_2.0"), [[1, 1], [0, 0]]),
    Item("002:190", "mean k3 at most 0.01", lambda: kept("seq_mean_k3", 0.01), [[0, 0], [0, 0]]),
    Item(
        "002:178",
        "sequence weights with mean 1",
        lambda: weights(rollout_is="sequence", rollout_is_batch_normalize=True),
        [[2 / 3, 2 / 3], [4 / 3, 4 / 3]],
    ),
    *[
        Item(f"002:{line}", f"metric {name}", lambda name=name: measured(name), value)
        for line, name, value in (
            (262, "kl", -math.log(4) / 4),
            (264, "k3_kl", (7.5 - math.log(4)) / 4 - 1),
            (267, "training_ppl", math.exp(3) * 0.75),
            (269, "rollout_ppl", math.exp(3)),
            (271, "ppl_ratio", 0.75),
            (275, "chi2_token", 21.25 / 4 - 1),
            (277, "chi2_seq", 7.5),
        )
    ],
    Item("002:252", "naive PPO ignores the rollout policy", lambda: loss(None) == loss(None, rollout=ROLLOUT - 1)),
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
        "003:114",
        "keep sampling mask",
        lambda: refused("rollout.sampling.logprobs=processed", "rollout.sampling.top_p=0.9", "actor.sampling=replay"),
        False,
    ),
    Item(
        "003:356",
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
        "003:421",
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
        "003:147",
        "product of ratios",
        lambda: weights(rollout_is="sequence", rollout_is_threshold=None),
        [[1, 1], [4, 4]],
    ),
    Item("003:153", "token weights", lambda: weights(rollout_is="token", rollout_is_threshold=3.0), [[2, 0.5], [3, 1]]),
    Item("003:163", "sequence weights are unbiased", lambda: unbiased("sequence"), 0.0),
    Item("003:165", "0.99^1000", lambda: weight_of(math.log(0.99), "sequence", 1000), 0.99**1000),
    Item("003:215", "log w = -T KL", lambda: math.log(weight_of(math.log(0.99), "sequence", 50)), 50 * math.log(0.99)),
    Item("003:235", "viable length", lambda: longest(0.02), 1000.0),
    Item(
        "003:256",
        "effective sample size",
        lambda: measured("rollout_is_eff_sample_size", rollout_is="token", rollout_is_threshold=None),
        7.5**2 / (4 * 21.25),
    ),
    Item(
        "003:377",
        "clamped weights give an effective sample size of 1",
        lambda: shifted(-30.0, 2, Config(rollout_is="sequence")).metrics(prefix="")["rollout_is_eff_sample_size"],
        1.0,
    ),
    Item(
        "003:336",
        "share below 1/C",
        lambda: measured("rollout_is_ratio_fraction_low", rollout_is="token", rollout_is_threshold=1.9),
        0.25,
    ),
    Item("003:274", "wrong or malformed answers earn 0", lambda: [reward("no answer"), reward("#### 4")], [0.0, 0.0]),
    Item("003:277", "reward of length", lambda: [reward("#### 5\n"), reward("#### 5\n" + "x" * 5)], [1.0, 1.5]),
    Item("003:279", "reward of at most 2", lambda: reward("#### 5\n" + "x" * 90), 2.0),
    Item("003:291", "Token-TIS at 2", lambda: Config.tis().is_upper, 2.0),
    Item("003:291", "Seq-TIS at 4", lambda: Config(rollout_is="sequence", rollout_is_threshold=4.0).is_upper, 4.0),
    Item("003:407", "Seq-MIS", lambda: parts(NovemberConfig.seq_is_rs().to_config()), METHODS[516][1]),
    Item("003:409", "Geo-RS rejects mean ratios of 1.01", lambda: sequence_kept(1.001), False),
    Item("003:411", "Geo-RS-Seq-TIS", lambda: weights(rollout_is="sequence", **GEO), [[1, 1], [2, 2]]),
]

PICTURES = [
    Item(
        "004:Plug-in",
        "bypass mode takes rollout log-probs",
        lambda: torch.equal(*(pictures("bypass")["batch"][name] for name in ("old_log_probs", "rollout_log_probs"))),
    ),
    Item(
        "004:Plug-in",
        "decoupled mode adds weights, 0 where rejected",
        lambda: pictures("decoupled")["weights"].tolist(),
        [[1.0, 1.0], [0.0, 0.0]],
    ),
    Item(
        "004:Plug-in",
        "decoupled mode rejects",
        lambda: pictures("decoupled")["batch"]["rollout_keep_mask"].tolist(),
        [[True, True], [False, False]],
    ),
    Item("004:Why", "weights are clipped", lambda: pictures("weighted")["weights"].tolist(), [[1.0, 1.0], [2.0, 2.0]]),
    Item(
        "004:Quickstart",
        "rollout_is in bypass mode leaves the loss",
        lambda: pictures("bypass")["loss"] == pictures("bypass without weights")["loss"],
    ),
    Item("004:Metrics", "metrics of bypass mode", lambda: pictures("bypass")["prefix"], {"actor/"}),
    Item("004:Metrics", "metrics of decoupled mode", lambda: pictures("decoupled")["prefix"], {""}),
    Item(
        "004:Metrics",
        "rejection dilutes the gradient",
        lambda: pictures("bypass", denominator="all")["gradient"] / pictures("bypass")["gradient"],
        0.5,
        "verl-omni's rule is rs_denominator=all; docs/guides/diffusion.md",
    ),
    Item(
        "004:Tuning",
        "criteria agree per step in bypass mode",
        lambda: pictures("bypass")["loss"] == pictures("bypass by token")["loss"],
    ),
    Item(
        "004:Tuning",
        "one outlier step rejects a picture of two steps",
        lambda: kept("seq_mean_k1", "0.5_1.9"),
        [[1, 1], [0, 0]],
    ),
    Item("004:Tuning", "seq_max modes", lambda: kept("seq_max_k3", 1.0), [[1, 1], [0, 0]]),
    Item(
        "004:Plug-in",
        "flow_grpo multiplies by the weights",
        lambda: pictures("weighted")["loss"] / pictures("disabled")["loss"],
        1.5,
    ),
    Item(
        "004:Plug-in",
        "grpo_guard multiplies by the weights",
        lambda: (
            pictures("weighted", loss_mode="grpo_guard")["loss"] / pictures("disabled", loss_mode="grpo_guard")["loss"]
        ),
        1.5,
    ),
    Item(
        "004:Config", "a misspelled key is named", lambda: raises(lambda: train(f"{R}rollout_iz=token"), "rollout_is")
    ),
]
