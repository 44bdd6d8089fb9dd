"""Rows of the table of faults that name no cause: the course over the steps, symptoms, and answers without a fault."""

from __future__ import annotations

from rollcorr.diagnostics.fault_row import Fault, in_excess_at_start

SYNC = (
    "check the weight sync: that it runs and covers every parameter (head, tied ones, adapters); then the "
    "sampler's quantization, and settings of the model such as RoPE"
)
CHECKSUM = (
    "compare a checksum of one parameter on both sides after a sync, or sync by hand: k3 falls to its initial value"
)
_NULL_OR_IDS = "compare with a null (`rollcorr null`), or add response_ids to the log"

SYMPTOMS = (
    # When and by how much the mismatch changed.
    Fault(
        code="changed_at_step",
        kind="course",
        needs="steps",
        score=0.5,
        title="the mismatch rose at step {onset} to {factor} times its start, and stayed",
        reason="a rise within one step is a change of the setup, not of the policy",
        fix="look for a change at that step: a sync that failed or stopped, a restarted engine, another setting, a "
        "checkpoint that one side did not load",
        confirm=CHECKSUM,
    ),
    Fault(
        code="growing_mismatch",
        kind="course",
        needs="steps",
        score=0.4,
        refuted_by=(in_excess_at_start,),
        title="the mismatch has been growing since step {onset}",
        reason="it grows with the steps, as where a sync has stopped, or where the engine gets worse with its age",
        fix="check the weight sync from that step on; then restart the engine, and look at the learning rate",
        confirm="sync by hand, then restart the engine: the action that lowers k3 to its initial value shows the cause",
    ),
    Fault(
        code="surprise_jumped",
        kind="course",
        needs="metrics",
        part="nothing",
        score=0.1,
        reason="the sampler draws from another distribution since then, and log-probs of both sides may agree on that",
        fix="compare the sampler's temperature, top-p, top-k, penalties and prompts before and after that step",
        confirm="sample the same prompts with the settings from before that step",
    ),
    Fault(
        code="above_null",
        kind="course",
        needs="null",
        score=0.3,
        reason="two policies with the same weights differ by less on this engine",
        fix=SYNC,
        confirm="score a few of these rows with the sampler's own weights: the excess vanishes",
    ),
    Fault(
        code="unknown",
        kind="course",
        needs="null",
        score=0.2,
        title="the two sides differ beyond the null, and no known cause fits",
        confirm="score one affected row by hand on both sides, with the ids that the engine received",
    ),
    Fault(
        code="step_divergence",
        kind="symptom",
        needs="metrics",
        title="the exact KL of a step is large for a small picture",
        limit="the KL of a null, which grows with the size of the picture",
        reason="a step sampled by one policy has a likelihood ratio of about exp(−KL) under the other; averages over "
        "the dimensions hide it",
    ),
    # Symptoms only measure the mismatch.
    Fault(code="token_share_rose", kind="symptom", needs="steps"),
    Fault(
        code="out_of_range",
        kind="symptom",
        needs="metrics",
        apart=frozenset({"nonfinite_count", "zero_probability_count"}),
    ),
    Fault(
        code="recovered",
        kind="symptom",
        needs="metrics",
        apart=frozenset({"nonfinite_count", "zero_probability_count"}),
    ),
    Fault(code="horizon", kind="symptom", needs="metrics", title="responses are too long for sequence weights"),
    Fault(
        code="deceptive_effective_sample_size",
        kind="symptom",
        needs="metrics",
        explained_by=("saturation",),
        title="the effective sample size only looks healthy",
        reason="most weights are clamped to the same safety bound: they are equal because all are extreme",
        fix="do not trust sequence weights here; compare the sampling settings (temperature, top-p, top-k), shorten "
        "responses, or use token weights",
    ),
    Fault(
        code="saturation",
        kind="symptom",
        needs="metrics",
        title="weights saturate at the safety bound",
        reason="log weights beyond it are cut there: their size is lost, and chi-squared understates the mismatch",
        fix="change weights from sequence to token or geometric level, or reject these sequences (seq_mean_k3, veto)",
    ),
    Fault(code="sustained_rejection", kind="symptom", needs="metrics"),
    Fault(
        code="gap_at_start",
        kind="symptom",
        needs="metrics",
        title="a large gap between the policies from the start",
        reason="before training has moved the policy, both sides should agree: this is a fault in the setup",
    ),
    Fault(
        code="pinned_at_threshold",
        kind="symptom",
        needs="metrics",
        title="the largest weight is pinned at the threshold",
        reason="truncation acts from the start, so the gap between rollout and trainer is larger than it should be",
    ),
    Fault(
        code="band_narrower_than_mismatch",
        kind="symptom",
        needs="metrics",
        title="the rejection band is narrower than the mismatch",
        reason="the mean per-token gap of a typical sequence already lies outside the band, so most are rejected",
        fix="widen the band to a few times the measured gap, or use seq_mean_k3, which grows with the gap's square",
    ),
    Fault(
        code="length_dependence",
        kind="symptom",
        needs="metrics",
        title="the bound on sequence ratios depends on length",
        reason="at the mean length the product of ratios is already past the bound: longer responses are "
        "down-weighted or rejected for being long",
        fix="use a criterion on means over tokens (seq_mean_k1, seq_mean_k3), or token weights",
    ),
    Fault(
        code="low_weights",
        kind="symptom",
        needs="metrics",
        title="most sequences would count for almost nothing",
        fix="measure the weights on a log (`rollcorr advise`); shorten responses; lower the KL",
    ),
    Fault(
        code="one_sided_gradients",
        kind="symptom",
        needs="metrics",
        reason="the mismatch moves the ratios of all steps to one side before any update, so the clip removes one sign",
    ),
    Fault(
        code="growth_by_timestep",
        kind="symptom",
        needs="metrics",
        reason="the trainer has moved away from the rollouts' weights, and the copy does not follow",
        fix="send the engine the trainer's weights after every update, and check that all of them arrive",
    ),
    # Healthy or unknown.
    Fault(
        code="matched",
        kind="no finding",
        needs="pairs",
        title="the log-probs show no other sampling settings",
        confirm=_NULL_OR_IDS,
    ),
    Fault(
        code="processed",
        kind="no finding",
        needs="pairs",
        title="the rollout's log-probs are those of the distribution that was sampled",
    ),
    Fault(
        code="unexplained",
        kind="no finding",
        needs="pairs",
        title="the two sides differ, without the pattern of a setting",
        fix="look for other weights, another prompt template, or a policy that has moved on",
        confirm=_NULL_OR_IDS,
    ),
    Fault(
        code="storage",
        kind="noise",
        needs="pairs",
        part="nothing",
        title="log-probs are stored in 16 bits",
        fix="keep log-probs in float32 from the log-softmax on",
        confirm="look for the cast to bfloat16 or float16 between the log-softmax and the file",
    ),
    Fault(
        code="ordinary_noise",
        kind="no finding",
        needs="null",
        title="the mismatch is the ordinary noise of this engine",
    ),
    Fault(
        code="measure_null_again",
        kind="no finding",
        needs="null",
        title="the null may not fit this policy: weights and noise cannot be told apart",
        fix="measure the null again with these weights on both sides",
    ),
    Fault(
        code="mixed_settings",
        kind="no finding",
        needs="record",
        title="the rows were not all sampled alike",
        fix="check the rows of each setting separately: together, a fault in some rows is diluted",
    ),
)
