"""The few tokens that carry most of k3 of a log: found in every shard, and shown first."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from rollcorr.cli import app
from rollcorr.diagnostics import check_logs
from rollcorr.diagnostics.log_check.log_totals import MOST, WorstTokens
from rollcorr.diagnostics.null.token_ratios import TokenRatios, k3_of
from tests.diagnostics.null_logs import rollouts, write_rows


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """A log with two wrong tokens of 11,520."""
    rows = rollouts(rows=96)
    rows[7]["rollout_log_prob"][3] = rows[7]["old_log_prob"][3] - 4
    rows[90]["rollout_log_prob"][119] = rows[90]["old_log_prob"][119] - 3
    return write_rows(tmp_path_factory.mktemp("worst") / "log.parquet", rows), rows


def test_two_tokens_that_carry_k3_are_shown_first(log):
    path, rows = log
    result = CliRunner().invoke(app, ["check", str(path)], env={"COLUMNS": "120"})
    lines = result.stdout.splitlines()
    line = lines.index("2 of 11,520 tokens carry 97% of k3: look at them first")
    assert line == 3, "right below the verdict"
    assert lines[line + 2].split()[:3] == ["7", "3", str(rows[7]["response_ids"][3])]

    document = json.loads(CliRunner().invoke(app, ["check", str(path), "--json"]).stdout)
    worst, second = document["worst_tokens"]
    assert (worst["row"], worst["position"], second["row"], second["position"]) == (7, 3, 90, 119)
    assert worst["train_log_prob"] - worst["rollout_log_prob"] == pytest.approx(4, abs=1e-5)
    assert worst["share"] > second["share"] > 0.2


def test_worst_tokens_do_not_depend_on_the_batches(log):
    path, _ = log
    whole, parts = (check_logs([path], batch_size=size).worst_tokens for size in (256, 7))
    assert [token[:5] for token in whole] == [token[:5] for token in parts]
    assert len(whole) == 2


def test_ordinary_noise_has_no_worst_tokens(tmp_path):
    assert check_logs([write_rows(tmp_path / "log.parquet", rollouts())]).worst_tokens == ()


def test_merged_worst_tokens_are_those_of_the_whole():
    random = np.random.default_rng(0)
    rollout = -random.random(60, dtype=np.float32)
    train = rollout + random.normal(size=60).astype(np.float32)
    mask, ids = random.random(60) < 0.8, np.arange(60)

    def worst(rows):
        of = slice(6 * rows.start, 6 * rows.stop)
        lengths = np.full(rows.stop - rows.start, 6)
        index = np.arange(rows.start, rows.start + len(lengths))
        return WorstTokens.of(TokenRatios.of(train[of], rollout[of], mask[of], lengths, index=index, ids=ids[of]))

    merged = worst(slice(0, 3)).merge(worst(slice(3, 10)))
    np.testing.assert_array_equal(merged.values, worst(slice(0, 10)).values)
    k3 = np.where(mask, k3_of((train - rollout).astype(float)), 0)
    assert merged.values[3].tolist() == np.argsort(-k3)[:MOST].tolist()
    assert (merged.values[1] * 6 + merged.values[2]).tolist() == merged.values[3].tolist()
