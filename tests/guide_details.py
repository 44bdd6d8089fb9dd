"""Items of the guides: defaults, limits, summaries, and claims of the study; `tests/test_guides.py` runs them."""

import json
import math
import re
from pathlib import Path

import torch
from guide_calls import (
    FLAT,
    LOG_PROBS,
    MASK,
    PROCESSED,
    ROLLOUT,
    TOKEN,
    TRAIN,
    Item,
    R,
    block,
    gradient,
    loss,
    october,
    october_arrays,
    quiet,
    raises,
    shifted,
    train,
    weight_of,
    weights,
)
from guide_losses import LOG_PI, SAFE

from rollcorr import LossConfig, correct, health
from rollcorr import RolloutCorrectionConfig as Config
from rollcorr.config import SamplingSpec
from rollcorr.integrations import verl as newest
from rollcorr.integrations.verl import v2025_11
from rollcorr.integrations.verl.v2025_10 import compute_rollout_importance_weights
from rollcorr.train import load_config

ROOT = Path(__file__).parents[1]
BEYOND_BOUND = ROLLOUT + torch.tensor([[25.0, 0.0], [-25.0, 0.0]]), ROLLOUT, MASK


def veto_keeps(threshold: float, ratio: float) -> bool:
    """Whether a token of this ratio passes the veto."""
    config = Config(rollout_token_veto_threshold=threshold)
    return bool(shifted(math.log(ratio), 1, config).loss_mask.any())


def by_keyword() -> int:
    """The number of results of October's function, called with its keywords."""
    return len(
        compute_rollout_importance_weights(
            old_log_prob=TRAIN,
            rollout_log_prob=ROLLOUT,
            response_mask=MASK,
            rollout_is_level="token",
            rollout_is_mode="mask",
            rollout_is_threshold=2.0,
            rollout_is_threshold_lower=0.5,
            rollout_is_veto_threshold=1e-4,
        )
    )


def policies(config: Config | None) -> int:
    """The number of policies whose log-probs change the loss."""
    start = loss(config)
    return 1 + (loss(config, rollout=ROLLOUT - 0.1) != start) + (loss(config, old=TRAIN - 0.1) != start)


def effect(**options: object) -> list[list[float]]:
    """Weights of the two sequences (1 without weights), then the mask."""
    output = correct(TRAIN, ROLLOUT, MASK, Config(**options))
    applied = torch.ones(2, 2) if output.weights is None else output.weights
    return [*applied.tolist(), *output.loss_mask.double().tolist()]


def verdict(number: int) -> str:
    """The verdict of the study on a claim, from its page."""
    page = (ROOT / "experiments" / "mismatch_in_practice" / "claims.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+) \| \d+ \| (.+) \|$", page, flags=re.MULTILINE)
    (found,) = [text for text, numbers in rows if str(number) in numbers.split(", ")]
    return found


def without_and_with() -> list[bool]:
    """For each seed of the demo: whether accuracy falls without a correction, and rises with one."""
    runs = json.loads((ROOT / "docs" / "figures" / "demo_curves.json").read_text(encoding="utf-8"))
    return [
        run["uncorrected"][-1][1] < run["uncorrected"][0][1] and run["corrected"][-1][1] > run["corrected"][0][1]
        for run in runs
    ]


def studied(*overrides: str) -> object:
    """The options of a run with some of the study's settings."""
    return load_config(None, list(overrides))


def sampled(*overrides: str) -> tuple[float, float, int]:
    """Temperature, top-p and top-k of a run."""
    sampling = studied(*overrides).rollout.sampling
    return sampling.temperature, sampling.top_p, sampling.top_k


# Verdict of the study → claims that no other row holds; claims.md numbers them.
VERDICTS = {
    "repeats": (3, 9, 11, 12, 17, 19, 22, 27, 30, 39, 43, 46, 50, 53, 55, 59, 60, 65, 67, 70),
    "repeats in part": (
        *(1, 4, 13, 18, 21, 23, 26, 28, 29, 31, 34, 35, 37, 38, 40, 41, 42, 47, 48, 49, 51, 54, 57, 61, 64, 66, 69),
    ),
    "does not repeat": (15, 52, 71),
    "not seen": (2, 44),
    "undecided": (10, 20, 56),
    "cannot be tested here": (5, 6, 14, 45, 58, 62, 63, 68),
}
OPEN_VERDICTS = {"not seen", "undecided", "cannot be tested here"}


REJECTED = "rollout_rs_seq_masked_fraction"


def pictures_judged(name: str, value: float) -> set[tuple[str, str]]:
    """Findings, with their limits, of six training steps on pictures with this value of a metric."""
    config = Config(rollout_is="sequence", rollout_rs="seq_mean_k1", rollout_rs_threshold="0.5_2.0")
    report = health([{"token_count": 400.0, name: value}] * 6, config, diffusion=True)
    return {(finding.code, finding.limit) for finding in report.findings}


HEALTH = {  # line → metric, a value beyond its limit
    513: ("rollout_is_mean", 3.0),
    518: ("rollout_is_eff_sample_size", 0.2),
    523: ("rollout_is_veto_fraction", 0.2),
    528: ("rollout_is_std", 1.2),
    533: ("mismatch_kl", 0.2),
}
FUNCTIONS = [
    *[
        (f"001:{line}", v2025_11, name)
        for line, name in (
            (135, "compute_policy_loss"),
            (184, "compute_policy_loss_with_rollout_correction"),
            (227, "compute_rollout_correction_weights"),
            (363, "compute_rollout_rejection_mask"),
            (506, "compute_offpolicy_metrics"),
        )
    ],
    *[
        (f"002:{line}", newest, name)
        for line, name in (
            (101, "compute_policy_loss_bypass_mode"),
            (101, "compute_policy_loss_reinforce"),
            (112, "compute_rollout_correction_weights"),
            (193, "compute_rollout_rejection_mask"),
            (258, "compute_policy_loss"),
            (279, "compute_offpolicy_metrics"),
        )
    ],
    ("004:Plug-in", newest, "compute_rollout_correction_and_rejection_mask"),
]
# The newest document's option lines: line → name=value …, and the options that they set.
LINES = {
    63: ("bypass_mode=false", {}),
    68: ("bypass_mode=true", {"bypass_mode": True}),
    72: ("bypass_mode=true loss_type=ppo_clip", {"bypass_mode": True}),
    105: (
        "rollout_is=token rollout_rs=token_k1 rollout_rs_threshold=0.5_2.0",
        {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"},
    ),
    114: (
        "rollout_is=sequence rollout_rs=seq_sum_k1 rollout_rs_threshold=0.5_2.0",
        {"rollout_is": "sequence", "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
    ),
    123: (
        "rollout_is=null rollout_rs=seq_mean_k1 rollout_rs_threshold=0.999_1.001",
        {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"},
    ),
    149: (
        "rollout_is=null rollout_rs=token_k2 rollout_rs_threshold=2.0",
        {"rollout_rs": "token_k2", "rollout_rs_threshold": 2.0},
    ),
    162: (
        "rollout_is=null rollout_rs=seq_mean_k3 rollout_rs_threshold=0.01",
        {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01},
    ),
    172: (
        "rollout_is=token rollout_is_batch_normalize=True",
        {"rollout_is": "token", "rollout_is_batch_normalize": True},
    ),
}
# Its summary of methods: line → preset, and whether PPO clips, weights reach the loss, something is rejected.
SUMMARY = {
    286: ("bypass_ppo_clip", (True, False, False)),
    287: ("bypass_ppo_clip_geo_rs", (True, False, True)),
    289: ("bypass_pg_is", (False, True, False)),
    290: ("bypass_pg_geo_rs", (False, False, True)),
    291: ("bypass_pg_geo_rs_token_tis", (False, True, True)),
    293: ("decoupled_token_is", (True, True, False)),
    294: ("decoupled_seq_is", (True, True, False)),
    295: ("decoupled_seq_is_rs", (True, True, True)),
    296: ("decoupled_geo_rs", (True, False, True)),
    297: ("decoupled_geo_rs_token_tis", (True, True, True)),
}
# Its estimators: line → name, options, and the effect on two sequences.
BOTH, FIRST = [[1, 1], [1, 1]], [[1, 1], [0, 0]]
GEO, K3 = (
    {"rollout_rs": name, "rollout_rs_threshold": bound}
    for name, bound in (("seq_mean_k1", "0.6_1.9"), ("seq_mean_k3", 0.3))
)
ESTIMATORS = {
    305: ("Token-TIS", {"rollout_is": "token"}, [[2, 0.5], [2, 1], *BOTH]),
    306: ("Seq-TIS", {"rollout_is": "sequence"}, [[1, 1], [2, 2], *BOTH]),
    307: (
        "Seq-MIS",
        {"rollout_is": "sequence", "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
        [[1, 1], [2, 2], *FIRST],
    ),
    308: ("Geo-RS", GEO, [*BOTH, *FIRST]),
    309: ("Geo-RS-Token-TIS", {"rollout_is": "token", **GEO}, [[2, 0.5], [2, 1], *FIRST]),
    310: ("K3-RS", K3, [*BOTH, *FIRST]),
    311: ("K3-RS-Token-TIS", {"rollout_is": "token", **K3}, [[2, 0.5], [2, 1], *FIRST]),
}

DETAILS = [
    # October.
    Item(
        "000:79",
        "more than 30 metrics",
        lambda: len(correct(TRAIN, ROLLOUT, MASK, TOKEN).metrics()) > 30,
    ),
    Item("000:80", "products of 2,000 ratios stay finite", lambda: weight_of(1.0, "sequence", 2000), SAFE[1]),
    Item("000:121", "rollout_is is false by default", lambda: block("{rollout_is_threshold: 2.0}").apply_is, False),
    Item("000:141", "sequence level", lambda: october_arrays(level="sequence", mode="mask")[0], [[1, 1], [4, 4]]),
    Item("000:155", "truncation keeps small weights", lambda: weight_of(-25.0, "token"), SAFE[0]),
    Item(
        "000:169",
        "veto at 1e-4 and 1e-6",
        lambda: [veto_keeps(bound, bound * near) for bound in (1e-4, 1e-6) for near in (0.99, 1.01)],
        [False, True, False, True],
    ),
    Item(
        "000:225",
        "veto needs rollout_is_threshold",
        lambda: block("{rollout_is_threshold: null, rollout_is_veto_threshold: 1.0e-4}"),
        None,
    ),
    Item("000:270", "prefix mismatch/", lambda: {name.partition("/")[0] for name in october_arrays()[2]}, {"mismatch"}),
    Item("000:285", "minimum of bounded tokens", lambda: october("rollout_is_min", data=BEYOND_BOUND), SAFE[0]),
    Item(
        "000:290",
        "maximum of bounded tokens",
        lambda: october("rollout_is_max", mode="mask", data=BEYOND_BOUND),
        SAFE[1],
    ),
    Item("000:307", "veto fraction", lambda: october("rollout_is_veto_fraction", data=BEYOND_BOUND), 0.5),
    Item(
        "000:312",
        "catastrophic tokens before the veto",
        lambda: october("rollout_is_catastrophic_token_fraction", data=BEYOND_BOUND),
        0.25,
    ),
    Item(
        "000:361",
        "sequences leave whole",
        lambda: [
            october(f"rollout_is_{name}", "sequence", "mask") for name in ("masked_fraction", "seq_masked_fraction")
        ],
        [0.5, 0.5],
    ),
    Item("000:415", "call by keyword", by_keyword, 3),
    *[
        Item(
            f"000:{line}",
            f"alert of {name}",
            lambda name=name, value=value: {finding.metric for finding in health({f"mismatch/{name}": value}).findings},
            {name.removeprefix("mismatch_")},
        )
        for line, (name, value) in HEALTH.items()
    ],
    Item("000:541", "no alert for healthy metrics", lambda: health({"mismatch/rollout_is_mean": 1.0}).findings, ()),
    Item(
        "000:611",
        "geometric level has less variance",
        lambda: [october("rollout_is_std", level, "mask") for level in ("sequence", "geometric")],
        [1.5, 0.5],
    ),
    Item(
        "000:627",
        "calculate_log_probs=false is refused",
        lambda: raises(lambda: train(*FLAT, LOG_PROBS.replace("true", "false")), "calculate_log_probs=true"),
    ),
    Item(
        "000:693",
        "names of the plot",
        lambda: (
            {f"rollout_is_{name}" for name in ("mean", "eff_sample_size", "veto_fraction")}
            | {f"mismatch_{name}" for name in ("kl", "k3_kl", "ppl_ratio")}
            <= {name.partition("/")[2] for name in october_arrays()[2]}
        ),
    ),
    Item("000:720", "training is more stable", without_and_with, [True, True, True]),
    # November.
    Item("001:13", "policy mismatch", lambda: studied("rollout.dtype=bfloat16").rollout.dtype, "bfloat16"),
    Item("001:14", "temporal lag", lambda: studied("rollout.refresh_every=4").rollout.refresh_every, 4),
    Item("001:117", "clip range 0.2", lambda: [LossConfig().clip_ratio_low, LossConfig().clip_ratio_high], [0.2, 0.2]),
    *[
        Item(place, name, lambda module=module, name=name: callable(getattr(module, name)))
        for place, module, name in FUNCTIONS
    ],
    Item(
        "001:179",
        "no PPO clipping",
        lambda: (
            loss(Config.bypass_pg_is(), clip_ratio_low=0.01, clip_ratio_high=0.01) - loss(Config.bypass_pg_is()),
            loss(TOKEN, clip_ratio_low=0.01, clip_ratio_high=0.01) == loss(TOKEN),
        ),
        (0.0, False),
    ),
    Item(
        "001:294",
        "weights of bypass mode are 1",
        lambda: loss(Config.ppo_is_bypass()) - loss(Config.bypass_ppo_clip()),
        0.0,
    ),
    Item("001:427", "usual vetoes", lambda: [veto_keeps(bound, 2e-4) for bound in (1e-4, 1e-6)], [True, True]),
    Item(
        "001:481",
        "a less confident trainer has a ratio above 1",
        lambda: shifted(-0.1, 4, Config()).metrics(prefix="")["ppl_ratio"],
        math.exp(0.1),
    ),
    *[
        Item(f"001:{line}", f"policies of {name}", lambda config=config: policies(config), count)
        for line, name, config, count in (
            (540, "token_is", TOKEN, 3),
            (541, "ppo_is_bypass", Config.ppo_is_bypass(), 2),
            (542, "pure_is", Config.pure_is(), 2),
            (543, "standard PPO", None, 2),
        )
    ],
    # The newest document.
    *[
        Item(
            f"002:{line}",
            f"lines {text}",
            lambda text=text: train(*(f"{R}{option}" for option in text.split())),
            Config(**options),
        )
        for line, (text, options) in LINES.items()
    ],
    Item(
        "002:79",
        "REINFORCE with sequence weights",
        lambda: loss(Config.bypass_pg_is()),
        -(1.65 * LOG_PI[0] + 2 * LOG_PI[1]) / 2,
    ),
    Item("002:82", "its gradient", lambda: gradient(Config.bypass_pg_is()), [[-0.825, -0.825], [-1.0, -1.0]]),
    Item("002:103", "token weights", lambda: weights(rollout_is="token"), [[2, 0.5], [2, 1]]),
    Item("002:112", "sequence weights", lambda: weights(rollout_is="sequence"), [[1, 1], [2, 2]]),
    Item(
        "002:134",
        "one score for both lengths",
        lambda: [weight_of(math.log(1.1), "geometric", tokens) for tokens in (10, 100)],
        [1.1, 1.1],
    ),
    Item(
        "002:135",
        "100 log-ratios of 0.01",
        lambda: [weight_of(0.01, level, 100) for level in ("sequence", "geometric")],
        [math.e, math.exp(0.01)],
    ),
    *[
        Item(
            f"002:{line}",
            f"summary of {name}",
            lambda name=name: (
                Config.preset(name).loss_type == "ppo_clip",
                Config.preset(name).weights_reach_loss,
                bool(Config.preset(name).criteria),
            ),
            expected,
        )
        for line, (name, expected) in SUMMARY.items()
    ],
    *[
        Item(
            f"002:{line}",
            f"bypass mode with {loss_type}",
            lambda loss_type=loss_type: quiet(
                lambda: Config(rollout_is="sequence", bypass_mode=True, loss_type=loss_type).weights_reach_loss
            ),
            expected,
        )
        for line, loss_type, expected in ((283, "ppo_clip", False), (284, "reinforce", True))
    ],
    *[
        Item(f"002:{line}", f"effect of {name}", lambda options=options: effect(**options), expected)
        for line, (name, options, expected) in ESTIMATORS.items()
    ],
    # The study.
    Item(
        "003:37",
        "the actor divides by the temperature",
        lambda: SamplingSpec(temperature=0.7, logprobs="processed").for_actor("full").temperature,
        0.7,
    ),
    Item("003:42", "raw log-probs by default", lambda: SamplingSpec().logprobs, "raw"),
    Item(
        "003:175",
        "truncated product",
        lambda: weights(rollout_is="sequence", rollout_is_threshold=3.0),
        [[1, 1], [3, 3]],
    ),
    Item(
        "003:225",
        "another clamp",
        lambda: (
            shifted(15.0, 1, Config(rollout_is="token", rollout_is_threshold=None, safety_bound=10.0))
            .weights[0, 0]
            .item()
        ),
        math.exp(10),
    ),
    Item("003:266", "GRPO", lambda: studied("algorithm.adv_estimator=grpo").algorithm.advantage, "grpo"),
    Item("003:267", "learning rate", lambda: studied("actor_rollout_ref.actor.optim.lr=1e-6").optim.lr, 1e-6),
    Item("003:267", "batch size", lambda: studied("data.train_batch_size=32").rollout.prompts_per_step, 32),
    Item("003:268", "group size", lambda: studied("actor_rollout_ref.rollout.n=8").rollout.group_size, 8),
    Item("003:268", "response length", lambda: studied("data.max_response_length=64").rollout.max_new_tokens, 64),
    Item(
        "003:268",
        "no KL term",
        lambda: studied("actor_rollout_ref.actor.kl_loss_coef=0").algorithm.loss.kl_coef,
        0.0,
    ),
    Item("003:269", "no batch normalization", lambda: Config().rollout_is_batch_normalize, False),
    Item("003:293", "temperature 0.4", lambda: sampled(PROCESSED, "rollout.sampling.temperature=0.4"), (0.4, 1.0, -1)),
    Item(
        "003:294",
        "Qwen3's sampling",
        lambda: sampled(
            PROCESSED, *(f"rollout.sampling.{text}" for text in ("temperature=0.7", "top_p=0.8", "top_k=20"))
        ),
        (0.7, 0.8, 20),
    ),
    Item(
        "003:400",
        "lower bound on weights",
        lambda: weights(rollout_is="token", rollout_is_floor=0.75),
        [[2, 0.75], [2, 1]],
    ),
    *[
        Item(
            f"003:claim {number}",
            f"claim {number} {text}",
            lambda number=number: verdict(number),
            text,
            f"{text}: claims.md gives the reason" if text in OPEN_VERDICTS else "",
        )
        for text, numbers in VERDICTS.items()
        for number in numbers
    ],
    # Pictures.
    Item(
        "004:Hyperparameters",
        "defaults",
        lambda: (Config().rollout_is_threshold, Config().loss_type),
        (2.0, "ppo_clip"),
    ),
    Item(
        "004:Metrics",
        "sign of log_ppl_diff",
        lambda: correct(TRAIN, ROLLOUT, MASK, Config()).metrics(prefix="")["log_ppl_diff"],
        -math.log(2) / 2,
        "train - rollout, as in verl's code; docs/coming_from/verl.md",
    ),
    *[
        Item(
            f"004:{section}",
            f"{name} of {value}",
            lambda name=name, value=value: pictures_judged(name, value),
            {(code, limit)} if code else set(),
            reason,
        )
        for section, name, value, code, limit, reason in (
            ("Metrics", REJECTED, 0.07, "sustained_rejection", "not above 0.05 for 5 consecutive steps", ""),
            ("Metrics", REJECTED, 0.12, "sustained_rejection", "not above 0.1 for 5 consecutive steps", ""),
            ("Tuning", "rollout_is_max", 2.0, "pinned_at_threshold", "below 2 in most of the first 50 steps", ""),
            (
                "Tuning",
                "log_ppl_abs_diff",
                1.2,
                "",
                "",
                "not judged in pictures, where it grows with the latent: a null is",
            ),
        )
    ],
]
