"""The page of the document's claims: each has a verdict, which flips where the numbers do, and the page is current."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

STUDY = Path(__file__).parents[2] / "experiments" / "mismatch_in_practice"
sys.path.insert(0, str(STUDY))

import claims  # noqa: E402
import claims_page  # noqa: E402
import intervals  # noqa: E402
import laboratory_claims  # noqa: E402
import measured_claims  # noqa: E402
import measured_weight_claims  # noqa: E402
import table_claims  # noqa: E402
import trained_claims  # noqa: E402
import trained_page  # noqa: E402
from claims_verdicts import (  # noqa: E402
    CANNOT,
    FAILS,
    NOT_SEEN,
    PARTLY,
    REPEATS,
    UNDECIDED,
    WORDS,
    Evidence,
    Verdict,
    by_cases,
    by_direction,
    committed_evidence,
    direction,
    overall,
)

CUT = "0.7, 0.8, 20"
COMMITTED = committed_evidence()


def row(**values):
    """A case of the measured study: bf16 at temperature 1.0, with only the given fault."""
    case = {
        "engine": "bf16",
        "sampling": "1.0",
        "updates": 0,
        "mode": "processed",
        "T": 512,
        "windows": 32,
        "kl": 0.0001,
        "kl_error": 0.00001,
        "k3": 0.0001,
        "chi2_token": 0.0002,
        "chi2_seq": 0.1,
        "ess": 0.9,
        "token_ess": 1.0,
        "low_weight": 0.0,
        "low_weight_error": 0.01,
        "saturated_low": 0.0,
        "saturated_high": 0.0,
        "false_positive": 0,
        "largest_probability_gap": 0.1,
        "geometric_mean": 1.0001,
        "geometric_outside": 0.0,
        "token_mean_weight": 1.0,
        "outside": math.nan,
        "clip_at_lower": "",
        "clip_at_upper": "",
        "clip_ess": "",
    } | values
    return {"t_times_kl": case["T"] * case["kl"], "log_weight_mean": -case["T"] * case["kl"]} | case


def cell(column, correction, seed, *, start=0.5, end=0.5, middle=(), **metrics):
    """A training of four steps."""
    accuracies = (start, *middle, end)
    held_out = [{"step": 10 * i, "accuracy": a, "standard_error": 0.03} for i, a in enumerate(accuracies)]
    values = {"reward": [0.5] * 4, "kl": [0.02] * 4, "t_times_kl": [5.0] * 4, "ess": [0.9] * 4} | metrics
    name = f"{column}-{correction}-{seed}"
    return {
        "cell": name,
        "steps": 4,
        "responses": 256,
        "column": column,
        "correction": correction,
        "seed": seed,
        "held_out": held_out,
        "metrics": values,
    }


def judged(judge, *grid, cells=(), temperature=()):
    verdict = judge(Evidence(grid=list(grid), cells=list(cells), temperature=list(temperature)))
    assert verdict.word in WORDS
    return verdict


def word(judge, *grid, **more):
    return judged(judge, *grid, **more).word


def verdict_of(claim, evidence):
    return overall([(source, judge(evidence)) for source, judge in claim.judges.items()])


@pytest.mark.parametrize("evidence", [Evidence(), COMMITTED], ids=["no rows", "committed rows"])
def test_every_claim_has_one_verdict_and_says_why_where_it_is_not_plain(evidence):
    for claim in claims.CLAIMS:
        verdict = verdict_of(claim, evidence)
        assert verdict.word in WORDS
        if verdict.word in (PARTLY, UNDECIDED, CANNOT):
            assert verdict.why, claim.text


def test_every_verdict_shows_what_was_seen_or_why_nothing_was():
    for claim in claims.CLAIMS:
        for source, judge in claim.judges.items():
            verdict = judge(COMMITTED)
            if verdict is not None:
                assert verdict.seen or verdict.word == CANNOT, (source, claim.text)
                assert "nan" not in verdict.seen, (source, claim.text)


def test_claims_are_in_the_order_of_the_document_and_none_stands_twice():
    sections = [claim.section for claim in claims.CLAIMS]
    assert sections == sorted(sections, key=list(claims.SECTIONS).index)
    assert set(sections) == set(claims.SECTIONS)
    assert len({claim.text for claim in claims.CLAIMS}) == len(claims.CLAIMS)


def test_the_committed_page_is_that_of_the_committed_tables_and_cells():
    assert claims_page.PAGE.read_text(encoding="utf-8") == claims_page.claims_text(COMMITTED)


def test_a_difference_counts_from_two_standard_errors():
    assert [direction(value, 1.0) for value in (2.1, 1.9, -1.9, -2.1)] == [1, 0, 0, -1]
    assert direction(5.0, math.nan) == 0
    assert [by_direction(sign, "").word for sign in (1, 0, -1)] == [REPEATS, UNDECIDED, FAILS]


def test_a_claim_about_many_cases_needs_nine_of_ten():
    assert [by_cases(holds, 10, "").word for holds in (10, 9, 8, 2, 1, 0)] == [
        REPEATS,
        REPEATS,
        PARTLY,
        PARTLY,
        FAILS,
        FAILS,
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((REPEATS, REPEATS), REPEATS),
        ((REPEATS, FAILS), PARTLY),
        ((REPEATS, UNDECIDED), PARTLY),
        ((FAILS, UNDECIDED), UNDECIDED),
        ((FAILS, CANNOT), FAILS),
        ((CANNOT, CANNOT), CANNOT),
    ],
)
def test_sources_are_combined_and_what_cannot_be_tested_does_not_count(words, expected):
    first, second = (Verdict(word, "seen", "a reason") for word in words)
    assert overall([("measured", first), ("trained", second)]).word == expected
    assert overall([("measured", first), ("trained", None)]).word == words[0]


def test_rounded_weights_are_no_evidence_that_equal_weights_contradict():
    rounded = row(engine="int8, 3 bits", largest_probability_gap=0.98)
    assert word(measured_claims.contradictory, row(), rounded) == NOT_SEEN
    assert word(measured_claims.contradictory, row(largest_probability_gap=0.95), rounded) == REPEATS


def test_two_programs_of_one_precision_are_told_apart_from_two_precisions():
    exact = row(engine="float32", k3=5e-13)
    assert "bf16 differ" in judged(measured_claims.backends_differ, exact, row()).why
    assert word(measured_claims.backends_differ, row(engine="float32", k3=1e-5), row()) == REPEATS
    assert word(measured_claims.backends_differ, exact, row(k3=1e-12)) == FAILS


def test_the_variance_law_is_judged_by_every_fit():
    def pair(updates, ratio):
        return [
            row(
                updates=updates,
                T=T,
                chi2_token=0.002,
                log_second_moment=ratio * T * math.log1p(0.002),
                log_second_moment_error=0.1 * T * 0.002,
            )
            for T in (16, 64, 256)
        ]

    assert word(measured_weight_claims.variance_law, *pair(0, 1.0), *pair(8, 1.05)) == REPEATS
    assert judged(measured_weight_claims.variance_law, *pair(0, 1.0), *pair(8, 0.3)).why == (
        "precision: 1 of 1 fits agree; staleness: 0 of 1 fits agree"
    )
    assert word(measured_weight_claims.variance_law, *pair(0, 0.3)) == FAILS


def test_the_cut_is_isolated_by_replayed_kept_sets():
    raw = row(sampling=CUT, mode="raw", kl=-0.03, kl_error=0.006)
    replayed = row(sampling=CUT, mode="replayed", kl=0.0, kl_error=0.0001)
    clear = row(sampling=CUT, kl=0.015, kl_error=0.004)
    noisy = row(sampling=CUT, kl=0.005, kl_error=0.004)
    assert word(measured_claims.cut_is_a_mismatch, raw, clear, replayed) == REPEATS
    assert word(measured_claims.cut_is_a_mismatch, raw, noisy, replayed) == UNDECIDED


def test_the_kl_of_a_cut_is_compared_with_the_same_estimate_at_temperature_1():
    plain = row(kl=-0.0002, kl_error=0.0002)
    assert word(measured_weight_claims.kl_of_cut, plain, row(sampling=CUT, kl=0.015, kl_error=0.004)) == REPEATS
    assert word(measured_weight_claims.kl_of_cut, plain, row(sampling=CUT, kl=0.001, kl_error=0.004)) == UNDECIDED


def test_one_case_that_fails_before_the_clamp_shows_that_it_can_happen():
    failed, fine = row(k3=0.01, ess=0.3), row(k3=0.01, ess=0.7)
    assert word(measured_weight_claims.before_clamp, *[failed] * 2, *[fine] * 8) == REPEATS
    assert word(measured_weight_claims.before_clamp, *[fine] * 10) == FAILS


def test_only_the_longest_responses_show_safety_from_the_clamp():
    def pair(engine, at_the_end):
        return [row(engine=engine, T=T, kl=0.003, saturated_low=low) for T, low in ((16, 0.0), (2048, at_the_end))]

    assert word(measured_weight_claims.safe_below, *pair("safe", 0.05)) == REPEATS
    found = judged(measured_weight_claims.safe_below, *pair("safe", 0.05), *pair("clamped", 0.125))
    assert (found.word, found.why) == (PARTLY, "in 1 of 2 cases")


def test_frequent_clamping_shows_the_share_of_weights():
    cells = [cell("stale_quantized", "seq_tis", seed, saturated_low=[0.0, 0.1, 0.1, 0.1 * seed]) for seed in (0, 1)]
    found = judged(trained_claims.clamping, cells=cells)
    assert found.word == PARTLY
    assert found.why == "in 5 of 8 steps, with 6.2% of the weights"
    assert "2 to 3 of 4 by seed" in found.seen


def test_pairs_that_never_reach_the_clamp_count_against_its_rule():
    def pair(engine, at_the_end):
        lengths = [16, 128, 1024, 2048]
        shares = (0.0, 0.0, 0.1, at_the_end)
        return [row(engine=engine, T=T, kl=0.02, saturated_low=low) for T, low in zip(lengths, shares, strict=True)]

    near = [row(engine="near", T=T, kl=0.02, saturated_low=low) for T, low in ((16, 0.0), (512, 0.1), (2048, 1.0))]
    assert word(measured_weight_claims.clamp_rule, *near) == REPEATS
    assert judged(measured_weight_claims.clamp_rule, *near, *pair("never", 0.2)).why == "in 1 of 2 cases"
    assert word(measured_weight_claims.clamp_rule, *pair("never", 0.2)) == FAILS


def test_more_low_weights_when_colder_are_counted_among_all_cases():
    warm = [row(T=T, k3=0.01, low_weight=0.2) for T in (64, 128, 256, 512)]
    colder = [row(sampling="0.4", T=T, low_weight=0.4) for T in (64, 128, 256, 512)]
    assert word(measured_weight_claims.colder_is_lower, *warm, *colder) == REPEATS
    equal = [row(sampling="0.4", T=T, low_weight=0.2) for T in (64, 128, 256)]
    assert (
        judged(measured_weight_claims.colder_is_lower, *warm, colder[3], *equal).why
        == "in 1 of 4 cases, and in none the other way"
    )
    fewer = [row(sampling="0.4", T=T, low_weight=0.0) for T in (64, 128, 256, 512)]
    assert word(measured_weight_claims.colder_is_lower, *warm, *fewer) == FAILS


def test_geometric_rejection_is_judged_only_where_the_mean_is_as_large_as_the_document_s():
    small = row(geometric_mean=1.001, geometric_outside=0.3)
    assert word(measured_weight_claims.geometric, small) == CANNOT
    assert word(measured_weight_claims.geometric, small, row(geometric_mean=1.02, geometric_outside=1.0)) == REPEATS
    assert word(measured_weight_claims.geometric, small, row(geometric_mean=1.02, geometric_outside=0.5)) == FAILS


def test_a_sample_without_the_rare_sequences_does_not_refute_a_large_chi2():
    assert word(measured_weight_claims.chi2_exceeds, row(chi2_seq=268.0)) == CANNOT


def heated(growth, *, tail=None):
    """A knob whose KL is multiplied by `growth` above temperature 1."""
    whole = {0.4: 3.0, 1.0: 1.0, 1.5: growth, 2.0: growth, 10.0: growth}
    tails = {0.4: 0.1, 1.0: 0.2, 1.5: tail or 0.2, 2.0: 0.2, 10.0: 0.2}
    return [
        {
            "knob": "bf16",
            "temperature": t,
            "kl": kl,
            "kl_error": 0.05 * kl,
            "kl_tail": tails[t] * kl,
            "kl_head": (1 - tails[t]) * kl,
            "other_top": 0.01,
        }
        for t, kl in whole.items()
    ]


def test_a_large_temperature_repeats_only_if_the_whole_kl_grows():
    assert word(measured_claims.very_hot, temperature=heated(0.3)) == CANNOT
    assert word(measured_claims.very_hot, temperature=heated(2.0)) == REPEATS
    assert word(measured_claims.very_hot, temperature=heated(1.05)) == UNDECIDED
    assert word(measured_claims.any_temperature, temperature=heated(0.3)) == PARTLY
    assert word(measured_claims.any_temperature, temperature=heated(2.0)) == REPEATS


def test_the_tail_repeats_by_its_amount_and_in_part_by_its_share():
    assert word(measured_claims.tail_grows, temperature=heated(0.9, tail=0.5)) == REPEATS
    assert word(measured_claims.tail_grows, temperature=heated(0.3, tail=0.5)) == PARTLY
    assert word(measured_claims.tail_grows, temperature=heated(0.3, tail=0.1)) == FAILS


SEEDS = range(trained_claims.SEEDS)


def both_columns(correction, ends, seeds=SEEDS):
    """Trainings whose ends differ between seeds by up to 0.2, in another order for Token-TIS."""
    noise = {seed: 0.1 * ((seed + len(correction)) % 3 - 1) for seed in seeds}
    return [cell(column, correction, seed, end=end + noise[seed]) for column, end in ends.items() for seed in seeds]


def test_t_intervals_by_hand():
    assert [round(intervals.t_quantile(df), 3) for df in (1, 2, 7, 31)] == [12.706, 4.303, 2.365, 2.04]
    assert intervals.t_tails(3.499, 7) == pytest.approx(0.01, abs=1e-4)
    assert intervals.interval([1, 2, 3, 4])[:2] == pytest.approx((2.5, 3.1824 * math.sqrt(5 / 12)), rel=1e-4)
    assert math.isnan(intervals.interval([1.0]).half)


def test_holm_multiplies_and_never_decreases():
    assert intervals.holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06})


def test_fewer_than_eight_seeds_decide_nothing():
    ends = {"stale": 0.7, "stale_quantized": 0.2}
    none, better = both_columns("none", ends, range(7)), both_columns("token_tis", dict.fromkeys(ends, 0.9), range(7))
    verdict = judged(trained_claims.token_outperforms, cells=none + better)
    assert (verdict.word, verdict.why) == (UNDECIDED, "7 of 8 pairs of seeds are trained")


def test_only_cells_with_one_start_are_paired():
    none, token = both_columns("none", {"clean": 0.5}), both_columns("token_tis", {"clean": 0.6})
    other = [cell("clean", "token_tis", 0, start=0.45, end=0.6), *token[1:]]
    assert trained_page.gap(token, none).n == len(SEEDS)
    assert trained_page.gap(other, none).n == len(SEEDS) - 1
    assert "seed 0 start at 0.450 and at 0.500" in trained_page.start_notes(none + other)
    assert trained_page.start_notes(none + token) == ""


def test_each_comparison_is_corrected_once():
    none = [cell("clean", "none", seed) for seed in SEEDS]
    token = [cell("clean", "token_tis", seed, end=0.5 + 0.04 * (-1) ** (seed // 2)) for seed in SEEDS]
    sequence = [cell("clean", "seq_tis", seed, end=0.5204 + 0.02 * (-1) ** seed) for seed in SEEDS]

    # t = 2.7 over 8 seeds is p = 0.03: it counts alone, and not among the three comparisons of three corrections.
    alone, reverse = (
        trained_claims._lead(Evidence(cells=none + sequence), "clean", *pair)
        for pair in (("seq_tis", "none"), ("none", "seq_tis"))
    )
    assert (alone.sign, reverse.sign) == (1, -1)
    among = trained_claims._lead(Evidence(cells=none + token + sequence), "clean", "seq_tis", "none")
    assert (among.sign, among.why) == (0, "p = 0.09 after Holm's correction over 3 tests")


def test_token_tis_outperforms_only_where_its_lead_counts():
    none = both_columns("none", {"stale": 0.7, "stale_quantized": 0.2})
    better = both_columns("token_tis", {"stale": 0.7, "stale_quantized": 0.5})
    equal = both_columns("token_tis", {"stale": 0.7, "stale_quantized": 0.2})
    worse = both_columns("token_tis", {"stale": 0.7, "stale_quantized": 0.05})
    assert word(trained_claims.token_outperforms, cells=none + better) == PARTLY
    assert word(trained_claims.token_outperforms, cells=none + equal) == UNDECIDED
    assert word(trained_claims.token_outperforms, cells=none + worse) == FAILS


def test_seq_tis_is_the_worst_only_if_both_others_are_ahead():
    others = both_columns("none", {"stale_quantized": 0.3}) + both_columns("token_tis", {"stale_quantized": 0.6})
    for end, expected in ((0.05, REPEATS), (0.3, UNDECIDED), (0.55, FAILS)):
        sequence = both_columns("seq_tis", {"stale_quantized": end})
        assert word(trained_claims.sequence_is_worst, cells=others + sequence) == expected
        limit = word(trained_claims.sequence_may_win, cells=others + sequence)
        assert limit == (UNDECIDED if end == 0.55 else FAILS)


def tables(column, start=0.2, **ends):
    """Trainings of table policies over eight seeds, by correction."""
    return [
        {
            "column": column,
            "correction": correction,
            "seed": seed,
            "start": start,
            "final": end + 0.01 * (seed % 3) * (correction == "token_tis"),
            "t_times_kl": 25.0,
            "chi2_above_1000": 0.02,
            "chi2_largest": 2e3,
        }
        for correction, end in ends.items()
        for seed in SEEDS
    ]


def table_word(judge, *rows):
    return judge(Evidence(table_training=[row for group in rows for row in group])).word


def test_cold_order_repeats_where_only_seq_tis_is_behind():
    for end, expected in ((0.3, REPEATS), (1.79, UNDECIDED), (1.95, FAILS)):
        rows = tables("cold", none=1.79, token_tis=1.78, seq_tis=end)
        assert table_word(table_claims.cold_order, rows) == expected
    assert table_word(table_claims.cold_order, tables("cold", none=1.5, token_tis=1.7, seq_tis=0.3)) == PARTLY


def test_seq_tis_far_away_is_judged_against_both():
    for end, expected in ((0.3, REPEATS), (1.79, UNDECIDED), (1.95, FAILS)):
        rows = tables("warm", none=1.79, token_tis=1.78, seq_tis=end)
        assert table_word(table_claims.worst_far_away, rows) == expected


def test_degradation_that_never_happens_is_not_seen():
    def judge(warm, cold):
        ends = [tables(column, none=end) for column, end in (("warm", warm), ("cold", cold))]
        return table_word(table_claims.cold_degrades_no_more, *ends)

    assert (judge(0.5, 0.4), judge(0.1, 0.15), judge(0.15, 0.1)) == (NOT_SEEN, REPEATS, FAILS)


def test_cut_sampling_fails_by_the_gain_of_each_correction():
    for end, expected in ((0.1, REPEATS), (0.9, PARTLY)):
        rows = tables("cut", none=end, token_tis=end, seq_tis=0.1)
        assert table_word(table_claims.cut_fails, rows) == expected
    assert table_word(table_claims.cut_fails, tables("cut", none=0.9, token_tis=0.9, seq_tis=0.9)) == FAILS
    assert table_word(table_claims.chi2_exceeds, tables("warm", seq_tis=0.9)) == CANNOT


def cut_cells(distance, end, **metrics):
    return [
        cell("truncated", correction, seed, end=end, t_times_kl=[distance] * 4, **metrics)
        for correction in ("none", "token_tis", "seq_tis")
        for seed in SEEDS
    ]


def test_a_cut_that_removes_too_little_tests_no_failure():
    assert word(trained_claims.all_fail, cells=cut_cells(0.15, 0.5)) == CANNOT
    assert word(trained_claims.all_fail, cells=cut_cells(20.0, 0.2)) == REPEATS
    assert word(trained_claims.all_fail, cells=cut_cells(20.0, 0.9)) == FAILS
    near = {"ess": [0.98] * 4, "saturated_low": [0.0] * 4}
    clamped = {"ess": [0.98] * 4, "saturated_low": [0.9] * 4}
    assert word(trained_claims.deceptive_ess, cells=cut_cells(0.15, 0.5, **near)) == CANNOT
    assert word(trained_claims.deceptive_ess, cells=cut_cells(20.0, 0.2, **near)) == FAILS
    assert word(trained_claims.deceptive_ess, cells=cut_cells(20.0, 0.2, **clamped)) == REPEATS


def test_one_seed_has_no_error_and_decides_nothing():
    judge = trained_claims.metric("seq_tis", "ess", "the ESS is", below=0.5)
    low = [cell("stale_quantized", "seq_tis", seed, ess=[0.3 + 0.01 * seed] * 4) for seed in (0, 1)]
    assert word(judge, cells=low[:1]) == UNDECIDED
    assert word(judge, cells=low) == REPEATS


def test_chi2_routinely_above_a_thousand_is_a_share_of_the_steps():
    def steps(values):
        return [cell("stale_quantized", "seq_tis", 0, chi2_seq=values)]

    assert word(trained_claims.chi2_exceeds, cells=steps([2e3, 3e3, 5e3, 1e5])) == REPEATS
    assert judged(trained_claims.chi2_exceeds, cells=steps([2e3, 3.0, 5.0, 1.0])).why == "in 1 of 4 steps"
    assert "64 sequences" in judged(trained_claims.chi2_exceeds, cells=steps([2.0, 3.0, 5.0, 1.0])).why


def test_seq_mis_is_judged_by_its_variance_and_not_by_its_accuracy():
    token = [cell("stale_quantized", "token_tis", seed, end=0.4) for seed in (0, 1)]
    for ess, expected in ((0.3, REPEATS), (0.9, FAILS)):
        masked = [
            cell("stale_quantized", "seq_mis", seed, end=0.8, ess=[ess + 0.01 * seed] * 4, rejected=[0.6] * 4)
            for seed in (0, 1)
        ]
        assert word(trained_claims.mask_variance, cells=token + masked) == expected


def test_replay_without_effect_is_undecided():
    none = [cell("truncated", "none", seed, end=0.5) for seed in SEEDS]
    for end, expected in ((0.5, UNDECIDED), (0.8, REPEATS), (0.2, FAILS)):
        replayed = both_columns("replay", {"truncated": end})
        assert word(trained_claims.replay_helps, cells=none + replayed) == expected


def test_a_policy_is_back_when_it_reaches_its_start_again():
    assert trained_claims.back_at(cell("clean", "none", 0, middle=(0.4, 0.45), end=0.6)) == 30
    assert trained_claims.back_at(cell("clean", "none", 0, middle=(0.4, 0.45), end=0.4)) == math.inf
    assert trained_claims.back_at(cell("clean", "none", 0, middle=(0.6,), end=0.7)) == 0


def test_orders_hold_are_slower_or_are_broken():
    judge = laboratory_claims.order("token", "bias, of T")
    for slope, expected in ((2.02, REPEATS), (1.0, PARTLY), (2.5, FAILS)):
        fit = {"estimator": "token", "quantity": "bias, of T", "published": 2.0, "slope": slope, "pair": "coin"}
        verdict = judge(Evidence(orders=[fit]))
        assert verdict.word == expected
        assert "each on one pair of policies: bias in T" in verdict.seen


def test_untruncated_weights_are_unbiased_only_within_rounding():
    case = {"estimator": "sequence_untruncated", "t_times_kl": 0.3, "kind": "noise"}
    for bias, expected in ((1e-8, REPEATS), (1e-3, FAILS)):
        assert laboratory_claims.unbiased(Evidence(exact=[case | {"bias": bias}])).word == expected


def test_seq_tis_has_the_better_trade_off_if_its_error_is_smaller():
    base = {"kind": "noise", "T": 32.0, "kl": 0.01, "batch_size": 64.0, "bias": 0.1}
    token = base | {"estimator": "decoupled_token_is", "mse": 0.2}
    for error, expected in ((0.1, REPEATS), (0.3, FAILS)):
        sequence = base | {"estimator": "sequence_truncated_4", "mse": error}
        assert laboratory_claims.better_trade(Evidence(exact=[token, sequence])).word == expected
