"""Nulls that can be trusted: which are doubtful, which are declared, how they add up, and when to measure again."""

from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from rollcorr.cli import app
from rollcorr.diagnostics import check_logs, null_of_logs, read_null
from rollcorr.diagnostics.null import NullMismatchError, noise_of
from rollcorr.run_directory.stored_run import BadInputError
from tests.diagnostics.null_logs import rollouts, write_rows


def invoke(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("nulls")


@pytest.fixture(scope="module")
def honest(folder):
    """Rollouts of equal weights, of steps 3 and 4."""
    rows = [{**row, "step": 3 + index % 2} for index, row in enumerate(rollouts(rows=96, seed=100))]
    return write_rows(folder / "honest.parquet", rows)


def few_tokens(rows):
    """The same rows with the ids of 8 tokens only."""
    return [{**row, "response_ids": [i % 8 for i in row["response_ids"]]} for row in rows]


def without_ids(rows):
    return [{name: value for name, value in row.items() if name != "response_ids"} for row in rows]


@pytest.mark.parametrize(("change", "reason"), [(few_tokens, "repeat"), (without_ids, "without token ids")])
def test_a_null_that_ids_cannot_judge_is_unvetted(tmp_path, change, reason):
    path = write_rows(tmp_path / "null.parquet", change(rollouts(rows=64, seed=100)))
    null_of_logs([path]).save(tmp_path / "null.json")
    null = read_null(tmp_path / "null.json")
    assert reason in null.unvetted

    # Every verdict mentions it: that of a log, and that of a run.
    result = check_logs([write_rows(tmp_path / "log.parquet", change(rollouts()))], null=null)
    assert (result.health.verdict, result.health.judged_against) == ("healthy", "null.json (unvetted)")
    assert f"null.json is unvetted: {null.unvetted}" in result.remarks
    assert (noise_of(null).source, noise_of(null).is_null) == ("null.json (unvetted)", True)


def test_a_null_of_other_weights_is_never_healthy(tmp_path):
    """An update of the context's part explains little by id, and its log agreed with it: `healthy`."""
    other = {"noise": 0.3}
    null = null_of_logs([write_rows(tmp_path / "null.parquet", rollouts(rows=64, seed=100, **other))])
    assert "more than rounding to 16 bits" in null.doubted
    result = check_logs([write_rows(tmp_path / "log.parquet", rollouts(**other))], null=null)
    assert (result.health.verdict, result.health.exit_code) == ("not judged", 3)
    assert next(finding.code for finding in result.hypotheses) == "measure_null_again"
    assert "is doubtful" in result.health.not_judged[0]
    assert not noise_of(null).is_null

    # A real excess over it stays one.
    worse = check_logs([write_rows(tmp_path / "worse.parquet", rollouts(weights=0.6, **other))], null=null)
    assert worse.health.verdict == "unhealthy"


def test_a_null_that_ids_explain_in_part_is_doubtful(tmp_path):
    """A stale head of small size: below the limit at which it is refused."""
    null = null_of_logs([write_rows(tmp_path / "null.parquet", stale_head(0.008, rows=96))])
    assert "the token id explains" in null.doubted
    result = check_logs([write_rows(tmp_path / "log.parquet", stale_head(0.008, seed=2))], null=null)
    assert result.health.verdict == "not judged"


def stale_head(size, **options):
    """Rows whose trainer adds to log π a value of each id."""
    moved = size * np.random.default_rng(9).normal(size=64)
    rows = rollouts(**options)
    for row in rows:
        row["old_log_prob"] = [x + moved[i] for x, i in zip(row["old_log_prob"], row["response_ids"], strict=True)]
    return rows


def test_a_quantized_engine_is_declared(tmp_path):
    rows = stale_head(0.3, rows=64)
    path = write_rows(tmp_path / "null.parquet", rows)
    refused = invoke("null", path, "-o", tmp_path / "null.json")
    assert (refused.exit_code, "these rollouts are no null" in refused.stderr) == (2, True)
    done = invoke("null", path, "-o", tmp_path / "null.json", "--engine-precision", "int4")
    assert done.exit_code == 0
    assert "note: null.json is of an engine that was declared int4" in done.stdout

    # The remark stays in the file, and in every verdict.
    null = read_null(tmp_path / "null.json")
    result = check_logs([write_rows(tmp_path / "log.parquet", stale_head(0.3, seed=3))], null=null)
    assert (result.health.verdict, result.health.judged_against) == ("healthy", "null.json (int4)")
    assert any("declared int4" in remark for remark in result.remarks)
    with pytest.raises(BadInputError, match="'bf16' is none of fp8, int8, fp4, int4"):
        null_of_logs([path], engine_precision="bf16")


def test_a_declared_precision_explains_a_large_mismatch(tmp_path):
    """Ranges and "unexplained" named what the null had measured: the log of a declared int4 engine was unhealthy."""
    path = write_rows(tmp_path / "null.parquet", rollouts(weights=0.5, rows=64, seed=100))
    null = null_of_logs([path], engine_precision="int4")
    same = check_logs([write_rows(tmp_path / "log.parquet", rollouts(weights=0.5))], null=null)
    assert same.metrics["rollout_corr/k3_kl"] > 0.1
    assert (same.health.verdict, same.health.warnings) == ("healthy", ())
    measured = {(finding.code, finding.metric) for finding in same.health.findings if finding.follows_from}
    assert measured >= {("out_of_range", "kl"), ("unexplained", None)}

    # A larger mismatch stays a finding, and so does that of an engine without a declaration.
    more = check_logs([write_rows(tmp_path / "more.parquet", rollouts(weights=1.2))], null=null)
    assert more.health.verdict == "unhealthy"
    undeclared = check_logs([tmp_path / "log.parquet"], null=replace(null, engine_precision=""))
    assert undeclared.health.verdict == "unhealthy"


def test_steps_that_are_no_null_are_not_used(tmp_path):
    """`--null-steps` passes the guard of `rollcorr null`."""
    rows = [{**row, "step": 1 + index // 32} for index, row in enumerate(stale_head(0.3, rows=128))]
    result = check_logs([write_rows(tmp_path / "log.parquet", rows)], null_steps=(1, 2))
    assert (result.null, result.causes[0].code) == (None, "weights_differ")


def test_a_sharper_policy_asks_for_a_new_null(tmp_path, honest):
    """Twice the null without support from ids: noise of a sharper policy, or weights."""
    null = null_of_logs([honest], name="null.json")
    log = write_rows(tmp_path / "log.parquet", rollouts(noise=0.029))
    result = check_logs([log], null=null)
    assert 1.5 < result.hypotheses[0].evidence["ratio"] < 3
    assert (result.health.verdict, result.hypotheses[0].code) == ("not judged", "measure_null_again")
    assert result.causes == ()
    assert result.health.not_judged[0].endswith(
        "measure the null again: rollcorr null --engine NAME --model DIR --prompts LOG -o NULL"
    )

    # The ids support other weights of the same size.
    weights = check_logs([write_rows(tmp_path / "weights.parquet", stale_head(0.02))], null=null)
    assert weights.health.verdict == "unhealthy"


def test_null_files_add_up(tmp_path, folder, honest):
    later = [{**row, "step": 40} for row in rollouts(rows=32, seed=7)]
    other = write_rows(tmp_path / "later.parquet", later)
    for name, path in (("a.json", honest), ("b.json", other)):
        null_of_logs([path]).save(tmp_path / name)
    assert invoke("null", tmp_path / "a.json", tmp_path / "b.json", "-o", tmp_path / "c.json").exit_code == 0
    both, whole = read_null(tmp_path / "c.json"), null_of_logs([honest, other])
    assert (both.profile.tokens, both.profile.row_count) == (whole.profile.tokens, 128)
    np.testing.assert_allclose(both.profile.cells, whole.profile.cells, rtol=1e-12)
    assert len(both.profile.rows) == len(both.sample) == 128
    assert both.share.share == pytest.approx(whole.share.share, abs=0.01)
    assert [(part.first_step, part.last_step, part.rows) for part in both.measured] == [(3, 4, 96), (40, 40, 32)]
    assert invoke("null", tmp_path / "a.json", "--steps", "1:2", "-o", tmp_path / "d.json").exit_code == 2


def test_nulls_of_other_engines_do_not_add_up(honest):
    null = null_of_logs([honest])
    with pytest.raises(NullMismatchError, match="other engine precision: none and int4"):
        null.merge(replace(null, engine_precision="int4"))
    with pytest.raises(NullMismatchError, match="other sides: run and engine"):
        null.merge(replace(null, sides="engine", origin=replace(null.origin)))
