"""One ranked list: causes before their consequences, the unexplained after causes, notes last."""

from rollcorr.config import Finding
from rollcorr.diagnostics.resolver import resolve_findings


def finding(code, confidence=0.9, severity="warning", **more):
    return Finding(code=code, title=code, confidence=confidence, severity=severity, **more)


def ranked(**sources):
    return [(f.code, f.follows_from) for f in resolve_findings(**sources)]


def test_when_the_mismatch_changed_goes_under_why():
    changed, why = finding("changed_at_step", 0.99), finding("weights_differ", 0.9)
    assert ranked(null=[why], steps=[changed]) == [("weights_differ", None), ("changed_at_step", "weights_differ")]
    assert ranked(steps=[changed]) == [("changed_at_step", None)]


def test_the_most_certain_cause_comes_first_and_notes_come_last():
    pairs = [finding("matched", severity="note"), finding("unexplained", 0.99)]
    profile = [finding("stale_prefix_cache", 0.7), finding("template", 0.3)]
    assert ranked(pairs=pairs, null=profile) == [
        ("stale_prefix_cache", None),
        ("template", None),
        ("unexplained", "stale_prefix_cache"),
        ("matched", None),
    ]


def test_a_setting_that_pairs_show_explains_what_the_null_shows():
    pairs, profile = [finding("tempered", 0.8)], [finding("weights_differ", 0.99)]
    assert ranked(pairs=pairs, null=profile) == [("tempered", None), ("weights_differ", "tempered")]


def test_a_cause_of_few_rows_does_not_explain_the_rest():
    pairs, profile = [finding("shifted", 0.9, row_share=0.1)], [finding("weights_differ", 0.8)]
    assert ranked(pairs=pairs, null=profile) == [("weights_differ", None), ("shifted", None)]


def test_a_cache_that_the_null_names_explains_the_prompt_that_pairs_suspect():
    pairs, profile = [finding("template", 0.95)], [finding("stale_prefix_cache", 0.7), finding("template", 0.3)]
    assert ranked(pairs=pairs, null=profile) == [("stale_prefix_cache", None), ("template", "stale_prefix_cache")]
    assert ranked(pairs=pairs, null=profile[::-1])[0] == ("template", None)


def test_the_age_of_the_weights_explains_why_they_differ():
    series, profile = [finding("stale_by_lag", 0.9)], [finding("weights_differ", 0.95)]
    assert ranked(steps=series, null=profile) == [("stale_by_lag", None), ("weights_differ", "stale_by_lag")]


def test_a_cause_that_is_given_is_kept_and_each_code_is_listed_once():
    pairs = [finding("raw"), finding("tempered", 0.99), finding("tempered", 0.1)]
    assert ranked(pairs=pairs) == [("tempered", None), ("raw", None)]
    given = [finding("horizon", follows_from="weights_differ"), finding("weights_differ")]
    assert ranked(steps=given) == [("weights_differ", None), ("horizon", "weights_differ")]
