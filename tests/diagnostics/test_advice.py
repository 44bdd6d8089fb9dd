"""Advice on logs: repair before correcting, a correction by what each candidate does to the log, YAML to paste."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from rollcorr import correct
from rollcorr.config import Finding, SamplingSpec
from rollcorr.config.conversion import resolve
from rollcorr.config.documents import load_yaml
from rollcorr.diagnostics import advise, check_logs, null_of_logs
from rollcorr.diagnostics.advice import CANDIDATES, CandidateTotals, rule
from rollcorr.diagnostics.advice.candidates import is_resolved, squared_size
from rollcorr.rollout_log import RolloutBatch, RolloutLogWriter
from tests.diagnostics.null_logs import rollouts, write_rows

ROOT = Path(__file__).parents[2]
CHOOSING = ROOT / "docs" / "guides" / "choosing.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("advice")


@pytest.fixture(scope="module")
def null(folder):
    return null_of_logs([write_rows(folder / "null.parquet", rollouts(rows=260, length=40, seed=100))])


def noisy_log(path, sigma, *, rows=300, length=40, seed=0, judged=True):
    """A log of pure noise without ids: E_μ[exp d] = 1."""
    generator = torch.Generator().manual_seed(seed)
    d = sigma * torch.randn(rows, length, generator=generator) - sigma**2 / 2
    rollout = torch.full((rows, length), -4.0)
    with RolloutLogWriter(path) as log:
        log.write(
            RolloutBatch.from_padded(
                torch.ones(rows, length),
                rollout_log_prob=rollout,
                old_log_prob=rollout + d,
                sampling=SamplingSpec(logprobs="processed"),
            )
        )
    null = null_of_logs([path], engine_precision="int8") if judged else None
    return check_logs([path], null=null, candidates=True)


def totals_of(train, rollout, **columns):
    """The candidates' sums over full rows."""
    batch = RolloutBatch.from_padded(torch.ones(train.shape), rollout_log_prob=rollout, old_log_prob=train, **columns)
    packed = (batch.packed(name) for name in ("old_log_prob", "rollout_log_prob", "response_mask"))
    return CandidateTotals.of(batch, *packed, ids=None, prompts=None)


def noise(rows, length, sigma, seed=0):
    """Log-probs of two policies with independent noise between them: E_μ[exp d] = 1."""
    d = sigma * torch.randn(rows, length, generator=torch.Generator().manual_seed(seed)) - sigma**2 / 2
    rollout = torch.full((rows, length), -4.0)
    return rollout + d, rollout


def test_a_fault_is_repaired_and_not_corrected(folder, null):
    result = check_logs([write_rows(folder / "stale.parquet", rollouts(rows=96, weights=0.1, seed=2))], null=null)
    advice = advise(result)
    assert (advice.decision, advice.preset, advice.yaml, advice.exit_code) == ("repair", None, "", 1)
    assert advice.repairs[0].code == "weights_differ"
    assert advice.reasons[0].startswith("do not correct; repair this first: the weights of the sampler")
    assert advice.repairs[0].fix


def test_declared_weights_are_no_fault(folder, null):
    """With `intended`, a null that shows other weights confirms what the user declares."""
    rows = write_rows(folder / "declared.parquet", rollouts(rows=96, weights=0.1, seed=2))
    result = check_logs([rows], null=null, candidates=True)
    advice = advise(result, intended=True)
    assert result.causes[0].code == "weights_differ"
    assert (advice.decision, advice.repairs) == ("correct", ())

    tempered = check_logs([write_rows(folder / "hot.parquet", rollouts(rows=96, temperature=0.7, seed=3))], null=null)
    assert advise(tempered, intended=True).decision == "repair"


@pytest.mark.parametrize(("share", "decision"), [(0.004, "correct"), (0.02, "repair"), (None, "repair")])
def test_faults_of_few_rows_stop_no_intended_advice(tmp_path, monkeypatch, share, decision):
    """They become a caveat; without `intended`, and with more rows, they are repaired first."""
    fault = Finding(code="other_request", severity="warning", title="rows of another request", row_share=share)
    monkeypatch.setattr("rollcorr.diagnostics.advice.advisor._faults", lambda result, expected: (fault,))
    result = noisy_log(tmp_path / "log.parquet", 0.1)
    advice = advise(result, intended=True)
    assert (advise(result).decision, advice.decision) == ("repair", decision)
    assert decision == "repair" or "rows of another request: 0.40% of the rows" in advice.caveats[0]


def test_a_wrong_temperature_is_repaired_and_not_corrected(folder, null):
    rows = rollouts(rows=96, temperature=0.7, seed=3)
    advice = advise(check_logs([write_rows(folder / "tempered.parquet", rows)], null=null))
    assert advice.decision == "repair"
    assert advice.repairs[0].code == "tempered"
    assert "temperature" in advice.repairs[0].fix


def test_a_healthy_log_keeps_sequence_weights(folder, null):
    log = write_rows(folder / "healthy.parquet", rollouts(rows=96, length=40, seed=4))
    advice = advise(check_logs([log], null=null, candidates=True))
    assert (advice.decision, advice.candidate, advice.exit_code) == ("correct", "Seq-TIS 4", 0)
    assert (advice.config.rollout_is, advice.config.is_upper) == ("sequence", 4.0)
    assert advice.caveats == (rule.PROVISIONAL,)
    with pytest.raises(ValueError, match="candidates=True"):
        advise(check_logs([log], null=null))


@pytest.mark.parametrize(
    ("sigma", "candidate"),
    [
        (0.001, "none"),
        (0.1, "Seq-TIS 4"),
        (0.8, "Token-TIS 2"),
        (2.0, "Token-TIS 2"),  # all sequence weights are at the safety bound: an ESS of 1, and no gradient
    ],
)
def test_the_ess_of_sequence_weights_decides(tmp_path, monkeypatch, sigma, candidate):
    # The pairs call so large a noise unexplained or a cause; the rule is tested by itself.
    monkeypatch.setattr("rollcorr.diagnostics.advice.advisor._faults", lambda result, expected: ())
    advice = advise(noisy_log(tmp_path / "log.parquet", sigma))
    assert advice.candidate == candidate


def test_candidates_by_hand():
    """Two rows of two tokens; the second has d = log 4 twice, so its product of ratios is 16, truncated to 4."""
    rollout = torch.full((2, 2), -4.0)
    train = rollout + torch.tensor([[0.0], [np.log(4.0)]])
    advantages = torch.tensor([[1.0, 1.0], [-2.0, -2.0]])
    found = {row.name: row for row in totals_of(train, rollout, advantages=advantages).table()}

    # Weights of 1 and 4: ESS 25 / (2 · 17) of sequences and of tokens. A² of 1 and 4: signal (1 + 16) / 5.
    whole = found["Seq-TIS 4"]
    assert (whole.token_ess, whole.sequence_ess) == pytest.approx((25 / 34, 25 / 34))
    assert (whole.kept, whole.mean_weight, whole.signal) == pytest.approx((1.0, 2.5, 3.4))

    # Token weights of 1 and 2. The band of the product rejects the second row, and so does k3 above 0.01.
    assert found["Token-TIS 2"].sequence_ess == pytest.approx(9 / 10)
    assert found["Token-TIS 2"].signal == pytest.approx(9 / 5)
    for name in ("Seq-MIS", "geometric band", "k3 + token"):
        assert (found[name].kept, found[name].signal) == pytest.approx((0.5, 0.2)), name


def test_candidates_do_not_depend_on_batches():
    train, rollout = noise(64, 20, 0.2)
    advantages = torch.randn(64, 20, generator=torch.Generator().manual_seed(1))
    whole = totals_of(train, rollout, advantages=advantages)
    parts = slice(0, 32), slice(32, 64)
    first, last = (totals_of(train[rows], rollout[rows], advantages=advantages[rows]) for rows in parts)
    for one, other in zip(whole.table(), first.merge(last).table(), strict=True):
        for key in ("kept", "mean_weight", "token_ess", "sequence_ess", "signal", "bias"):
            assert getattr(one, key) == pytest.approx(getattr(other, key), rel=1e-9), key


def test_bias_shows_where_history_matters():
    """A rare first token decides the reward, and π takes it three times as often as μ."""
    random = torch.Generator().manual_seed(0)
    rare = torch.rand(4000, generator=random) < 0.2
    rollout = torch.full((4000, 8), -1.0)
    train = rollout.clone()
    train[:, 0] += torch.where(rare, np.log(3.0), np.log(0.5)).float()
    advantages = torch.where(rare, 1.0, -0.25)[:, None].expand(4000, 8)
    found = {row.name: row for row in totals_of(train, rollout, advantages=advantages).table()}
    assert found["none"].bias > found["Token-TIS 20"].bias > 0.2
    assert found["Token-TIS 20"].bias > found["horizon 0.9"].bias
    assert found["Seq-TIS 4"].bias == 0


def test_noise_alone_shows_no_bias():
    random = np.random.default_rng(0)
    resolved = [is_resolved(random.normal(size=(16, 256))) for _ in range(200)]
    assert 2 <= sum(resolved) <= 20
    assert is_resolved(random.normal(size=(16, 256)) + 1)


def test_the_variance_is_the_mean_over_half_splits():
    """Over all splits of 4 folds into halves: |one − other|²."""
    folds = np.random.default_rng(0).normal(size=(4, 3))
    splits = [np.array(signs) for signs in ([1, 1, -1, -1], [1, -1, 1, -1], [1, -1, -1, 1])]
    halves = np.mean([((signs @ folds) ** 2).sum() for signs in splits])
    size, variance = squared_size(folds)
    assert variance == pytest.approx(halves)
    assert size == pytest.approx((folds.sum(0) ** 2).sum() - halves)


def test_without_advantages_candidates_have_no_signal():
    rows = totals_of(*noise(32, 10, 0.1)).table()
    assert {(row.signal, row.noise, row.bias) for row in rows} == {(None, None, None)}


def test_a_correction_that_keeps_few_tokens_is_rejected():
    """k3 rejection at 0.01 keeps almost no token where σ²/2 is 0.02."""
    train, rollout = noise(300, 100, 0.2)
    rows = totals_of(train, rollout).table()
    kept = {row.name: row.kept for row in rows}["k3 + token"]
    assert kept < 0.05
    choice = rule.choose(rows)
    assert f"k3 + token (decoupled_k3_rs_token_tis) keeps {kept:.1%} of the tokens: rejected" in " ".join(
        choice.reasons
    )


def test_the_yaml_is_the_configuration(tmp_path, monkeypatch):
    monkeypatch.setattr("rollcorr.diagnostics.advice.advisor._faults", lambda result, expected: ())
    advice = advise(noisy_log(tmp_path / "log.parquet", 0.05))
    assert resolve(load_yaml(advice.yaml)) == advice.config == CANDIDATES["Seq-TIS 4"].config
    document = json.loads(advice.to_json())
    assert (document["preset"], document["yaml"]) == (advice.preset, advice.yaml)
    assert [row["name"] for row in document["candidates"]] == list(CANDIDATES)


def test_candidates_are_the_corrections_of_the_bench():
    """Each arm of the training bench is a candidate with the same weights and rejection."""
    train, rollout = noise(50, 30, 0.1)
    cells = runpy.run_path(str(ROOT / "experiments" / "mismatch_in_practice" / "trained_cell.py"))["CORRECTIONS"]
    names = (
        "Token-TIS 2",
        "Token-TIS 20",
        "Seq-TIS 4",
        "horizon 0.9",
        "geometric band",
        "geometric + token",
        "Seq-MIS",
    )
    for name, arm in zip(
        names, ("token_tis", "token_tis_20", "seq_tis", "horizon", "geo_rs", "geo_rs_token_tis", "seq_mis"), strict=True
    ):
        text = cells[arm][0].partition("=")[2]
        config = resolve(load_yaml(text))
        own, arms = (correct(train, rollout, torch.ones(50, 30), one) for one in (CANDIDATES[name].config, config))
        assert torch.equal(own.loss_mask, arms.loss_mask), name
        if own.weights is not None:
            assert torch.equal(own.weights, arms.weights), name


def test_the_limits_come_from_trained_cells():
    """The committed table has the committed cells, and the rule has its limits."""
    script = runpy.run_path(str(ROOT / "experiments" / "bench" / "advice_evidence.py"))
    table = script["read_evidence"]()
    assert [{key: str(value) for key, value in row.items()} for row in script["evidence_rows"]()] == table
    assert script["limits"](table) == {
        name: getattr(rule, name) for name in ("NEGLIGIBLE_ESS", "LOWEST_ESS", "LOWEST_MEAN", "FEWEST_KEPT")
    }


def test_too_little_data_is_not_advised_on(tmp_path):
    advice = advise(noisy_log(tmp_path / "log.parquet", 0.1, rows=8))
    assert (advice.decision, advice.exit_code) == ("not judged", 3)
    assert advice.reasons == ("too little data: 8 sequences, and 16 are needed",)


def test_a_log_that_was_not_judged_is_not_corrected(tmp_path):
    """Also one of other weights whose token ids are no evidence."""
    advice = advise(noisy_log(tmp_path / "log.parquet", 0.01, judged=False))
    assert (advice.decision, advice.preset, advice.exit_code) == ("not judged", None, 3)
    assert "weights not judged" in advice.reasons[0]
    rows = [{**row, "response_ids": None} for row in rollouts(rows=96, weights=0.02, seed=6)]
    other_weights = check_logs([write_rows(tmp_path / "weights.parquet", rows)])
    assert not other_weights.causes
    assert advise(other_weights).preset is None

    # The user may know that the weights are old or rounded.
    measured = check_logs([tmp_path / "weights.parquet"], candidates=True)
    assert advise(measured, intended=True).candidate == "Seq-TIS 4"


def test_the_rules_are_those_of_the_page():
    page = CHOOSING.read_text(encoding="utf-8").partition("## By the log")[2].partition("\n## ")[0]
    for limit in (rule.NEGLIGIBLE_ESS, rule.LOWEST_ESS, rule.LOWEST_MEAN, rule.FEWEST_KEPT * 100):
        assert f"{limit:g}" in page
    for name in ("Seq-TIS 4", "Token-TIS 2"):
        assert name in page
