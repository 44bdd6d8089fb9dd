"""A null on disk and in a check: what it refuses, what it lets be judged, and which cause an excess gets."""

import json

import numpy as np
import pytest
import torch

from rollcorr.diagnostics import advise, calibrate, check_logs, null_of_logs, read_null
from rollcorr.diagnostics.null import noise_beside, other_rows
from rollcorr.diagnostics.null.excess import Excess
from rollcorr.diagnostics.null.null_file import NullMismatchError
from rollcorr.diagnostics.null.token_share import FIRST_IDS, TokenShare, TokenSums
from rollcorr.diagnostics.null.weight_judgment import _token_id_explains_excess
from rollcorr.diagnostics.provenance.pair_sample import PairSample
from rollcorr.run_directory.stored_run import BadInputError
from tests.diagnostics.null_logs import rollouts, write_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("null")


@pytest.fixture(scope="module")
def null(folder):
    """The null of the engine whose noise all logs here have."""
    return null_of_logs([write_rows(folder / "null.parquet", rollouts(rows=96, seed=100))])


def first_cause(result):
    return next((finding.code for finding in result.hypotheses if finding.severity != "note"), None)


def test_a_null_survives_the_disk(folder, null):
    null.save(folder / "null.json")
    read = read_null(folder / "null.json")
    for name in ("cells", "sizes", "row_count"):
        np.testing.assert_array_equal(getattr(read.profile, name), getattr(null.profile, name))
    np.testing.assert_array_equal(read.profile.ids.sums, null.profile.ids.folded().sums)
    np.testing.assert_allclose(read.profile.rows.values, null.profile.rows.values, rtol=1e-5)
    assert read.share == null.share
    assert (read.origin, read.kind, read.name) == (null.origin, "log", "null.json")
    assert len(read.sample) == 96
    np.testing.assert_allclose(np.concatenate(read.sample), np.concatenate(null.sample), rtol=1e-5, atol=1e-12)

    document = json.loads((folder / "null.json").read_text(encoding="utf-8"))
    assert (document["format"], document["version"]) == ("rollcorr-null", 2)
    assert document["counts"] == {"rows": 96, "tokens": 96 * 120, "missing": 0}
    assert document["summary"]["k3"] == pytest.approx(null.profile.k3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no JSON"),
        ("[]", "no null"),
        ('{"format": "rollcorr-null", "version": 99}', "version 99 of the format, and this release reads 2"),
        ('{"format": "rollcorr-null", "version": 2}', "a damaged null"),
    ],
)
def test_what_is_no_null_is_refused(tmp_path, text, message):
    path = tmp_path / "null.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadInputError, match=message):
        read_null(path)


def test_a_null_with_a_wrong_array_is_damaged(tmp_path, null):
    document = json.loads(null.to_json())
    document["profile"]["sizes"] = [[0.0]]
    (tmp_path / "null.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(BadInputError, match=r"a damaged null.*shape"):
        read_null(tmp_path / "null.json")


def test_a_null_that_is_not_there_says_how_to_make_one(tmp_path):
    with pytest.raises(BadInputError, match=r"rollcorr null LOG -o null\.json"):
        read_null(tmp_path / "null.json")


@pytest.mark.parametrize(
    ("of_null", "of_log", "refused"),
    [
        ({"engine": "vllm"}, {"engine": "sglang"}, True),
        ({"sampling": {"temperature": 1.0}}, {"sampling": {"temperature": 0.7, "logprobs": "processed"}}, True),
        ({"engine": "vllm", "engine_version": "1"}, {"engine": "vllm", "engine_version": "2"}, False),
        ({"engine": "vllm", "model": "a"}, {"engine": "vllm", "model": "b"}, False),
        ({"engine": "vllm"}, {}, False),
    ],
)
def test_a_foreign_null_is_refused_and_a_doubtful_one_is_named(tmp_path, of_null, of_log, refused):
    rows = rollouts(rows=16, length=80)
    null = null_of_logs([write_rows(tmp_path / "null.parquet", rows, **of_null)])
    log = write_rows(tmp_path / "log.parquet", rows, **of_log)
    if refused:
        with pytest.raises(NullMismatchError, match="measure a null with the settings of this log"):
            check_logs([log], null=null)
    else:
        remarks = " ".join(check_logs([log], null=null).remarks)
        assert "was measured with" in remarks or "is not recorded" in remarks


@pytest.mark.parametrize(
    ("sides", "words"), [("engine", "the engine with itself"), ("trainer", "the trainer with itself")]
)
def test_a_null_of_one_side_alone_is_kept_as_such_and_refused_for_a_run(tmp_path, sides, words):
    """It shows less than a run does, so the ordinary noise of a run would be taken for other weights."""
    log = write_rows(tmp_path / "log.parquet", rollouts(rows=16, length=80))
    null_of_logs([log], kind="engine", sides=sides).save(tmp_path / "null.json")
    one_sided = read_null(tmp_path / "null.json")
    assert one_sided.sides == sides
    refused = f"measured with --sides {sides}: it compares {words}.*measure a null with --sides run"
    with pytest.raises(NullMismatchError, match=refused):
        check_logs([log], null=one_sided)
    with pytest.raises(NullMismatchError, match=refused):
        calibrate(one_sided)
    with pytest.raises(NullMismatchError, match=refused):
        noise_beside(tmp_path)


def test_unknown_sides_are_a_damaged_null(tmp_path):
    log = write_rows(tmp_path / "log.parquet", rollouts(rows=16, length=80))
    document = json.loads(null_of_logs([log]).to_json())
    (tmp_path / "null.json").write_text(json.dumps(document | {"sides": "both"}), encoding="utf-8")
    with pytest.raises(BadInputError, match=r"a damaged null .sides 'both' is none of run, engine, trainer"):
        read_null(tmp_path / "null.json")


def test_a_null_of_another_vocabulary_is_refused(tmp_path, null):
    rows = [{**row, "response_ids": [i + 5_000 for i in row["response_ids"]]} for row in rollouts(rows=8)]
    with pytest.raises(NullMismatchError, match="another vocabulary"):
        check_logs([write_rows(tmp_path / "log.parquet", rows)], null=null)


def test_a_log_with_other_settings_makes_no_null(tmp_path):
    log = write_rows(tmp_path / "log.parquet", rollouts(rows=64, temperature=0.6))
    with pytest.raises(BadInputError, match="these rollouts are no null"):
        null_of_logs([log])


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.7, "logprobs": "raw"}, {"top_p": 0.9, "logprobs": "raw"}],
    ids=lambda one: next(iter(one)),
)
def test_recorded_settings_that_contradict_themselves_make_no_null(tmp_path, settings):
    """Raw log-probs of a tempered sampler are of what was never sampled, however well the two sides agree."""
    log = write_rows(tmp_path / "log.parquet", rollouts(rows=64), sampling=settings)
    name, value = next(iter(settings.items()))
    with pytest.raises(
        BadInputError, match=f"these rollouts are no null: .*recorded sampling settings.*{name}.?{value}"
    ):
        null_of_logs([log])


def test_rollouts_whose_token_id_explains_the_mismatch_make_no_null(tmp_path):
    """Such weights differ on both sides: a null of them would call the fault ordinary."""
    with pytest.raises(BadInputError, match="these rollouts are no null: the weights of the sampler"):
        null_of_logs([write_rows(tmp_path / "log.parquet", rollouts(rows=64, weights=0.5))])


def test_without_a_null_a_log_is_never_healthy(tmp_path):
    result = check_logs([write_rows(tmp_path / "log.parquet", rollouts())])
    assert result.health.verdict == "not judged"
    assert result.health.exit_code == 3
    assert "weights not judged" in result.health.not_judged[0]


def test_with_a_null_a_log_of_the_same_weights_is_healthy(tmp_path, null):
    for seed in range(3):
        result = check_logs([write_rows(tmp_path / f"{seed}.parquet", rollouts(seed=seed))], null=null)
        assert result.health.verdict == "healthy"
        assert result.health.judged_against == null.name
        assert [finding.code for finding in result.health.notes] == ["ordinary_noise"]


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ({"weights": 0.03}, "weights_differ"),
        ({"weights": 0.3}, "weights_differ"),
        ({"dropout": 0.3}, "stochastic_trainer"),
        ({"fading": 0.2}, "stale_prefix_cache"),
        ({"fading": 1.5}, "template"),
        ({"padded": 0.5}, "template"),
    ],
)
def test_each_cause_of_an_excess_is_named(tmp_path, null, fault, code):
    for seed in range(2):
        log = write_rows(tmp_path / f"{seed}.parquet", rollouts(seed=seed, **fault))
        result = check_logs([log], null=null)
        assert result.health.verdict == "unhealthy"
        assert first_cause(result) == code
        assert code in {finding.code for finding in result.health.warnings}


def test_slow_fading_is_another_prompt_unless_the_lengths_of_the_prompts_say_that_it_is_the_same(tmp_path, null):
    """It fades to a sixth; an excess that prompts of 3 and of 29 tokens share is not one of the prompt itself."""
    rows = rollouts(rows=96, fading=0.2, dropout=0.06)
    assert first_cause(check_logs([write_rows(tmp_path / "lengths.parquet", rows)], null=null)) == "stale_prefix_cache"
    alike = [{**row, "prompt_ids": [1] * 9} for row in rows]
    assert first_cause(check_logs([write_rows(tmp_path / "alike.parquet", alike)], null=null)) == "template"


def test_weights_whose_excess_fades_a_little_are_told_from_a_prompt_by_the_last_tokens(tmp_path, null):
    """It fades to a third, as in a response whose context grows; a token and the one before it explain most of it."""
    for seed in range(2):
        log = write_rows(tmp_path / f"{seed}.parquet", rollouts(rows=64, seed=seed, weights=0.1, fading=0.3))
        assert first_cause(check_logs([log], null=null)) == "weights_differ"


def test_without_a_null_weights_are_named_where_the_id_explains_much(tmp_path):
    result = check_logs([write_rows(tmp_path / "log.parquet", rollouts(weights=0.2))])
    assert first_cause(result) == "weights_differ"
    assert result.metrics["log/token_id_share"] > 0.2
    dropout = check_logs([write_rows(tmp_path / "dropout.parquet", rollouts(dropout=0.2))])
    assert dropout.health.verdict == "not judged"
    assert dropout.metrics["log/token_id_share"] < 0.1


def test_a_log_of_three_times_the_null_is_not_healthy_even_from_few_rows(tmp_path, null):
    log = write_rows(tmp_path / "log.parquet", rollouts(rows=3, length=20, noise=0.05))
    result = check_logs([log], null=null)
    assert result.profile.k3 > 3 * null.profile.k3
    assert result.health.verdict == "not judged"
    assert "cannot tell whether the weights agree" in result.health.not_judged[0]


def test_a_null_judges_weights_and_the_pairs_settings(tmp_path, null):
    same = check_logs([write_rows(tmp_path / "same.parquet", rollouts())], null=null)
    assert [finding.code for finding in same.hypotheses] == ["ordinary_noise"]
    assert [finding.code for finding in same.health.notes] == ["ordinary_noise"]

    other = check_logs([write_rows(tmp_path / "other.parquet", rollouts(weights=0.03))], null=null)
    assert first_cause(other) == "weights_differ"
    alone = check_logs([write_rows(tmp_path / "alone.parquet", rollouts())])
    assert [finding.title for finding in alone.hypotheses] == ["the log-probs show no other sampling settings"]


def test_a_null_that_is_too_small_is_not_what_the_weights_were_judged_against(tmp_path):
    rows = rollouts(rows=4, length=80)
    small = null_of_logs([write_rows(tmp_path / "null.parquet", rows)])
    result = check_logs([write_rows(tmp_path / "log.parquet", rollouts())], null=small)
    assert "weights not judged: null.json has 4 rows" in " ".join(result.health.not_judged)
    assert result.health.judged_against == ""
    assert [finding.code for finding in result.hypotheses] == ["matched"]


def steps(tmp_path, faults, name="log.parquet"):
    """A log with one entry of `faults` per step."""
    rows = []
    for step, fault in enumerate(faults, start=1):
        rows += [{**row, "step": step} for row in rollouts(rows=12, length=60, seed=step, **fault)]
    return write_rows(tmp_path / name, rows)


def test_the_first_steps_serve_as_the_null_but_are_not_judged_themselves(tmp_path):
    same = check_logs([steps(tmp_path, [{}] * 10)])
    assert same.health.verdict == "not judged"
    assert same.health.not_judged[0].startswith("unchanged since steps 1 to 5 of this log; the start was not judged")
    assert same.health.judged_against == "steps 1 to 5 of this log"

    changed = check_logs([steps(tmp_path, [{}] * 5 + [{"weights": 0.1}] * 5, "changed.parquet")])
    assert changed.health.verdict == "unhealthy"
    assert first_cause(changed) == "weights_differ"
    assert "the start was not judged" in changed.health.not_judged[0]

    few = check_logs([steps(tmp_path, [{}] * 9, "few.parquet")])
    assert few.null is None


def test_first_steps_of_several_ages_serve_as_no_null_unless_they_are_known_to_be_right(tmp_path):
    rows = []
    for step in range(1, 11):
        versions = [{"start": 0, "length": 60, "version": step - step % 3}]
        rows += [{**row, "step": step, "policy_versions": versions} for row in rollouts(rows=12, length=60, seed=step)]
    log = write_rows(tmp_path / "log.parquet", rows)
    result = check_logs([log])
    assert (result.health.verdict, result.health.judged_against) == ("not judged", "")
    assert "steps 1 to 5 of this log have weights of 0 to 2 updates of age" in result.health.not_judged[0]
    assert check_logs([log], null_steps=(1, 5)).health.verdict == "healthy"


def test_steps_that_are_known_to_be_right_let_the_rest_be_healthy(tmp_path):
    log = steps(tmp_path, [{}] * 4)
    result = check_logs([log], null_steps=(1, 2))
    assert (result.health.verdict, result.health.judged_against) == ("healthy", "steps 1 to 2 of this log")
    with pytest.raises(BadInputError, match="no row of steps 7:9 in this log; it has 1 to 4"):
        check_logs([log], null_steps=(7, 9))
    with pytest.raises(BadInputError, match="nothing is left to be judged"):
        check_logs([log], null_steps=(1, 4))
    with pytest.raises(BadInputError, match="exclude each other"):
        check_logs([log], null_steps=(1, 2), null=null_of_logs([log]))


def test_the_share_within_a_step_is_that_of_few_ids():
    random = np.random.default_rng(0)
    ids, log_ratio = random.integers(0, 700, size=3000), random.normal(size=3000)
    exact, few = TokenSums.of(ids, log_ratio), TokenSums.of(ids, log_ratio, limit=1024)
    assert few.share() == exact.share()


def test_a_check_computes_with_one_thread_and_leaves_the_callers_as_they_were(tmp_path, monkeypatch):
    before, seen = torch.get_num_threads(), set()
    estimate = PairSample.estimate
    monkeypatch.setattr(PairSample, "estimate", lambda self: (seen.add(torch.get_num_threads()), estimate(self))[1])
    torch.set_num_threads(3)
    try:
        log = write_rows(tmp_path / "log.parquet", rollouts())
        check_logs([log])
        null_of_logs([log])
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == {1}


@pytest.mark.parametrize(
    ("share", "ratio", "explains"),
    [(0.13, 1.3, False), (0.13, 1.6, True), (0.17, 1.3, True), (0.25, 1.1, True), (0.06, 9.0, False)],
)
def test_a_share_that_a_quantized_engine_may_have_names_no_weights_by_itself(share, ratio, explains):
    def of(value):
        return TokenShare(value, 0.005, value * 1e-3, 1e-3, 10_000, 300)

    excess = Excess(k3=ratio * 1e-3, expected=1e-3, ratio=ratio, z=1.0, share=of(share), null_share=of(0.04))
    assert _token_id_explains_excess(excess) == explains


def test_ids_in_effect_by_hand():
    """Counts 6, 2 and 0: 8² / (36 + 4) = 1.6."""
    sums = TokenSums.of(np.array([0, 0, 0, 0, 0, 0, 1, 1]), np.zeros(8))
    assert sums.effective == pytest.approx(1.6)
    assert sums.repeats
    assert not TokenSums.of(np.arange(20), np.zeros(20)).repeats
    assert not TokenSums.empty().repeats, "without ids nothing is known"


def test_responses_that_repeat_one_token_name_no_cause_by_the_id(tmp_path):
    """A policy that collapsed: the same contexts come again, so rounding is a function of the id, and of the place."""
    random = np.random.default_rng(0)
    rows = []
    for _ in range(32):
        ids = np.where(random.random(60) < 0.9, 7, random.integers(3, 40, size=60))
        rollout = np.where(ids == 7, -0.1, -4.0) + 0.05 * random.normal(size=60).clip(-1, 1)
        train = rollout + np.where(ids == 7, 0.004, -0.012)
        rows.append(
            {
                "prompt_ids": [1, 2],
                "response_ids": ids.tolist(),
                "rollout_log_prob": rollout.tolist(),
                "old_log_prob": train.tolist(),
            }
        )
    result = check_logs([write_rows(tmp_path / "log.parquet", rows)])
    assert result.profile.share.share > 0.9
    assert first_cause(result) is None
    assert "The responses repeat 1.2 tokens" in result.health.not_judged[0]


def shifted(rows, share):
    """The first rows with log-probs that come late by one token."""
    for row in rows[: int(share * len(rows))]:
        row["rollout_log_prob"][1:] = row["rollout_log_prob"][:-1]
    return rows


def constant(rows, share):
    for row in rows[: int(share * len(rows))]:
        row["rollout_log_prob"] = [-1.0] * len(row["rollout_log_prob"])
    return rows


def swapped(rows, share):
    """The first rows have the log-probs of their neighbor."""
    some = rows[: int(share * len(rows))]
    values = [row["rollout_log_prob"] for row in some]
    for row, other in zip(some, [*values[1:], values[0]], strict=True):
        row["rollout_log_prob"] = other
    return rows


def in_log10(rows, share):
    for row in rows[: int(share * len(rows))]:
        row["rollout_log_prob"] = [value / np.log(10) for value in row["rollout_log_prob"]]
    return rows


ROW_FAULTS = [
    (shifted, 0.31, "shifted"),
    (constant, 0.16, "placeholder"),
    (swapped, 0.19, "other_request"),
    (in_log10, 0.31, "wrong_unit"),
]


@pytest.mark.parametrize(("fault", "share", "code"), ROW_FAULTS)
def test_values_of_other_tokens_in_some_rows_do_not_look_like_other_weights(tmp_path, null, fault, share, code):
    log = write_rows(tmp_path / "log.parquet", fault(rollouts(rows=96), share))
    result = check_logs([log], null=null)
    causes = [finding.code for finding in result.hypotheses if finding.severity != "note"]
    assert (causes, result.health.verdict) == ([code], "unhealthy")
    rows = result.hypotheses[0].rows
    assert result.remarks[-1].startswith(
        f"{rows} rows hold values that are not the log-probs of their tokens; the other {96 - rows} rows were compared "
        "with null.json"
    )

    # Their effect on the numbers follows below, and the advice agrees.
    assert {f.follows_from for f in result.health.findings if f.code == "out_of_range"} <= {code, None}
    assert [finding.code for finding in advise(result).repairs][:1] == [code]


def test_other_rows_are_compared_with_first_steps_by_folded_ids_alike(tmp_path, monkeypatch):
    seen = []
    judge = other_rows.judge_weights
    monkeypatch.setattr(
        other_rows, "judge_weights", lambda profile, *a, **k: (seen.append(profile), judge(profile, *a, **k))[1]
    )
    rows = []
    for step in range(1, 11):
        own = rollouts(rows=12, length=60, seed=step)
        rows += [{**row, "step": step} for row in (constant(own, 0.5) if step > 5 else own)]
    rows[0]["response_ids"][0] += FIRST_IDS
    result = check_logs([write_rows(tmp_path / "log.parquet", rows)])
    assert "placeholder" in {finding.code for finding in result.hypotheses}
    assert [profile.ids.limit for profile in seen] == [FIRST_IDS]


@pytest.mark.parametrize(("fault", "share", "code"), ROW_FAULTS)
def test_other_weights_behind_the_other_rows_are_still_found(tmp_path, null, fault, share, code):
    log = write_rows(tmp_path / "log.parquet", fault(rollouts(rows=96, weights=0.1), share))
    causes = [finding.code for finding in check_logs([log], null=null).hypotheses if finding.severity != "note"]
    assert {"weights_differ", code} <= set(causes)


def test_a_mismatch_far_below_the_null_is_not_judged(tmp_path, null):
    log = write_rows(tmp_path / "log.parquet", rollouts(rows=96, noise=0.008))
    health = check_logs([log], null=null).health
    assert (health.verdict, health.exit_code) == ("not judged", 3)
    assert "these are not the log-probs that the null was made of" in " ".join(health.not_judged)


def test_settings_that_contradict_themselves_are_named_before_the_null_is_refused(tmp_path):
    rows, settings = rollouts(rows=64), {"temperature": 0.7, "logprobs": "processed"}
    null = null_of_logs([write_rows(tmp_path / "null.parquet", rows, sampling=settings)])
    log = write_rows(tmp_path / "log.parquet", rows, sampling={**settings, "logprobs": "raw"})
    result = check_logs([log], null=null)
    assert (result.health.verdict, result.health.exit_code, result.null) == ("unhealthy", 1, None)
    assert "temperature 0.7" in result.health.findings[0].reason
    assert any("null.json was not used" in sentence for sentence in result.health.not_judged)


def test_a_path_in_place_of_a_null_is_told_how_to_read_it(tmp_path):
    log = write_rows(tmp_path / "log.parquet", rollouts(rows=4))
    with pytest.raises(TypeError, match="read_null"):
        check_logs([log], null="null.json")


@pytest.mark.parametrize(("weights", "code"), [(0.0, "ordinary_noise"), (0.3, "weights_differ")])
def test_the_value_of_a_finding_on_k3_is_a_k3_and_its_ratio_is_evidence(null, folder, weights, code):
    log = write_rows(folder / f"value_{code}.parquet", rollouts(seed=50, weights=weights))
    result = check_logs([log], null=null)
    finding = next(finding for finding in result.hypotheses if finding.code == code)
    assert finding.metric == "k3_kl"
    assert finding.value == pytest.approx(result.health.values["k3_kl"], rel=1e-3)
    assert finding.evidence["ratio"] == pytest.approx(finding.value / finding.evidence["expected_k3"], rel=1e-3)
    assert "the null's" in finding.limit
    assert "×" not in finding.limit, "a limit on k3 is a k3"
