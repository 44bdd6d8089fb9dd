"""Items of the guides about options, presets and frameworks; `tests/test_guides.py` runs them."""

from pathlib import Path
from typing import Any

from guide_calls import (
    FLAT,
    LOG_PROBS,
    PROCESSED,
    TOKEN,
    Item,
    R,
    block,
    combined,
    quiet,
    raises,
    refused,
    share_is_small,
    train,
)

from rollcorr import RolloutCorrectionConfig as Config
from rollcorr.integrations.verl.v2025_11 import RolloutCorrectionConfig as NovemberConfig
from rollcorr.train import load_config

OPTIONS = [
    Item("000:56-72", "flat options as overrides", lambda: train(*FLAT), TOKEN),
    Item("000:56-72", "flat options over a preset", lambda: train(f"{R[:-1]}=bypass_pg_is", *FLAT), TOKEN),
    Item("000:56-72", "flat options as YAML", lambda: block("{rollout_is_threshold: 2.0, rollout_is: true}"), TOKEN),
    Item("000:68-71", "calculate_log_probs as an override", lambda: train(LOG_PROBS, *FLAT), TOKEN),
    Item(
        "003:55",
        "logprobs_mode as an override",
        lambda: load_config(None, [PROCESSED]).rollout.sampling.logprobs,
        "processed",
    ),
    Item(
        "001:146-284",
        "2025-11 overrides over a preset",
        lambda: train(
            f"{R[:-1]}=decoupled_token_is",
            f"{R}rollout_is=sequence",
            f"{R}rollout_is_threshold=2.0",
            f"{R}rollout_rs=null",
            f"{R}bypass_old_logprob_for_rollout=true",
            f"{R}use_pure_rollout_correction=true",
        ),
        Config.bypass_pg_is(),
    ),
    Item(
        "002:71",
        "mixed form of verl 0.7",
        lambda: train(f"{R}rollout_rs=geometric", f"{R}rollout_rs_threshold=1.01", f"{R}bypass_mode=true"),
        Config(rollout_rs="seq_mean_k1", rollout_rs_threshold=1.01, bypass_mode=True),
    ),
    # Operation modes of October.
    Item("000:206", "disabled", lambda: block("{rollout_is_threshold: null, rollout_is: true}"), None),
    Item(
        "000:207",
        "metrics only",
        lambda: block("{rollout_is_threshold: 2.0, rollout_is: false}"),
        Config(rollout_is="token", apply_is=False),
    ),
    Item(
        "000:208",
        "rejection only",
        lambda: block("{rollout_is_threshold: 2.0, rollout_is: false, rollout_is_mode: mask}"),
        Config(
            rollout_is="token",
            rollout_is_threshold=None,
            apply_is=False,
            rollout_rs="token_k1",
            rollout_rs_threshold=2.0,
        ),
    ),
    Item(
        "000:209",
        "truncate mode",
        lambda: block("{rollout_is_threshold: 2.0, rollout_is: true, rollout_is_mode: truncate}"),
        TOKEN,
    ),
    Item(
        "000:210",
        "mask mode",
        lambda: block("{rollout_is_threshold: 2.0, rollout_is: true, rollout_is_mode: mask}"),
        Config(rollout_is="token", rollout_is_threshold=None, rollout_rs="token_k1", rollout_rs_threshold=2.0),
    ),
    Item(
        "000:587",
        "geometric mean with mask",
        lambda: block(
            "{rollout_is_threshold: 1.0002, rollout_is: true, rollout_is_threshold_lower: 0.9998, "
            "rollout_is_level: geometric, rollout_is_mode: mask}"
        ),
        Config(
            rollout_is="geometric",
            rollout_is_threshold=None,
            rollout_rs="seq_mean_k1",
            rollout_rs_threshold="0.9998_1.0002",
        ),
    ),
    Item(
        "000:597",
        "asymmetric thresholds",
        lambda: block(
            "{rollout_is_threshold: 5.0, rollout_is: true, rollout_is_threshold_lower: 0.8, rollout_is_mode: mask}"
        ),
        Config(rollout_is="token", rollout_is_threshold=None, rollout_rs="token_k1", rollout_rs_threshold="0.8_5.0"),
    ),
    Item(
        "000:619",
        "relaxed veto",
        lambda: (
            block(
                "{rollout_is_threshold: 2.0, rollout_is: true, rollout_is_veto_threshold: 1e-3}"
            ).rollout_token_veto_threshold
        ),
        1e-3,
    ),
    # Presets of November: each equals the options beside it.
    Item("001:147", "pure_is", lambda: NovemberConfig.pure_is(threshold=2.0).to_config(), Config.bypass_pg_is()),
    Item("001:198", "token_is", lambda: NovemberConfig.token_is(threshold=2.0).to_config(), TOKEN),
    Item("001:192", "token_tis", lambda: Config.token_tis(), TOKEN),
    Item("001:238", "seq_is", lambda: NovemberConfig.seq_is(threshold=2.0).to_config(), Config(rollout_is="sequence")),
    Item("001:276", "ppo_is_bypass", lambda: Config.ppo_is_bypass().weights_reach_loss, False),
    Item(
        "001:332",
        "seq_is_rs",
        lambda: NovemberConfig.seq_is_rs(is_threshold=2.0, rs_threshold=2.0, rs_threshold_lower=None).to_config(),
        Config(rollout_is="sequence", rollout_rs="seq_sum_k1", rollout_rs_threshold=2.0),
    ),
    Item(
        "001:338",
        "seq_mis",
        lambda: NovemberConfig.seq_mis(threshold=2.0).to_config(),
        Config(rollout_is="sequence", rollout_rs="seq_sum_k1", rollout_rs_threshold="0_2.0"),
    ),
    Item(
        "001:373",
        "geo_rs",
        lambda: NovemberConfig.geo_rs(rs_threshold=1.001, rs_threshold_lower=None, veto_threshold=1e-4).to_config(),
        Config(rollout_rs="seq_mean_k1", rollout_rs_threshold=1.001, rollout_token_veto_threshold=1e-4),
    ),
    Item("001:413", "veto", lambda: Config(rollout_token_veto_threshold=1e-4).rollout_token_veto_threshold, 1e-4),
]

# Presets of the newest document: name → line, level, criteria, bypass, loss.
PRESETS: dict[str, Any] = {
    "decoupled_token_is": (208, "token", None, False, "ppo_clip"),
    "decoupled_seq_is": (209, "sequence", None, False, "ppo_clip"),
    "decoupled_seq_is_rs": (210, "sequence", "seq_sum_k1", False, "ppo_clip"),
    "decoupled_geo_rs": (211, None, "seq_mean_k1", False, "ppo_clip"),
    "decoupled_geo_rs_token_tis": (212, "token", "seq_mean_k1", False, "ppo_clip"),
    "decoupled_k3_rs": (214, None, "seq_mean_k3", False, "ppo_clip"),
    "decoupled_k3_rs_token_tis": (215, "token", "seq_mean_k3", False, "ppo_clip"),
    "bypass_ppo_clip": (217, None, None, True, "ppo_clip"),
    "bypass_ppo_clip_geo_rs": (218, None, "seq_mean_k1", True, "ppo_clip"),
    "bypass_ppo_clip_k3_rs": (219, None, "seq_mean_k3", True, "ppo_clip"),
    "bypass_pg_is": (221, "sequence", None, True, "reinforce"),
    "bypass_pg_geo_rs": (222, None, "seq_mean_k1", True, "reinforce"),
    "bypass_pg_rs": (251, None, "seq_mean_k1", True, "reinforce"),
    "bypass_pg_geo_rs_token_tis": (223, "token", "seq_mean_k1", True, "reinforce"),
    "disabled": (225, None, None, False, "ppo_clip"),
}


def parts(name: str) -> tuple[Any, ...]:
    config = Config.preset(name)
    return config.rollout_is, config.rollout_rs, config.bypass_mode, config.loss_type


SAMPLING = {  # line → overrides, and whether the two log-probs differ
    48: ("", False),
    49: ("rollout.sampling.temperature=0.7", True),
    50: (PROCESSED, False),
    51: (f"{PROCESSED} rollout.sampling.temperature=0.7", False),
    97: ("actor.sampling=full", False),
    98: ("rollout.sampling.top_p=0.9 actor.sampling=full", True),
    99: (f"{PROCESSED} actor.sampling=full", False),
    100: (f"{PROCESSED} rollout.sampling.top_p=0.9 actor.sampling=full", True),
}
OMNI_OVERRIDES = (
    "recipe=flow_grpo", f"{R}bypass_mode=True", f"{R}rollout_is=sequence", f"{R}rollout_rs=seq_mean_k1",
    f"{R}rollout_rs_threshold=0.5_2.0", "actor_rollout_ref.rollout.algo.sde_window_size=2", LOG_PROBS,
)  # fmt: skip

EXAMPLES = Path(__file__).parents[1] / "examples"
ELSEWHERE = [
    *[
        Item(f"002:{line}", f"preset {name}", lambda name=name: parts(name), tuple(expected))
        for name, (line, *expected) in PRESETS.items()
    ],
    *[
        Item(f"003:{line}", f"sampling {text or 'defaults'}", lambda text=text: refused(*text.split()), differs)
        for line, (text, differs) in SAMPLING.items()
    ],
    Item(
        "003:125",
        "default sampling",
        lambda: (lambda s: (s.temperature, s.top_p, s.top_k))(load_config().rollout.sampling),
        (1.0, 1.0, -1),
    ),
    Item(
        "004:Quickstart",
        "quickstart overrides",
        lambda: quiet(lambda: train(*OMNI_OVERRIDES).weights_reach_loss),
        False,
    ),
    *[
        Item(
            "004:Tuning",
            f"band {band}",
            lambda band=band: Config(rollout_rs="seq_mean_k1", rollout_rs_threshold=band).criteria[0].upper,
            float(band.partition("_")[2]),
        )
        for band in ("0.3_3.0", "0.2_5.0")
    ],
    Item(
        "002:77",
        "reinforce requires bypass",
        lambda: raises(lambda: Config(loss_type="reinforce"), "needs bypass_mode"),
    ),
    Item(
        "004:Quickstart",
        "run_qwen_image_ocr_lora_rollout_corr.sh",
        lambda: quiet(lambda: load_config(EXAMPLES / "train" / "qwen_image_ocr.yaml").algorithm.correction.rollout_rs),
        "seq_mean_k1",
    ),
    Item("000:716-720", "share of a step: at most 3 % of compute, 1 % of memory", lambda: share_is_small()),
    *[
        Item(
            f"002:{line}",
            f"manual combination: {level} and {criterion}",
            lambda level=level, criterion=criterion: combined(level, criterion),
            (level, criterion),
        )
        for line, level, criterion in ((228, "token", "token_k1"), (236, None, "token_k1"), (243, None, "seq_sum_k1"))
    ],
]

# The items that the review left open and that this table owns; the disagreements (001:547 and below) are documented.
OPEN = (
    "flat options as overrides",
    "flat options as YAML",
    "flat options over a preset",
    "2025-11 overrides over a preset",
    "mixed form of verl 0.7",
    "calculate_log_probs as an override",
    "logprobs_mode as an override",
    "log_ppl_diff = rollout - train",
    "mismatch_log_ppl_diff_max",
    "mismatch_log_ppl_diff_min",
    "maximum of sequences, unclamped",
    "seq_mean at unequal lengths",
    "masked fraction under rollout_corr/",
    "rollout_is_mean",
    "verl-omni as host",
    "run_qwen_image_ocr_lora_rollout_corr.sh",
    "vllm-omni and SGLang-Diffusion as engines",
    "float16 rollouts",
    "DAPO example",
    "replay buffer",
    "behavior cloning",
    "filtered data",
    "bypass recommended for most users",
    "combined estimator",
    "k2 clips log rho to 20",
    "share of a step: at most 3 % of compute, 1 % of memory",
)
PARTIAL = {
    "seq_mean at unequal lengths",
    "masked fraction under rollout_corr/",
}
