"""Entropies of the sampler show whether tokens were drawn from the logged log-probs."""

import numpy as np
import pytest
from null_logs import VOCABULARY, log_softmax, logits, write_rows

from rollcorr.diagnostics import check_logs, null_of_logs
from rollcorr.diagnostics.log_check.check import Measurement
from rollcorr.rollout_log import read_rollout_log


def drawn(temperatures, *, rows=24, length=60, seed=3, noise=0.02):
    """Rows of one step for each temperature at which tokens are drawn; log-probs and entropies are of temperature 1."""
    random, table, found = np.random.default_rng(seed), logits(), []
    for step, temperature in enumerate(temperatures, start=1):
        current = random.integers(VOCABULARY, size=rows)
        ids, rollout, train, entropy = [], [], [], []
        for _ in range(length):
            raw = log_softmax(table[current] + noise * random.normal(size=(rows, VOCABULARY)))
            from_ = np.exp(log_softmax(raw / temperature)).cumsum(-1)
            token = (random.random(rows)[:, None] > from_ / from_[:, -1:]).sum(-1)
            ids.append(token)
            rollout.append(raw[np.arange(rows), token])
            train.append(log_softmax(table[current])[np.arange(rows), token])
            entropy.append(-(np.exp(raw) * raw).sum(-1))
            current = token
        columns = [np.stack(x, axis=1) for x in (ids, rollout, train, entropy)]
        names = ("response_ids", "rollout_log_prob", "old_log_prob", "rollout_entropy")
        found += [
            {"step": step} | {name: x[row].tolist() for name, x in zip(names, columns, strict=True)}
            for row in range(rows)
        ]
    return found


@pytest.fixture(scope="module")
def null(tmp_path_factory):
    path = tmp_path_factory.mktemp("null") / "null.parquet"
    return null_of_logs([write_rows(path, drawn([1.0] * 4, seed=5), sampling=None)])


def checked(tmp_path, null, rows, name="log"):
    return check_logs([write_rows(tmp_path / f"{name}.parquet", rows, sampling=None)], null=null)


def test_a_temperature_of_the_sampler_alone(tmp_path, null):
    """Both sides log raw log-probs, which agree: only the tokens show that they were drawn at 0.6 from step 5 on."""
    result = checked(tmp_path, null, drawn([1.0] * 4 + [0.6] * 4))
    (cause,) = result.causes
    assert (cause.code, cause.first_step, cause.steps) == ("not_the_sampled_distribution", 5, 4)
    assert cause.evidence["z"] < -5
    assert result.health.verdict == "unhealthy"


def test_entropies_replace_the_record_of_settings(tmp_path, null):
    rows = drawn([1.0] * 6)
    assert checked(tmp_path, null, rows).health.verdict == "healthy"
    without = [{name: row[name] for name in row if name != "rollout_entropy"} for row in rows]
    result = checked(tmp_path, null, without, "without")
    assert result.health.verdict == "not judged"
    assert "whether tokens were drawn from them is not judged" in result.health.not_judged[0]


def test_few_entropies_are_no_test(tmp_path, null):
    rows = [row | {"rollout_entropy": [float("nan")] * 60} for row in drawn([0.6] * 2)]
    rows[0]["rollout_entropy"] = [3.0] * 60
    result = checked(tmp_path, null, rows)
    assert not result.causes
    assert result.health.verdict == "not judged"


def test_sums_of_draws_by_hand(tmp_path):
    rows = [
        {"step": 7, "rollout_log_prob": [-1.0, -2.0], "old_log_prob": [-1.0, -2.0], "rollout_entropy": [1.5, 1.0]},
        {"step": 8, "rollout_log_prob": [-3.0], "old_log_prob": [-3.0], "rollout_entropy": [float("nan")]},
    ]
    (batch,) = read_rollout_log(write_rows(tmp_path / "log.parquet", rows))
    measure = Measurement(config=check_logs([tmp_path]).config, train_column="old_log_prob", batch_size=9)
    assert {step: tuple(sums) for step, sums in measure.of_batch(batch, first=0).draws.items()} == {
        7: (2.0, 0.5, 1.25, 2.5),
        8: (0.0, 0.0, 0.0, 0.0),
    }
