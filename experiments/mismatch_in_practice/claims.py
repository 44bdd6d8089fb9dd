"""Every claim of the document, in its order, and who judges it."""

from __future__ import annotations

from typing import NamedTuple

import laboratory_claims as laboratory
import measured_claims as measured
import measured_weight_claims as weights
import table_claims as tables
import trained_claims as trained
from claims_verdicts import CANNOT, PARTLY, REPEATS, Evidence, Judge, Verdict

SECTIONS = {
    "1": "The mismatch problem",
    "2": "Sampling transforms and mismatch",
    "3": "Importance sampling corrections",
    "4": "The T × KL boundary",
    "5.1": "Final performance",
    "5.2": "Catastrophic variance of sequence-level IS",
    "5.3": "Output length",
    "5.4": "Qwen3's sampling configuration",
    "6": "Rejection sampling",
    "7": "Conclusion",
}


class Claim(NamedTuple):
    """What the document says, the section whose text it is, where else it stands, and its judges by source."""

    section: str
    text: str
    judges: dict[str, Judge]
    also: str = ""


def cannot(because: str) -> dict[str, Judge]:
    """No study here can test it."""
    return {"": lambda evidence: Verdict(CANNOT, "", because)}


def read(seen: str, in_part: str = "") -> dict[str, Judge]:
    """The code of the releases of that day shows it, or a part of it."""
    return {"releases": lambda evidence: Verdict(PARTLY if in_part else REPEATS, seen, in_part)}


def extreme_weights(evidence: Evidence) -> Verdict:
    """What the studies have of garbage, without a verdict."""
    seen = " ".join(
        part for part in (weights.extreme_without_garbage(evidence), laboratory.garbage_gain(evidence)) if part
    )
    return Verdict(CANNOT, seen, "it needs rollouts whose own faults are known, and the engines here have none")


CLAIMS = (
    Claim(
        "1",
        "Separate backends for rollout and training give different policies although their parameters are equal.",
        {"measured": measured.backends_differ},
        "summary, 7",
    ),
    Claim(
        "1",
        "Identical parameters can even contradict each other: one backend gives a token a probability of about 1, the "
        "other about 0.",
        {"measured": measured.contradictory},
    ),
    Claim("1", "Without correction, training becomes off-policy.", {"laboratory": laboratory.off_policy}),
    Claim(
        "1",
        "FP16 on both sides, or an inference head in FP32, reduces the mismatch at its source.",
        {"measured": measured.precision_helps},
        "summary, 7",
    ),
    Claim(
        "1",
        "Batch-invariant (deterministic) kernels reduce the mismatch at its source.",
        cannot("the engines that run on a processor have no switch for such kernels"),
        "summary, 7",
    ),
    Claim(
        "1",
        "These fixes cost infrastructure changes, speed and engineering complexity.",
        cannot("neither an FP16 training nor a deterministic kernel was built here"),
        "summary, 7",
    ),
    Claim(
        "2",
        "At temperature 1.0 without top-p and top-k there is no mismatch of sampling, with raw and with processed "
        "log-probs.",
        {"measured": measured.default_has_none},
    ),
    Claim(
        "2",
        "At any other temperature, raw log-probs are a mismatch and processed log-probs correct it.",
        {"measured": measured.raw_hides},
        "summary, 7",
    ),
    Claim(
        "2",
        "Two softmaxes over logits that differ by a fixed perturbation approach each other as τ grows: the KL goes "
        "to 0.",
        {"measured": measured.vanishes},
    ),
    Claim(
        "2",
        "Sharpening (τ < 1) amplifies discrepancies in the head by about 1/τ.",
        {"measured": measured.sharpening},
    ),
    Claim(
        "2",
        "If the backends disagree on the top token, sharpening gives ≈ 1 on one side and ≈ 0 on the other: large "
        "local KL spikes.",
        {"measured": measured.top_token},
    ),
    Claim("2", "Flattening (τ > 1) dampens the discrepancies in the head.", {"measured": measured.dampening}),
    Claim(
        "2",
        "Flattening moves mass to the tail, and disagreement there adds more to the KL.",
        {"measured": measured.tail_grows},
    ),
    Claim(
        "2",
        "A very large τ makes the KL and the χ² between rollout and trainer grow, through noise in the tail.",
        {"measured": measured.very_hot},
    ),
    Claim(
        "2",
        "Any τ other than 1 tends to increase the KL; τ ≈ 1.0 is a robust operating point.",
        {"measured": measured.any_temperature},
        "summary, 7",
    ),
    Claim(
        "2",
        "Top-p and top-k are a mismatch, and the importance ratio is biased, with raw and with processed log-probs "
        "alike.",
        {"measured": measured.cut_is_a_mismatch},
        "summary, 5.4",
    ),
    Claim(
        "2",
        "To recompute the cut from the trainer's own logits is fragile: sampled tokens fall out of it, with log π = "
        "−∞.",
        {"measured": measured.recomputed_mask},
    ),
    Claim(
        "2",
        "The simplest path has the least mismatch: temperature 1.0, top-p 1.0, top-k −1 and processed log-probs. "
        '"Removing any top-p/top-k truncation" reduces it.',
        {"measured": measured.default_is_smallest},
        "7",
    ),
    Claim(
        "2",
        "If the rollout's mask is kept and replayed (DeepSeek's Keep Sampling Mask), both policies have the same "
        "actions.",
        {"measured": measured.replay_shares_support, "trained": trained.replay_shares_support},
    ),
    Claim(
        "2",
        "Such a replay makes top-p and top-k usable in training (cited there, not run).",
        {"trained": trained.replay_helps},
        "7",
    ),
    Claim(
        "2",
        "VERL, Prime-RL, SkyRL, TRL, OAT and SLIME scale by the temperature in the actor, and none of them cuts "
        "there; vLLM reports raw log-probs by default.",
        read(
            "verl 0.6.1 (`workers/actor/dp_actor.py`) and TRL 0.25.1 (`trainer/grpo_trainer.py`), the newest releases "
            "on 2 December 2025, divide the logits by the temperature before they score; top-p and top-k reach the "
            "sampler alone.",
            in_part="VERL and TRL; the other four projects and vLLM's default were not read",
        ),
    ),
    Claim(
        "3",
        "Token-level weights ignore how the states are visited: their bias is of order T² Δ_max (Table 1).",
        {"laboratory": laboratory.order("token", "bias, of T", "bias, of Δ")},
    ),
    Claim(
        "3",
        "Truncated token weights have a variance of order T² (1 + χ̄²) (Table 1).",
        {
            "laboratory": laboratory.order(
                "token", "variance, of T", "variance, of T, where truncation is active", "variance, of 1 + χ̄²"
            )
        },
    ),
    Claim("3", "Untruncated sequence weights are unbiased (Table 1).", {"laboratory": laboratory.unbiased}),
    Claim(
        "3",
        "A drift of 1 % per token over 1,000 tokens gives a weight of about 0.00004.",
        {"arithmetic": laboratory.drift},
    ),
    Claim(
        "3",
        "The variance of sequence weights is about (1 + χ̄²)^T − 1, exponential in the length (Table 1).",
        {"measured": weights.variance_law, "laboratory": laboratory.growth},
        "4",
    ),
    Claim(
        "3",
        "χ² = 0.01 and T = 1,000 amplify the variance about 20,000 times.",
        {"arithmetic": laboratory.amplification},
    ),
    Claim(
        "3",
        "Truncated sequence weights have a bias of order T (1 + χ²) / C (Table 1).",
        {"laboratory": laboratory.order("sequence, truncated", "bias, of C", "bias, of T at fixed χ²")},
    ),
    Claim(
        "3",
        "Truncated sequence weights have a variance of order T² C² (Table 1).",
        {"laboratory": laboratory.order("sequence, truncated", "variance, of T", "variance, of C")},
    ),
    Claim("3", "C controls this trade-off of bias and variance.", {"laboratory": laboratory.ceiling}),
    Claim(
        "3",
        "With independent steps and bounded drift, truncated Seq-TIS has the better trade-off of bias and variance; "
        '"theoretically, sequence-level IS is optimal".',
        {"laboratory": laboratory.better_trade},
        "7",
    ),
    Claim(
        "4",
        "The log weight of a trajectory is −T times its own KL estimate: log w = −T × KL.",
        {"measured": weights.log_weight_is_total_kl},
    ),
    Claim(
        "4",
        "A clamp of 20 bounds weights to [exp(−20), exp(20)] ≈ [2 × 10⁻⁹, 4.85 × 10⁸].",
        {"arithmetic": laboratory.clamp_bounds},
    ),
    Claim(
        "4",
        "Where T × KL is far above 20, most trajectories share one clamped weight, and the correction disappears.",
        {"measured": weights.far_above_clamp},
        "7",
    ),
    Claim(
        "4",
        "Sequence weights are viable only where T × KL < 20; from there on they collapse.",
        {"measured": weights.collapses},
        "summary, 7",
    ),
    Claim(
        "4",
        "The table of T_max: from 33,000 tokens at a KL of 0.0006 to 400 tokens at 0.05.",
        {"arithmetic": laboratory.t_max_table},
    ),
    Claim(
        "4",
        "T_max = 20 / KL is the length at which the clamp takes over.",
        {"measured": weights.clamp_rule, "laboratory": laboratory.t_max},
    ),
    Claim(
        "4",
        '"With typical mismatch" (KL of 0.001 to 0.005) and below 10,000 tokens one is usually safe from the clamp.',
        {"arithmetic": laboratory.usually_safe, "measured": weights.safe_below},
    ),
    Claim(
        "4",
        "Sequence weights can fail before the clamp: T × KL < 20 is not sufficient.",
        {"measured": weights.before_clamp},
        "summary, 7",
    ),
    Claim(
        "5.1",
        'Token-TIS "outperforms no correction despite its bias", and "consistently improved over no-correction".',
        {"trained": trained.token_outperforms},
        "summary, 7",
    ),
    Claim(
        "5.1",
        "At temperature 1.0 Token-TIS recovers sooner from a degradation in mid-training; no correction ends "
        "comparable to it.",
        {"trained": trained.token_recovers},
        "figure 1b",
    ),
    Claim(
        "5.1",
        'Seq-TIS is "consistently the worst", in the long-horizon, high-mismatch regime: its variance costs more than '
        "its smaller bias gains. (The document's own limit of this claim is in section 7.)",
        {"trained": trained.sequence_is_worst, "laboratory": tables.worst_far_away},
        "3, 4, 5.2, 7; figure 1",
    ),
    Claim(
        "5.1",
        "At temperature 0.4 the order is the same: Token-TIS and no correction end at about 1.9 (of 2), Seq-TIS at "
        "1.4.",
        {"measured": weights.nothing_to_order, "laboratory": tables.cold_order},
        "figure 1a",
    ),
    Claim(
        "5.1",
        "Training at temperature 0.4 degrades no more than at 1.0.",
        {"measured": weights.nothing_to_order, "laboratory": tables.cold_degrades_no_more},
    ),
    Claim(
        "5.2",
        "χ²_seq of Seq-TIS routinely exceeds 10³, with spikes of 10⁵ to 10⁶: a few outliers decide.",
        {"measured": weights.chi2_exceeds, "trained": trained.chi2_exceeds, "laboratory": tables.chi2_exceeds},
        "figure 2b",
    ),
    Claim(
        "5.2",
        "The ESS of Token-TIS stays at 0.9 to 1.0.",
        {
            "measured": weights.token_ess,
            "trained": trained.metric("token_tis", "ess", "the ESS of Token-TIS is", above=0.9),
        },
        "figure 2c",
    ),
    Claim(
        "5.2",
        "The ESS of Seq-TIS is low (there 0.3 to 0.4): the effective batch is far smaller.",
        {
            "measured": weights.sequence_ess,
            "trained": trained.metric("seq_tis", "ess", "the ESS of Seq-TIS is", below=0.5),
        },
        "7; figure 2c",
    ),
    Claim(
        "5.2",
        "Under Seq-TIS most weights (there 80 to 90 %) are below 1/C: truncation leaves low weights free, and a few "
        "sequences carry the update.",
        {"measured": weights.low_weights, "trained": trained.low_weights},
        "4; figure 2d",
    ),
    Claim("5.2", "Weights of Seq-TIS are frequently at the clamp.", {"trained": trained.clamping}, "7"),
    Claim(
        "5.3",
        "The share of low weights rises monotonically with length (there from 20 to 30 % to 80 to 90 %).",
        {"measured": weights.rises_with_length},
        "figure 3",
    ),
    Claim(
        "5.3",
        "Temperature 0.4 has slightly more low weights than 1.0, at every length.",
        {"measured": weights.colder_is_lower},
        "figure 3",
    ),
    Claim(
        "5.4",
        "With temperature 0.7, top-p 0.8 and top-k 20 training fails under all three corrections: deployment decoding "
        "can be very brittle.",
        {"trained": trained.all_fail, "laboratory": tables.cut_fails},
        "figure 4a",
    ),
    Claim(
        "5.4",
        "Under this cut sampling nearly 100 % of the Seq-TIS weights are low.",
        {"measured": weights.cut_is_low, "trained": trained.cut_is_low},
        "figure 4b",
    ),
    Claim(
        "5.4",
        'Under this cut sampling the ESS is near 1 because all weights are clamped: a "false positive".',
        {"measured": weights.cut_ess, "trained": trained.deceptive_ess},
        "figure 4c",
    ),
    Claim(
        "5.4",
        "Under this cut sampling the KL is far larger than at temperature 1.0 (there 0.033 against 0.001).",
        {"measured": weights.kl_of_cut, "trained": trained.kl_of_cut},
        "figure 5a",
    ),
    Claim(
        "5.4",
        "Under this cut sampling the KL rises as training goes on (there from 0.01 to 0.033).",
        {"trained": trained.kl_rises},
        "figure 5a",
    ),
    Claim(
        "5.4", "T_max then falls from 2,000 to about 600 tokens.", {"arithmetic": laboratory.t_max_of_cut}, "figure 5a"
    ),
    Claim(
        "5.4",
        "The response length plateaus at about 600 tokens, which is 20 / KL.",
        cannot("the length of a right answer is fixed by the task, that of tables by T, and no reward asks for more"),
        "figure 5b",
    ),
    Claim(
        "5.4",
        "Most sequences beyond that length are clamped or have very low weights (a hypothesis there).",
        {"measured": weights.beyond_t_max},
    ),
    Claim(
        "5.4",
        "VERL has no lower-bound truncation of weights.",
        read(
            "verl 0.6.1, the newest release on 2 December 2025, truncates with `clamp(max=rollout_is_threshold)` "
            "(`trainer/ppo/rollout_corr_helper.py`). Its lower thresholds reject, or count low weights."
        ),
    ),
    Claim(
        "5.4",
        "A lower bound is a dilemma: all weights are alike, or a few large ones decide.",
        {"measured": weights.dilemma},
    ),
    Claim(
        "5.4",
        "Both sides of this dilemma make training unstable.",
        cannot("no cell trains with a lower bound that clips weights; Seq-MIS rejects what lies below its band"),
    ),
    Claim("6", "Extreme weights often indicate garbage rather than signal.", {"": extreme_weights}),
    Claim(
        "6",
        "Seq-MIS inherits the exponential variance of sequence weights.",
        {"trained": trained.mask_variance, "laboratory": laboratory.mask_variance},
    ),
    Claim(
        "6",
        "Geo-RS normalizes for length: 100 tokens with ratios of 1.1 score as 10 tokens with ratios of 1.1.",
        {"arithmetic": laboratory.geometric_length},
    ),
    Claim(
        "6",
        "With the recommended 1.0002 to 1.001, Geo-RS rejected every sample, because means were 1.01 to 1.05.",
        {"measured": weights.geometric, "trained": trained.geometric},
    ),
    Claim("6", "The threshold of Geo-RS needs careful tuning.", {"measured": weights.geometric_tuning}, "7"),
    Claim(
        "6",
        "Geo-RS-Seq-TIS still inherits the variance of sequence weights, and is difficult to tune.",
        {"laboratory": laboratory.geometric_sequence},
    ),
    Claim(
        "7",
        "Even far below the clamp, log-normal weights crush the effective sample size.",
        {"measured": weights.log_normal, "laboratory": laboratory.log_normal},
    ),
    Claim(
        "7",
        '"We do not claim that Seq-TIS is universally worse": with shorter tasks or tighter KL its advantages may be '
        "attainable.",
        {"trained": trained.sequence_may_win},
    ),
    Claim(
        "7",
        "Token-TIS with default sampling was the most robust choice.",
        {"trained": trained.token_is_robust},
        "summary",
    ),
)
