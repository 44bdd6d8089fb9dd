"""Routed experts: the column, and the cause. The logs are synthetic: no mixture-of-experts model runs here."""

import numpy as np
import pytest
import torch
from null_logs import rollouts, write_rows

from rollcorr.diagnostics import check_logs
from rollcorr.diagnostics.log_check import null_of_logs
from rollcorr.diagnostics.null.routing import RoutingSums, routing_excess
from rollcorr.diagnostics.null.token_ratios import TokenRatios
from rollcorr.rollout_log import RolloutBatch, RolloutLogWriter, read_rollout_log, routing_difference


def routed(rows, *, share=0.05, size=0.5, seed=9, recorded=True):
    """The rows with another routing on a share of the tokens, which moves their log-probs by `size` nats."""
    random = np.random.default_rng(seed)
    changed = []
    for row in rows:
        train = np.array(row["old_log_prob"])
        other = random.random(len(train)) < share
        train = np.minimum(train + np.where(other, size * random.normal(size=len(train)), 0.0), -1e-4)
        layers = np.where(other, random.integers(1, 9, size=len(train)) / 24, 0.0)
        column = {"routing_difference": layers.tolist()} if recorded else {}
        changed.append({**row, "old_log_prob": train.tolist(), **column})
    return changed


def hypotheses(log, null=None):
    return {finding.code: finding for finding in check_logs([log], null=null).hypotheses}


@pytest.fixture(scope="module")
def null(tmp_path_factory):
    return null_of_logs([write_rows(tmp_path_factory.mktemp("null") / "log.parquet", rollouts(seed=2))])


def test_experts_in_another_order_are_the_same_and_unknown_ones_are_not_counted():
    rollout = torch.tensor([[[3, 1], [0, 2]], [[3, 1], [0, 2]], [[-1, -1], [0, 2]]])
    train = torch.tensor([[[1, 3], [2, 0]], [[1, 3], [2, 5]], [[1, 3], [2, 0]]])
    share = routing_difference(rollout, train)
    assert share[:2].tolist() == [0.0, 0.5]
    assert share[2].isnan()
    with pytest.raises(ValueError, match=r"give \(…, L, K\) for both"):
        routing_difference(rollout, train[:, :1])


def test_the_column_is_written_and_read(tmp_path):
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    share = torch.tensor([[0.0, 0.25, float("nan")], [1.0, 0.0, 0.0]])
    with RolloutLogWriter(tmp_path / "log.parquet") as log:
        log.write(RolloutBatch.from_padded(mask, rollout_log_prob=-mask.float(), routing_difference=share))
    (batch,) = read_rollout_log(tmp_path / "log.parquet")
    np.testing.assert_array_equal(batch.packed("routing_difference").numpy(), [0, 0.25, np.nan, 1, 0])


def test_what_routing_adds_is_measured_against_equally_probable_tokens():
    """Half of the tokens have d = 0.2 and a different routing, the rest d = 0.1: four times the k3, about."""
    rollout = np.full(4000, -1.0, dtype=np.float32)
    other = np.arange(4000) % 2 == 1
    d = np.where(other, 0.2, 0.1).astype(np.float32)
    ratios = TokenRatios.of(rollout + d, rollout, np.ones(4000, dtype=bool), np.full(40, 100))
    sums = RoutingSums.of(ratios, np.where(other, 0.25, 0.0).astype(np.float32))
    found = routing_excess(sums)
    same, differing = np.expm1(0.1) - 0.1, np.expm1(0.2) - 0.2
    assert found["routing_ratio"] == pytest.approx(differing / same, rel=1e-5)
    assert found["k3_share"] == pytest.approx((differing - same) / (differing + same), rel=1e-5)
    assert (found["tokens"], found["token_share"], found["layer_share"]) == (2000, 0.5, 0.125)

    parts = [RoutingSums.of(ratios.of_rows(np.arange(40) % 2 == half), sums_of(other, half)) for half in (0, 1)]
    np.testing.assert_allclose(parts[0].merge(parts[1]).cells, sums.cells)


def sums_of(other, half):
    rows = np.arange(40) % 2 == half
    return np.where(other, 0.25, 0.0).astype(np.float32)[np.repeat(rows, 100)]


def test_tokens_with_other_routing_that_carry_the_excess_are_the_cause(null, tmp_path):
    log = write_rows(tmp_path / "log.parquet", routed(rollouts(seed=3)))
    found = hypotheses(log, null)
    assert next(iter(found)) == "moe_routing_differs"
    cause = found["moe_routing_differs"]
    assert 0 < cause.value < 1, "the value of k3_kl is a k3, and its ratio is evidence"
    assert cause.evidence["routing_ratio"] > 3
    assert cause.severity == "warning"
    assert cause.evidence["k3_share"] > 0.9
    assert "router replay" in cause.fix
    others = [finding for finding in found.values() if finding.severity != "note" and finding is not cause]
    assert [finding.code for finding in others] == ["stochastic_trainer"]
    assert others[0].follows_from == "moe_routing_differs"

    # Without a null the tokens with the same routing stand in for it.
    assert hypotheses(log)["moe_routing_differs"].severity == "warning"
    assert check_logs([log]).health.verdict == "unhealthy"


def test_without_the_column_nothing_is_said_about_routing(null, tmp_path):
    log = write_rows(tmp_path / "log.parquet", routed(rollouts(seed=3), recorded=False))
    assert "moe_routing_differs" not in hypotheses(log, null)


def test_routing_that_makes_no_difference_is_no_finding(null, tmp_path):
    log = write_rows(tmp_path / "log.parquet", routed(rollouts(seed=4), size=0.0))
    result = check_logs([log], null=null)
    assert "moe_routing_differs" not in {finding.code for finding in result.hypotheses}
    assert result.health.verdict == "healthy"


def test_other_weights_stay_the_cause_where_the_same_routing_differs_too(null, tmp_path):
    log = write_rows(tmp_path / "log.parquet", routed(rollouts(seed=5, weights=0.15), size=0.9))
    found = hypotheses(log, null)
    assert next(iter(found)) == "weights_differ"
    assert found["weights_differ"].follows_from is None
    assert found["moe_routing_differs"].severity == "note"


def test_routing_noise_that_the_null_has_too_is_a_note(tmp_path):
    noisy = null_of_logs([write_rows(tmp_path / "null.parquet", routed(rollouts(seed=6)))])
    log = write_rows(tmp_path / "log.parquet", routed(rollouts(seed=7), seed=10))
    result = check_logs([log], null=noisy)
    assert result.health.verdict == "healthy"
    found = {finding.code: finding for finding in result.health.findings}
    assert found["moe_routing_differs"].severity == "note"
