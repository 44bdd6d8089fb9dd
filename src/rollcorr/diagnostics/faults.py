"""The table of faults: each code of a finding once, with its kind, evidence, part, tests, text and experiment.

Every check reads its findings from this table (`fault`), and `resolver` reads from it which finding explains which. A
code without a row raises an error. CONTRIBUTING.md explains how to add a row.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.fault_row import (
    CAUSES,
    Case,
    Fault,
    Refutation,
    cache_named_first,
    in_excess_at_start,
    not_one_exponent,
    present_from_start,
    resets_with_sync,
)
from rollcorr.diagnostics.symptoms import CHECKSUM, SYMPTOMS, SYNC

_FILLED = ("placeholder", "foreign_tokens")

_ROWS = (
    # Values that are not the log-probs of their tokens.
    Fault(
        code="shifted",
        kind="data",
        needs="pairs",
        part="rows",
        score=3,
        number="lag",
        limit="0",
        title="log-probs are shifted: each belongs to a neighboring token",
        fix="align them: log-prob t belongs to token t given the tokens before it; drop the first or last log-prob",
        confirm="score one row by hand: the first log-prob belongs to the first response token",
    ),
    Fault(
        code="other_request",
        kind="data",
        needs="pairs",
        part="rows",
        score=3,
        number="correlation",
        limit="near 1",
        title="some rows have the log-probs of another request",
        fix="join the engine's answers to their prompts by request id, not by their order of arrival",
        confirm="score one of these rows alone with the engine",
    ),
    Fault(
        code="wrong_unit",
        kind="data",
        needs="pairs",
        part="rows",
        score=3,
        number="residual",
        limit="no unit but nats",
        title="the log-probs of one side are not in nats",
        fix="store natural log-probs: multiply by ln 2 or ln 10, change the sign, or take the log",
        confirm="exponentiate one value and compare it with the engine's probability of that token",
    ),
    Fault(
        code="foreign_tokens",
        kind="data",
        needs="pairs",
        part="rows",
        score=3,
        number="longest_run",
        limit="0",
        title="the mask covers tokens that the policy did not sample",
        fix="set response_mask to false on tokens of tools, templates and padding",
        confirm="decode these tokens and compare them with the engine's answer",
    ),
    Fault(
        code="placeholder",
        kind="data",
        needs="pairs",
        part="filled",
        score=3,
        title="placeholders in place of the rollout's log-probs",
        fix="store NaN for a missing log-prob; have the engine return log-probs of sampled tokens",
        confirm="look at these values in the engine's answer, before anything fills in missing ones",
    ),
    Fault(
        code="clamped_values",
        kind="data",
        needs="pairs",
        part="rows",
        score=3,
        number="clamped_share",
        limit="0",
        title="log-probs are clamped",
        fix="write log-probs to the log before any clamp; apply a floor only in the loss",
        confirm="look for a clamp between the log-softmax and the file: its limit is the value that repeats",
    ),
    Fault(
        code="other_ids",
        kind="data",
        needs="pairs",
        part="rows",
        score=3,
        number="sum_above_1",
        limit="as many as where both score one id",
        title="one side has the log-probs of other ids than the sampled ones",
        fix="gather the log-prob of the sampled id, not of the top one; shift logits by one against labels",
        confirm="gather one row by hand: log_softmax(logits[t - 1])[id[t]]",
    ),
    Fault(
        code="bf16_log_softmax",
        kind="noise",
        needs="pairs",
        score=3,
        number="zero_share",
        limit="0",
        title="a log-softmax in 16 bits rounds likely tokens to probability 1",
        fix="upcast the logits to float32 before the log-softmax",
        confirm="recompute one row in float32: no log-prob is exactly 0",
    ),
    Fault(
        code="zeros",
        kind="data",
        needs="record",
        part="filled",
        score=3,
        explained_by=(*_FILLED, "truncated"),
        title="most log-probs of a sequence are exactly 0",
    ),
    Fault(
        code="sentinel",
        kind="data",
        needs="record",
        part="filled",
        score=3,
        explained_by=_FILLED,
        title="log-probs of −9999",
        reason="a sampler wrote −9999 in place of a log-prob; it is read as missing",
        fix="store missing log-probs as NaN (null in JSONL); find out why the sampler returned none",
    ),
    Fault(
        code="contradicted_zeros",
        kind="data",
        needs="pairs",
        part="filled",
        score=3,
        explained_by=(*_FILLED, "truncated", "zeros"),
        title="log-probs look filled in with zeros",
        reason="one policy claims probability exactly 1 for tokens that the other gives less than 1/e",
        fix="store missing log-probs as NaN (null in JSONL), never as 0.0; find out why the engine returned none",
    ),
    Fault(code="positive", kind="data", needs="record", part="rows", score=3, title="log-probs above 0"),
    Fault(code="kept", kind="data", needs="record", part="nothing", score=3),
    Fault(code="kept_length", kind="data", needs="record", part="nothing", score=3),
    Fault(code="kept_offsets", kind="data", needs="record", part="nothing", score=3),
    Fault(code="kept_twice", kind="data", needs="record", part="nothing", score=3),
    Fault(
        code="identical_policies",
        kind="data",
        needs="metrics",
        part="nothing",
        title="degenerate: both policies agree to the last bit",
        fix="in bypass mode, compare log_prob (not old_log_prob) with the rollout; else check that the trainer "
        "recomputes its log-probs, and that the sampler reports its own. A program that samples and trains needs no "
        "correction",
    ),
    Fault(
        code="skipped_updates",
        kind="data",
        needs="metrics",
        part="nothing",
        title="updates were skipped",
        reason="the loss or a gradient was not finite, or everything was rejected; the weights were left as they were",
        fix="lower the learning rate, clip gradients, and look at nonfinite_count, rejected shares and the "
        "largest weights of these steps",
    ),
    # Settings of sampling, of prompts and of schedules.
    Fault(
        code="tempered",
        kind="settings",
        needs="pairs",
        score=3,
        refuted_by=(present_from_start, resets_with_sync, not_one_exponent),
        number="temperature_ratio",
        limit="1",
        title="the two sides divide the logits by different temperatures",
        fix="divide the trainer's logits by the sampling temperature; use the engine's processed log-probs",
        confirm="compare the temperature in the engine's request with the one that the trainer divides by",
    ),
    Fault(
        code="truncated",
        kind="settings",
        needs="pairs",
        score=3,
        refuted_by=(present_from_start, resets_with_sync),
        number="kept_mass",
        limit="1",
        title="only one side's log-probs are truncated (top-p, top-k or min-p)",
        fix="sample with top_p=1, top_k=-1, min_p=0, or replay the engine's kept sets (support 'replayed'), or "
        "subtract the log of the kept mass",
        confirm="sample a few prompts with top_p=1, top_k=-1, min_p=0: log-probs of exactly 0 become rare",
    ),
    Fault(
        code="raw",
        kind="settings",
        needs="pairs",
        score=3,
        refuted_by=(present_from_start, resets_with_sync),
        number="mean_ratio",
        limit="1",
        title="the sampler's log-probs leave its sampling settings out (raw log-probs)",
        fix="have the engine return log-probs after its transforms (vLLM: logprobs_mode=processed_logprobs)",
        confirm="look up logprobs_mode of the engine, or pass the trainer's logits and the token ids to the check",
    ),
    Fault(
        code="not_the_sampled_distribution",
        kind="settings",
        needs="record",
        part="nothing",
        score=3,
        title="tokens were not drawn from the distribution of the logged log-probs",
        reason="the mean of −log μ over drawn tokens is the mean entropy of μ; raw log-probs leave out the sampler's "
        "temperature, top-p or penalties",
        fix="have the engine return log-probs after its transforms (vLLM: logprobs_mode=processed_logprobs)",
        confirm="sample with temperature 1, top_p 1 and no penalty: the mean of −log μ then equals the mean entropy",
    ),
    Fault(
        code="recorded_settings",
        kind="settings",
        needs="record",
        score=3,
        title="the recorded sampling settings are not those of the log-probs",
    ),
    Fault(
        code="template",
        kind="settings",
        needs="pairs",
        part="positions",
        score=3,
        refuted_by=(cache_named_first, present_from_start, resets_with_sync),
        number="times_expected",
        limit="near 1",
        title="the two sides saw other prompts",
        fix="give both sides the same prompt ids: one template, one BOS, and left padding that is masked",
        confirm="compare the ids that the engine received with `prompt_ids`; if they agree, disable the prefix cache",
    ),
    Fault(
        code="turn_drift",
        kind="settings",
        needs="pairs",
        part="positions",
        score=3,
        number="times_expected",
        limit="near 1",
        title="the two sides differ more after a turn",
        fix="score the engine's own ids of prompt, turns and response in one sequence; do not tokenize text again",
        confirm="compare the ids of one row on both sides across the turn, and score it without a prefix cache",
    ),
    Fault(
        code="noise_level_differs",
        kind="settings",
        needs="record",
        score=3,
        reason="one ratio of the deviations s explains the log-probs of both sides at every timestep",
        fix="score with the noise level that sampled: σ, σ_next and s of a step yield it",
        confirm="score one picture with the sampler's noise level: J then averages −KL",
    ),
    Fault(
        code="shift_differs",
        kind="settings",
        needs="record",
        score=3,
        reason="one factor of the scheduler's shift explains the log-probs of both sides at every timestep",
        fix="give both schedulers the same shift, and the same resolution where the shift depends on it",
        confirm="compare the schedules of both sides (`rollcorr check-schedule`)",
    ),
    Fault(
        code="schedule_differs",
        kind="settings",
        needs="metrics",
        score=3,
        explained_by=("noise_level_differs", "shift_differs"),
        title="the densities are not those of the steps that were sampled",
        fix="compare the schedules (`rollcorr check-schedule`), score with the σ and σ_next of the step that was "
        "sampled, and convert a CPS sampler's log-prob (`density_from_cps`)",
        confirm="compare the schedules of both sides, entry by entry",
    ),
    Fault(
        code="loss_pass_differs",
        kind="settings",
        needs="metrics",
        part="nothing",
        score=2,
        title="the trainer differs from itself before the first update",
        fix="compute old_log_prob as the loss does: without dropout, with the same temperature, precision, kernel and "
        "micro-batch size",
        confirm="score one micro-batch twice, as old_log_prob and as in the loss: the two must agree",
    ),
    # Weights, and noise that no setting explains.
    Fault(
        code="moe_routing_differs",
        kind="weights",
        needs="routing",
        score=2,
        title="the two sides route tokens to other experts, and these carry the mismatch",
        fix="replay the sampler's routing on the trainer (router replay), or compute router logits in float32 on both "
        "sides",
        confirm="score some of these rows with the sampler's experts forced on the trainer: the excess vanishes",
    ),
    Fault(
        code="frozen_sampler",
        kind="weights",
        needs="steps",
        score=2,
        refuted_by=(in_excess_at_start,),
        title="the mismatch has grown since the first steps: the sampler seems not to be synchronized",
        reason="it grows with every update, as where the sampler keeps the weights of the start",
        fix="check that the weight sync runs, reaches the process that samples, and covers every parameter",
        confirm=CHECKSUM,
    ),
    Fault(
        code="stale_by_lag",
        kind="weights",
        needs="steps",
        score=2,
        title="the mismatch has grown with the age of the weights, now {age} updates",
        reason="the recorded age of the weights that sampled has grown with it, and at one age it does not grow",
        fix="sync the weights more often, limit the age of the data, or correct with recorded log-probs",
        confirm="limit the age to one version: the mismatch falls to that of the null",
    ),
    Fault(
        code="other_prompts",
        kind="data",
        needs="null",
        part="rows",
        score=2,
        title="some pictures were scored with another prompt, or other inputs",
        reason="their exact KL is far above that of the other pictures of the same steps",
        fix="score each picture with the sampler's prompt embeddings: check the order of prompts, groups and "
        "shards between sampler and trainer",
        confirm="score one of these pictures alone with its own prompt: its KL falls to the other pictures' KL",
    ),
    Fault(
        code="guidance_differs",
        kind="settings",
        needs="null",
        score=1,
        refuted_by=(present_from_start, resets_with_sync),
        title="the two sides condition differently: guidance, or the embedding of every prompt",
        reason="the velocities differ by more than any precision makes, or unevenly from prompt to prompt, and from "
        "the first step on",
        fix="score with the sampler's guidance scale, empty prompt and prompt embeddings",
        confirm="score a few pictures with the sampler's guidance: the KL falls to the null's",
    ),
    Fault(
        code="precision_differs",
        kind="noise",
        needs="null",
        score=1,
        refuted_by=(present_from_start, resets_with_sync),
        title="more noise than the null's in every picture: the precision of one side",
        reason="the excess is the same at every step, timestep and picture, from the first step on",
        fix="compare dtype and quantization of both sides; to find other faults too, measure a null with this sampler",
        confirm="sample a few pictures in the null's precision: the excess vanishes",
    ),
    Fault(
        code="penalty_on_one_side",
        kind="settings",
        needs="null",
        score=1,
        refuted_by=(present_from_start, resets_with_sync),
        title="a repetition, presence or frequency penalty acts on one side only",
        fix="set the engine's penalties to none; vLLM reads defaults from the model's generation_config.json",
        confirm="sample a few prompts with repetition_penalty=1: the excess vanishes",
    ),
    Fault(
        code="last_token_differs",
        kind="data",
        needs="null",
        score=1,
        title="the last token of the responses carries the mismatch",
        fix="give both sides the same last token: one end-of-sequence id, without padding in its place or after it",
        confirm="compare the last id and its log-prob on both sides in one row",
    ),
    Fault(
        code="some_rows_differ",
        kind="settings",
        needs="null",
        score=1,
        refuted_by=(present_from_start, resets_with_sync),
        title="some rows exceed the null, others match it: another context, or one faulty engine replica",
        fix="look at what these rows share: a replica, a worker, a prompt without its system part, padding",
        confirm="score one of these rows alone on both sides; group the rows by engine replica and by worker",
    ),
    Fault(
        code="noise_without_pattern",
        kind="noise",
        needs="null",
        score=1,
        refuted_by=(present_from_start, resets_with_sync),
        title="more noise than the null's, without a pattern: KV-cache or kernel precision, or dropout",
        fix="compare the precision of KV cache, kernels and weights with that of the null's engine",
        confirm="score the same rows twice: equal answers rule dropout out; then sample with a 16-bit KV cache",
    ),
    Fault(
        code="weights_differ",
        kind="weights",
        needs="null",
        score=1,
        title="the weights of the sampler and of the trainer differ",
        fix=SYNC,
        confirm="score a few of these rows with the sampler's own weights: the excess vanishes",
    ),
    Fault(
        code="stale_prefix_cache",
        kind="weights",
        needs="null",
        part="positions",
        score=1,
        title="the mismatch fades along the response: a stale prefix cache",
        fix="clear the engine's prefix cache at every weight update",
        confirm="sample with the prefix cache off: the excess vanishes",
    ),
    Fault(
        code="stochastic_trainer",
        kind="noise",
        needs="null",
        score=1,
        refuted_by=(present_from_start, resets_with_sync),
        title="one side draws anew in each forward pass (dropout, or another random layer)",
        fix="put the trainer in evaluation mode while it scores (`model.eval()`), and set dropout to 0",
        confirm="score the same rows twice: the two results differ",
    ),
)

FAULTS: Mapping[str, Fault] = {row.code: row for row in (*_ROWS, *SYMPTOMS)}
"""Code → its row."""


def fault(code: str) -> Fault:
    """Return the row of a code.

    Raises:
        LookupError: the code is not declared.
    """
    row = FAULTS.get(code)
    if row is None:
        raise LookupError(f"the code {code!r} is not declared; add a row to rollcorr/diagnostics/faults.py")
    return row


def refutation(code: str, case: Case) -> Refutation | None:
    """Return the first refutation by the tests of the code's row; None if every test passes."""
    return next((refuted for test in fault(code).refuted_by if (refuted := test(case)) is not None), None)


def is_cause(finding: Finding) -> bool:
    """Return whether a finding names a cause that is not ruled out."""
    return finding.severity != "note" and fault(finding.code).kind in CAUSES


def measures(finding: Finding) -> bool:
    """Return whether a finding measures the mismatch, its size or its course."""
    row = fault(finding.code)
    return row.kind in ("symptom", "course") and finding.metric not in row.apart


def is_rise(finding: Finding) -> bool:
    """Return whether a finding is a lasting rise of the mismatch over the steps."""
    row = fault(finding.code)
    return row.needs == "steps" and row.kind != "symptom"
