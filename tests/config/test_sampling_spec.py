"""Which log-probs may be subtracted: every cell of the table, with its verdict and the exact sums behind it.

The policy is one softmax over six tokens, so every expectation is a finite sum. `K` is the set that the engine could
draw from, `S` its mass.
"""

import dataclasses
import math
import re
from itertools import product
from pathlib import Path

import pytest
import torch

from rollcorr import SamplingSpec, check_compatible
from rollcorr.config.sampling_spec import ENGINES, IncompatibleSamplingError, compare
from rollcorr.core.sampling import kept_sets_of_support
from rollcorr.correction.scoring import actor_log_prob, recomputed_support

LOGITS = torch.tensor([2.0, 1.5, 0.7, 0.2, -1.0, -2.5], dtype=torch.float64)
V = len(LOGITS)
EVERY = torch.arange(V)
TRUNCATIONS = {"none": {}, "top_p": {"top_p": 0.8}, "top_k": {"top_k": 3}, "both": {"top_k": 4, "top_p": 0.8}}
ACTORS = ("full at 1", "full", "recompute", "replay", "kept_mass")
CELLS = list(product(("raw", "tempered", "processed"), (1.0, 0.7), TRUNCATIONS, ACTORS))


def softmax(logits, temperature=1.0):
    return (logits / temperature).log_softmax(-1)


def cell(logprobs, temperature, truncation, actor, engine="vllm"):
    rollout = SamplingSpec(temperature=temperature, logprobs=logprobs, engine=engine, **TRUNCATIONS[truncation])
    if actor == "full at 1":
        return rollout, rollout.for_actor("full", temperature=1.0)
    return rollout, rollout.for_actor(actor)


def engine_side(rollout, logits=LOGITS):
    """K, the log-probs that the tokens are drawn with, and those that the engine reports."""
    support = recomputed_support(logits, rollout)
    sampled = softmax(logits.masked_fill(~support, -math.inf), rollout.temperature)
    reported = {"raw": softmax(logits), "tempered": softmax(logits, rollout.temperature), "processed": sampled}
    return support, sampled, reported[rollout.logprobs]


def trainer_side(trainer, support, logits=LOGITS, engine_logits=LOGITS):
    """log π of every token, by the library."""
    rows = logits.expand(V, V)
    mass = softmax(engine_logits, trainer.temperature)[support].logsumexp(-1).expand(V)
    kept = kept_sets_of_support(support.expand(V, V))
    return actor_log_prob(rows, EVERY, trainer, kept=kept, log_kept_mass=mass).log_prob


def expected_log_ratio(logprobs, temperature, truncation, actor, support):
    """log π − log μ from the formulas: z/τ − log Z on each side, and log S where a side runs over K."""
    ours, theirs = 1.0 if logprobs == "raw" else temperature, 1.0 if actor == "full at 1" else temperature
    ratio = softmax(LOGITS, theirs) - softmax(LOGITS, ours)
    if truncation != "none" and logprobs == "processed":
        ratio = ratio + softmax(LOGITS, ours)[support].logsumexp(-1)
    if truncation != "none" and actor in ("recompute", "replay", "kept_mass"):
        ratio = ratio - softmax(LOGITS, theirs)[support].logsumexp(-1)
    return ratio


@pytest.mark.parametrize(("logprobs", "temperature", "truncation", "actor"), CELLS)
def test_every_cell_has_the_verdict_that_the_exact_sums_give(logprobs, temperature, truncation, actor):
    rollout, trainer = cell(logprobs, temperature, truncation, actor)
    support, sampled, reported = engine_side(rollout)
    ratio = (trainer_side(trainer, support) - reported)[support]
    torch.testing.assert_close(ratio, expected_log_ratio(logprobs, temperature, truncation, actor, support)[support])
    no_bias = ratio.abs().max() < 1e-9
    honest = (reported - sampled)[support].abs().max() < 1e-9
    verdict = compare(rollout, trainer).verdict
    assert (verdict != "different") == bool(no_bias and honest)
    if verdict == "different":
        with pytest.raises(IncompatibleSamplingError, match=r"these log-probs are not comparable: .* To fix it: "):
            check_compatible(rollout, trainer)
    else:
        assert check_compatible(rollout, trainer).verdict == verdict
    assert (verdict == "approximate") == (
        truncation != "none" and logprobs == "processed" and actor in ("recompute", "kept_mass")
    )


@pytest.mark.parametrize(
    ("logprobs", "settings", "actor", "verdict", "says"),
    [
        # Temperature; the actor divides by it.
        ("raw", {}, "full", "same", ""),
        ("raw", {"temperature": 0.7}, "full", "different", "temperature 0.7, which raw log-probs leave out"),
        ("processed", {}, "full", "same", ""),
        ("processed", {"temperature": 0.7}, "full", "same", ""),
        # Truncation; the actor uses the full softmax.
        ("raw", {"top_p": 0.9}, "full", "different", "top_p 0.9, which raw log-probs leave out"),
        (
            "processed",
            {"top_p": 0.9},
            "full",
            "different",
            "runs over what top_p 0.9 kept, the trainer's over the whole",
        ),
        ("processed", {"top_k": 50}, "full", "different", "top_k 50"),
        # Truncation; the actor does something about it.
        ("processed", {"top_p": 0.9, "top_k": 50}, "recompute", "approximate", "tokens at the boundary fall in or out"),
        ("processed", {"top_p": 0.9, "top_k": 50}, "replay", "same", ""),
        ("processed", {"top_p": 0.9}, "kept_mass", "approximate", "mass on the kept set is taken to be the engine's"),
        ("raw", {"top_p": 0.9}, "replay", "different", "top_p 0.9, which raw log-probs leave out"),
        ("tempered", {"temperature": 0.7}, "full", "same", ""),
        ("tempered", {"temperature": 0.7, "top_k": 20}, "full", "different", "top_k 20, which tempered log-probs"),
    ],
)
def test_the_published_table(logprobs, settings, actor, verdict, says):
    rollout = SamplingSpec(logprobs=logprobs, engine="vllm", **settings)
    found = compare(rollout, rollout.for_actor(actor))
    assert found.verdict == verdict
    assert says in found.reason
    assert bool(found.fix) == (verdict != "same")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_truncation_on_one_side_biases_every_log_ratio_by_the_log_of_the_kept_mass(temperature):
    rollout, trainer = cell("processed", temperature, "both", "full")
    support, sampled, reported = engine_side(rollout)
    ratio = (trainer_side(trainer, support) - reported)[support]
    mass = softmax(LOGITS, temperature)[support].exp().sum()
    assert 0.7 < mass < 0.95
    torch.testing.assert_close(ratio, mass.log().expand_as(ratio))
    assert (sampled.exp()[support] * ratio.exp()).sum().item() == pytest.approx(mass.item()), "mean ratio = S, not 1"


def test_raw_against_tempered_biases_the_mean_ratio_by_chi_squared():
    rollout, trainer = cell("raw", 0.7, "none", "full")
    support, sampled, reported = engine_side(rollout)
    ratio = trainer_side(trainer, support) - reported
    mean = (sampled.exp() * ratio.exp()).sum()
    chi_squared = (softmax(LOGITS, 0.7).exp() ** 2 / softmax(LOGITS).exp()).sum() - 1
    assert mean.item() == pytest.approx(1 + chi_squared.item())
    assert chi_squared > 0.05


def test_raw_log_probs_of_a_truncated_sampler_look_right_and_weigh_wrongly():
    """ρ = 1 on every token hides it; yet E_ν[ρ f] is an average over K, not over the policy."""
    rollout, trainer = cell("raw", 1.0, "top_k", "full")
    support, sampled, reported = engine_side(rollout)
    ratio = (trainer_side(trainer, support) - reported)[support]
    assert ratio.abs().max() < 1e-9
    score = torch.linspace(0, 1, V, dtype=torch.float64)
    estimate, truth = (sampled.exp() * score).sum(), (softmax(LOGITS).exp() * score).sum()
    assert truth - estimate > 0.05
    with pytest.raises(IncompatibleSamplingError, match="processed_logprobs"):
        check_compatible(rollout, trainer)


def test_replay_has_mean_ratio_one_for_any_trainer_and_recomputation_has_not():
    """With other logits on the trainer: Σ_K π_K = 1 exactly; the recomputed set loses a token that the engine draws."""
    rollout = SamplingSpec(temperature=0.7, top_k=3, logprobs="processed", engine="vllm")
    support, sampled, reported = engine_side(rollout)
    drifted = LOGITS + torch.tensor([0.0, 0.1, -0.4, 0.3, 0.2, 0.0], dtype=torch.float64)  # token 3 overtakes token 2
    means = {}
    for actor in ("replay", "recompute", "kept_mass"):
        trainer = rollout.for_actor(actor)
        ratio = trainer_side(trainer, support, drifted) - reported
        means[actor] = (sampled.exp() * ratio.exp())[support].sum().item()
    assert means["replay"] == pytest.approx(1)
    recomputed = recomputed_support(drifted, rollout.for_actor("recompute"))
    outside = actor_log_prob(drifted.expand(V, V), EVERY, rollout.for_actor("recompute")).outside
    assert (support & ~recomputed).tolist() == [False, False, True, False, False, False]
    assert outside[2], "told, and finite all the same"
    assert abs(means["recompute"] - 1) > 0.01
    masses = [softmax(logits, 0.7)[support].exp().sum() for logits in (drifted, LOGITS)]
    assert means["kept_mass"] == pytest.approx((masses[0] / masses[1]).item())


@pytest.mark.parametrize(("engine", "expected"), [("vllm", [0, 1]), ("transformers", [0, 1]), ("sglang", [0, 1, 2])])
def test_each_engine_truncates_in_its_own_order(engine, expected):
    """p = (.5, .3, .12, .08), top-k 3, top-p .81: renormalized to .92 the first two have .87; jointly they have .8."""
    logits = torch.tensor([0.5, 0.3, 0.12, 0.08]).log()
    spec = SamplingSpec(top_k=3, top_p=0.81, logprobs="processed", engine=engine)
    assert torch.where(recomputed_support(logits, spec))[0].tolist() == expected


def test_llama_cpp_applies_the_temperature_last():
    logits = torch.tensor([0.5, 0.3, 0.12, 0.08]).log()
    settings = {"temperature": 0.25, "top_p": 0.81, "logprobs": "processed"}
    first, last = (recomputed_support(logits, SamplingSpec(engine=e, **settings)) for e in ("vllm", "llama.cpp"))
    assert [first.sum().item(), last.sum().item()] == [1, 3]


def test_greedy_decoding_has_no_ratio():
    rollout = SamplingSpec(temperature=0.0, logprobs="processed")
    with pytest.raises(IncompatibleSamplingError, match="rollout's temperature is 0"):
        check_compatible(rollout, SamplingSpec())
    with pytest.raises(IncompatibleSamplingError, match="trainer's temperature is 0"):
        check_compatible(SamplingSpec(), SamplingSpec(temperature=0.0, logprobs="processed"))


@pytest.mark.parametrize(
    "penalty",
    [{"repetition_penalty": 1.1}, {"presence_penalty": 0.5}, {"frequency_penalty": -0.2}, {"logit_bias": {7: -100.0}}],
)
def test_penalties_must_be_on_both_sides(penalty):
    rollout = SamplingSpec(logprobs="processed", **penalty)
    trainer = rollout.for_actor("full")
    with pytest.raises(IncompatibleSamplingError, match=f"{next(iter(penalty))}.*; in the trainer's: none"):
        check_compatible(rollout, trainer)
    assert compare(rollout, dataclasses.replace(trainer, **penalty)).verdict == "same"
    with pytest.raises(IncompatibleSamplingError, match="which raw log-probs leave out"):
        check_compatible(dataclasses.replace(rollout, logprobs="raw"), trainer)
    with pytest.raises(ValueError, match="depends on the tokens before"):
        actor_log_prob(torch.zeros(1, 2), torch.zeros(1).long(), rollout)


def test_a_forbidden_end_token_is_a_small_mismatch_that_replay_has_not():
    rollout = SamplingSpec(min_new_tokens=5, logprobs="processed")
    assert compare(rollout, rollout.for_actor("full")).verdict == "approximate"
    assert compare(dataclasses.replace(rollout, logprobs="raw"), rollout.for_actor("full")).verdict == "approximate"
    assert compare(rollout, rollout.for_actor("replay")).verdict == "same"
    assert compare(rollout, dataclasses.replace(rollout.for_actor("full"), min_new_tokens=5)).verdict == "same"


def test_a_trainer_must_not_truncate_what_was_sampled_whole():
    whole = SamplingSpec(logprobs="processed")
    truncated = SamplingSpec(top_p=0.9, logprobs="processed", support="recomputed")
    with pytest.raises(IncompatibleSamplingError, match="truncate on both sides or on neither"):
        check_compatible(whole, truncated)
    with pytest.raises(IncompatibleSamplingError, match=r"truncated by top_p 0.8, the trainer's by top_p 0.9"):
        check_compatible(dataclasses.replace(whole, top_p=0.8), truncated)


@pytest.mark.parametrize(("engine", "unknown"), [("vllm", False), ("my_engine", True), (None, True)])
def test_only_unknown_engines_have_unknown_order(engine, unknown):
    rollout = SamplingSpec(top_p=0.9, logprobs="processed", engine=engine)
    reason = compare(rollout, rollout.for_actor("recompute")).reason
    assert ("the engine's order of transforms is not known" in reason) == unknown


def test_the_fix_is_the_engines_own():
    for engine, fix in (
        ("vllm", "processed_logprobs"),
        ("sglang", "return_sampling_mask"),
        (None, "processed log-probs"),
    ):
        rollout = SamplingSpec(temperature=0.7, engine=engine)
        assert fix in compare(rollout, rollout.for_actor("full")).fix
    trainer = SamplingSpec(temperature=0.7, logprobs="processed")
    assert compare(SamplingSpec(), trainer).fix == "divide the trainer's logits by 1"


def test_a_spec_is_the_same_as_itself_and_versions_do_not_matter():
    spec = SamplingSpec(temperature=0.7, top_k=20, logprobs="processed", engine="vllm", policy_version=3)
    assert compare(spec, spec).verdict == "same"
    assert compare(spec, dataclasses.replace(spec.for_actor("replay"), policy_version=9)).verdict == "same"


def test_logit_bias_is_one_text_however_it_is_written():
    spec = SamplingSpec(logit_bias={50256: -100, 7: 2.5, 8: 0.0})
    assert spec.logit_bias == "7:2.5,50256:-100.0"
    assert spec == SamplingSpec(logit_bias="50256:-100,7:2.5")
    assert spec.biases() == {7: 2.5, 50256: -100.0}
    assert hash(spec) == hash(dataclasses.replace(spec))
    for bad, error in (("7=1", ValueError), ({7: "a"}, TypeError), ({-1: 1.0}, ValueError), ([7], TypeError)):
        with pytest.raises(error, match="logit_bias"):
            SamplingSpec(logit_bias=bad)


def test_what_a_support_needs_is_asked_for():
    logits, ids = torch.zeros(2, 3), torch.zeros(2).long()
    rollout = SamplingSpec(top_p=0.9, logprobs="processed")
    with pytest.raises(ValueError, match="needs the engine's kept sets"):
        actor_log_prob(logits, ids, rollout.for_actor("replay"))
    with pytest.raises(ValueError, match="needs log_kept_mass"):
        actor_log_prob(logits, ids, rollout.for_actor("kept_mass"))
    with pytest.raises(ValueError, match="support='replayed' is about processed log-probs"):
        SamplingSpec(support="replayed")
    with pytest.raises(ValueError, match="actor must be one of 'full'"):
        rollout.for_actor("mask")


def test_a_spec_survives_the_rollout_log():
    pytest.importorskip("pyarrow", reason="needs rollcorr[log]")
    from rollcorr.rollout_log import RolloutBatch

    spec = SamplingSpec(temperature=0.7, logit_bias={3: 1.5}, logprobs="tempered", engine="sglang")
    batch = RolloutBatch.from_padded(torch.ones(1, 2), log_prob=torch.zeros(1, 2), sampling=spec)
    assert SamplingSpec(**batch.objects("sampling")[0], engine="sglang") == spec
    with pytest.raises(ValueError, match="whose support is the engine's; got support='replayed'"):
        RolloutBatch.from_padded(torch.ones(1, 2), sampling=spec.for_actor("replay"))


def test_the_page_shows_the_engines_as_they_are():
    page = (Path(__file__).parents[2] / "docs" / "guides" / "sampling.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*) \|$", page, flags=re.MULTILINE))
    for name, engine in ENGINES.items():
        order, joint, kinds = (cell.strip() for cell in rows[name].split("|"))
        assert order == (" → ".join(engine.order) or "not known")
        separate = "renormalized" if engine.order else "–"
        assert joint == ("joint" if engine.joint else separate)
        assert kinds == ", ".join(engine.logprobs)
