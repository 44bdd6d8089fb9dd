"""Right logs in which rounding or noise looks like a fault: the check names the fault that is there, or none."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from null_logs import rollouts, write_rows

from rollcorr.diagnostics import check_logs, estimate_provenance, null_of_logs
from rollcorr.diagnostics.fault_row import Case
from rollcorr.diagnostics.faults import fault, refutation
from rollcorr.diagnostics.health.evidence import Evidence
from rollcorr.diagnostics.health.noise import Noise
from rollcorr.rollout_log import RolloutBatch, RolloutLogWriter

ROWS, LENGTH = 64, 400


def log_of(path, train, rollout):
    with RolloutLogWriter(path) as writer:
        mask = torch.ones_like(train, dtype=torch.bool)
        writer.write(RolloutBatch.from_padded(mask, rollout_log_prob=rollout, old_log_prob=train))
    return path


@pytest.fixture(scope="module")
def null(tmp_path_factory):
    rows = rollouts(rows=ROWS, length=LENGTH, seed=3)
    return null_of_logs([write_rows(tmp_path_factory.mktemp("null") / "null.parquet", rows)])


@pytest.mark.parametrize("value", [1e-6, 2.0**-8])
def test_rounding_above_zero_is_no_finding(tmp_path, null, value):
    rows = rollouts(rows=ROWS, length=LENGTH, seed=4)
    rows[20]["old_log_prob"][100] = rows[20]["rollout_log_prob"][100] = value
    result = check_logs([write_rows(tmp_path / "log.parquet", rows)], null=null)
    assert result.health.healthy
    assert result.metrics["log/positive_count"] == 1


def test_a_log_prob_above_rounding_is_a_finding(tmp_path, null):
    rows = rollouts(rows=ROWS, length=LENGTH, seed=4)
    rows[20]["old_log_prob"][100] = 1.01 * 2.0**-8
    result = check_logs([write_rows(tmp_path / "log.parquet", rows)], null=null)
    assert [finding.code for finding in result.health.warnings] == ["positive"]


@pytest.mark.parametrize("value", [1e-6, 0.1])
def test_one_value_above_zero_explains_no_weight_fault(tmp_path, null, value):
    rows = rollouts(rows=ROWS, length=LENGTH, seed=4, weights=0.3)
    rows[20]["old_log_prob"][100] = value
    result = check_logs([write_rows(tmp_path / "log.parquet", rows)], null=null)
    (weights,) = [finding for finding in result.health.findings if finding.code == "weights_differ"]
    assert result.hypotheses[0].code == "weights_differ"
    assert weights.follows_from is None
    assert "positive" not in {finding.follows_from for finding in result.health.findings}


def table_walk(score, *, top_p=1.0, scale=4.0, vocabulary=64, length=200, seed=0):
    """Log-probs of tokens that a table of logits samples, and of the same tokens by `score` of the logits."""
    generator = torch.Generator().manual_seed(seed)
    table = scale * torch.randn(vocabulary, vocabulary, generator=generator)
    current = torch.randint(vocabulary, (ROWS,), generator=generator)
    train, rollout = [], []
    for _ in range(length):
        logits = table[current]
        mu = logits.double().softmax(-1)
        kept = mu.sort(descending=True, dim=-1)
        beyond = (kept.values.cumsum(-1) - kept.values) >= top_p
        mu = mu.masked_fill(beyond.gather(-1, kept.indices.argsort(-1)), 0.0)
        mu = mu / mu.sum(-1, keepdim=True)
        token = torch.multinomial(mu, 1, generator=generator)
        train.append(score(logits).gather(-1, token))
        rollout.append(mu.log().gather(-1, token))
        current = token.squeeze(-1)
    return torch.cat(train, 1).float(), torch.cat(rollout, 1).float()


def normalizer_in_bfloat16(logits):
    logits = logits.bfloat16()
    return logits - logits.logsumexp(-1, keepdim=True)


def log_softmax_in_bfloat16(logits):
    return logits.bfloat16().log_softmax(-1)


@pytest.mark.parametrize("score", [normalizer_in_bfloat16, log_softmax_in_bfloat16])
@pytest.mark.parametrize("scale", [4.0, 6.0])
def test_a_bfloat16_log_softmax_is_no_truncation(tmp_path, score, scale):
    train, rollout = table_walk(score, scale=scale)
    assert (train == 0).any()
    for pair in ((train, rollout), (rollout, train)):
        assert "truncated" not in estimate_provenance(*pair).codes
    result = check_logs([log_of(tmp_path / "log.parquet", train, rollout)])
    assert "truncated" not in {finding.code for finding in result.hypotheses}


def test_a_truncation_in_bfloat16_is_still_named():
    train, rollout = table_walk(lambda logits: logits.log_softmax(-1), top_p=0.9)
    assert "truncated" in estimate_provenance(train, rollout.bfloat16().float()).codes


def coarse_sampler(seed, *, length, sure, spread, noise):
    """Log-probs of two tokens whose logits differ by noise of the sampler, as with weights of 4 bits."""
    generator = torch.Generator().manual_seed(seed)

    def draw():
        return torch.randn(ROWS, length, generator=generator, dtype=torch.float64)

    trained = sure + spread * draw()
    sampled = trained + noise * draw()
    first = torch.rand(ROWS, length, generator=generator, dtype=torch.float64) < sampled.sigmoid()
    sign = torch.where(first, 1.0, -1.0)
    score = torch.nn.functional.logsigmoid
    return score(sign * trained).float(), score(sign * sampled).float()


UNITS = {"sure": 4.0, "spread": 2.0, "noise": 0.8}
SHIFTS = {"sure": 7.0, "spread": 2.5, "noise": 1.6}


@pytest.mark.parametrize(
    ("seed", "length", "options"),
    [(24, 24, UNITS), (21, 40, UNITS), (1, 24, SHIFTS), (5, 24, SHIFTS), (13, 24, SHIFTS), (0, 150, SHIFTS)],
)
def test_a_coarse_sampler_misreports_no_row(tmp_path, seed, length, options):
    """Of 64 rows, 8 units and 8 lags, noise makes one row fit one of them."""
    train, rollout = coarse_sampler(seed, length=length, **options)
    found = estimate_provenance(train, rollout)
    assert not {"wrong_unit", "shifted", "other_request", "placeholder"} & set(found.codes)
    null_of_logs([log_of(tmp_path / "log.parquet", train, rollout)])


def test_one_row_in_log_base_2_is_still_named():
    train, rollout = coarse_sampler(2, length=200, sure=2.0, spread=2.0, noise=0.1)
    rollout[55] /= math.log(2)
    found = estimate_provenance(train, rollout).finding("wrong_unit")
    assert (found.rows, found.first_row) == (1, 55)
    assert "log base 2" in found.reason


def test_one_shifted_row_is_still_named():
    train, rollout = coarse_sampler(2, length=200, sure=2.0, spread=2.0, noise=0.1)
    rollout[55] = rollout[55].roll(1)
    found = estimate_provenance(train, rollout).finding("shifted")
    assert (found.rows, found.first_row) == (1, 55)


def sampled(logits, generator):
    """Tokens of a policy, (1, n), of logits (n, V)."""
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).T


def log_probs(logits, ids):
    return logits.log_softmax(-1).gather(-1, ids.T).T


def test_a_cap_of_logits_is_no_temperature():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(4000, 100, generator=generator)
    logits[:, 0] = 5 + 9 * torch.rand(4000, generator=generator)
    ids = sampled(logits, generator)
    rollout = log_probs(logits, ids)
    assert "tempered" not in estimate_provenance(log_probs(20 * (logits / 20).tanh(), ids), rollout).codes
    assert "tempered" in estimate_provenance(log_probs(logits / 1.25, ids), rollout).codes


def test_ids_that_one_side_lacks_are_no_truncation():
    """A truncation keeps no token that is rarer than the mass that it drops."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(4000, 100, generator=generator)
    ids = sampled(logits, generator)
    padded = torch.cat([logits, torch.full((4000, 60), 5.0)], dim=1)
    pair = log_probs(padded, ids), log_probs(logits, ids)
    assert "truncated" in estimate_provenance(*pair).codes
    assert "truncated" not in estimate_provenance(*pair, token_ids=ids).codes


@pytest.mark.parametrize(("sigma", "refuted"), [(0.01, True), (0.2, False)])
def test_little_noise_refutes_a_temperature_that_tokens_contradict(sigma, refuted):
    tempered = replace(fault("tempered").finding, evidence={"violations": 0.2})
    evidence = Evidence(current={}, noise=Noise(sigma=sigma, source="null.json"))
    assert (refutation("tempered", Case(tempered, evidence)) is not None) == refuted


def test_equal_contexts_are_no_placeholder():
    generator = torch.Generator().manual_seed(0)
    train = -3 * torch.rand(24, 30, generator=generator) - 0.2
    rollout = train + 0.3 * torch.randn(24, 30, generator=generator)
    train[:12, 0], rollout[:12, 0] = -0.31, -1.7213
    assert "placeholder" not in estimate_provenance(train, rollout.clamp(max=-0.01)).codes
    train[:12, 0] = -3 * torch.rand(12, generator=generator) - 2.5
    assert "placeholder" in estimate_provenance(train, rollout.clamp(max=-0.01)).codes


def test_noise_where_the_null_has_no_tokens_names_no_cause(tmp_path):
    """A null of random weights is flat, and the noise of a policy that has learned is not."""
    random = np.random.default_rng(0)

    def rows(scale, noise):
        shape = (64, 100)
        rollout = -scale * random.exponential(size=shape)
        sides = {
            "rollout_log_prob": rollout,
            "old_log_prob": rollout - np.abs(rollout) * noise * random.normal(size=shape),
        }
        columns = {name: values.tolist() for name, values in sides.items()}
        columns["response_ids"] = random.integers(64, size=shape).tolist()
        return [{"prompt_ids": [1, 2], **{name: own[row] for name, own in columns.items()}} for row in range(64)]

    null = null_of_logs([write_rows(tmp_path / "null.parquet", rows(4.0, 0.001))])
    again = check_logs([write_rows(tmp_path / "log.parquet", rows(0.004, 0.3))], null=null)
    assert [finding.code for finding in again.hypotheses] == ["measure_null_again"]
    assert again.health.verdict == "not judged"
    known = check_logs([write_rows(tmp_path / "known.parquet", rows(4.0, 0.1))], null=null)
    assert known.hypotheses[0].code == "stochastic_trainer"
