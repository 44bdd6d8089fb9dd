"""Causes that pairs show: each fault is named on the rows that have it, and a healthy log names none."""

import importlib.util
import math
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from rollcorr.diagnostics.faults import fault
from rollcorr.diagnostics.log_check.check import check_logs
from rollcorr.diagnostics.provenance.estimate import estimate_provenance
from rollcorr.diagnostics.provenance.pairs import CERTAIN, UNCERTAIN, certain_share
from rollcorr.rollout_log import RolloutBatch, RolloutLogWriter

FILE = Path(__file__).parents[2] / "experiments" / "diagnosis" / "pair_faults.py"


@cache
def faults():
    spec = importlib.util.spec_from_file_location("pair_faults", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["pair_faults"] = module
    spec.loader.exec_module(module)
    return module


@cache
def healthy(seed=0, **settings):
    return faults().healthy_pairs(seed=seed, **settings)


def estimate(pairs):
    return estimate_provenance(pairs.train, pairs.rollout, pairs.mask, cu_seqlens=pairs.cu_seqlens)


def named(found):
    return {code for code in found.codes if fault(code).kind != "no finding"}


def rows_named(found, code):
    return found.finding(code).rows


BY_VALUE = [
    ("shifted", 1, "shifted"),
    ("shifted", -1, "shifted"),
    ("shifted", 2, "shifted"),
    ("shifted", -3, "shifted"),
    ("other_request", "swap", "other_request"),
    ("other_request", "lost", "other_request"),
    ("zero", 1.0, "placeholder"),
    ("zero", 0.1, "placeholder"),
    ("constant", 1.0, "placeholder"),
    ("constant", 0.1, "placeholder"),
    ("minus_9999", 0.5, "placeholder"),
    ("nan", 0.5, "placeholder"),
    ("unit", "log2", "wrong_unit"),
    ("unit", "log10", "wrong_unit"),
    ("unit", "sign", "wrong_unit"),
    ("unit", "probability", "wrong_unit"),
    ("storage", "bf16", "storage"),
    ("storage", "fp16", "storage"),
    ("tool", 8, "foreign_tokens"),
    ("pad", 16, "foreign_tokens"),
    ("scored", 8, "foreign_tokens"),
]


@pytest.mark.parametrize("share", [1.0, 0.25, 0.1])
@pytest.mark.parametrize(("cause", "severity", "code"), BY_VALUE)
def test_values_of_another_kind_are_named_with_the_rows_that_have_them(cause, severity, code, share):
    broken = faults().inject(cause, healthy(), severity=severity, share=share)
    found = estimate(broken)
    assert named(found) == {code}
    finding = found.finding(code)
    assert finding.rows == int(broken.affected.sum())
    assert finding.row_share == pytest.approx(finding.rows / 24)
    assert 0 < finding.tokens <= len(broken.train)
    assert finding.confirm
    assert finding.fix


@pytest.mark.parametrize("share", [1.0, 0.25])
@pytest.mark.parametrize(
    ("cause", "severity", "codes"),
    [
        ("tempered", 0.7, {"tempered"}),
        ("tempered", 1.3, {"tempered"}),
        ("raw", 0.7, {"tempered", "raw"}),
        ("truncated", 0.9, {"truncated"}),
        ("template", 4.0, {"template"}),
        ("turn_drift", 1.0, {"turn_drift"}),
    ],
)
def test_settings_and_contexts_of_some_rows_are_judged_on_those_rows(cause, severity, codes, share):
    broken = faults().inject(cause, healthy(rows=32), severity=severity, share=share)
    found = estimate(broken)
    assert named(found) == codes
    for code in codes:
        assert rows_named(found, code) == pytest.approx(int(broken.affected.sum()), abs=5)
    if cause == "tempered":
        assert found.temperature_ratio == pytest.approx(severity, rel=0.06)
    if cause == "raw":
        assert found.temperature_ratio == pytest.approx(1 / severity, rel=0.06)


HEALTHY = [
    {"noise": 0.0, "rounded": False},
    {"noise": 0.003, "rounded": False, "temperature": 0.7},
    {"rows": 16, "length": 20},
    {"rows": 2, "length": 4000},
    {"noise": 0.15, "vocabulary": 150_000},
    {"noise": 0.05, "tail": 0.02, "temperature": 0.7},
    {"replayed": True},
    {"replayed": True, "noise": 0.15, "temperature": 0.7, "vocabulary": 512},
    {"decided": False, "vocabulary": 400},
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("settings", HEALTHY)
def test_a_healthy_log_names_no_cause(settings, seed):
    found = estimate(healthy(seed, **settings))
    assert named(found) == set()


def test_two_causes_in_different_rows_are_both_named_with_their_shares():
    pairs = faults().inject("tempered", healthy(rows=40), severity=0.6, share=0.3)
    free = (~pairs.affected).nonzero().squeeze(-1)
    zeros = torch.zeros(40, dtype=torch.bool)
    zeros[free[:10]] = True
    found = estimate_provenance(
        pairs.train, pairs.rollout.masked_fill(zeros[pairs.row], 0.0), pairs.mask, cu_seqlens=pairs.cu_seqlens
    )
    assert named(found) == {"placeholder", "tempered"}
    assert found.finding("placeholder").row_share == pytest.approx(10 / 40)
    assert found.finding("tempered").row_share == pytest.approx(12 / 40, abs=0.05)
    assert found.temperature_ratio == pytest.approx(0.6, rel=0.06)


def test_swapped_rows_are_told_which_rows_they_belong_to():
    found = estimate(faults().inject("other_request", healthy(), severity="swap", share=0.2))
    finding = found.finding("other_request")
    assert "has those of row" in finding.reason
    assert finding.evidence["rows_found_elsewhere"] >= 3
    assert abs(finding.evidence["correlation"]) < 0.3 < finding.evidence["correlation_of_others"]


def test_one_value_repeated_over_each_row_is_a_placeholder():
    """A sequence's mean log-prob written to each of its tokens: no two rows share the value."""
    pairs = healthy()
    mean = torch.zeros(24).index_add_(0, pairs.row, pairs.rollout) / pairs.cu_seqlens.diff()
    found = estimate_provenance(pairs.train, mean[pairs.row], pairs.mask, cu_seqlens=pairs.cu_seqlens)
    assert named(found) == {"placeholder"}
    assert "one constant for a whole row" in found.finding("placeholder").reason


def test_the_trainers_side_is_named_when_the_fault_is_there():
    pairs = healthy()
    found = estimate_provenance(
        pairs.train / math.log(2), pairs.rollout, pairs.mask, cu_seqlens=pairs.cu_seqlens
    ).finding("wrong_unit")
    assert found.reason.startswith("the trainer's values are log base 2")
    zeros = pairs.train.masked_fill((torch.arange(24) < 6)[pairs.row], 0.0)
    found = estimate_provenance(zeros, pairs.rollout, pairs.mask, cu_seqlens=pairs.cu_seqlens).finding("placeholder")
    assert "trainer log-probs are exactly 0" in found.reason
    assert found.title == "placeholders in place of the trainer's log-probs"
    assert "engine" not in found.fix + found.confirm + found.reason


@pytest.mark.parametrize("seed", [0, 2, 5])
def test_values_that_stand_three_times_by_chance_are_no_placeholder(seed):
    """Float32 values of 30,240 tokens, whose two sides are of two temperatures, so that each doubts the other's."""
    generator = torch.Generator().manual_seed(seed)
    table, tau = 2 * torch.randn(32, 32, generator=generator), 0.5
    token, columns = torch.randint(0, 32, (336,), generator=generator), []
    for _ in range(90):
        z = table[token]
        mu = ((z + 0.02 * torch.randn(z.shape, generator=generator)) / tau).log_softmax(-1)
        token = torch.multinomial(mu.exp(), 1, generator=generator)
        pi = (z + 0.01 * torch.randn(z.shape, generator=generator)).log_softmax(-1)
        columns.append((pi.gather(-1, token), mu.gather(-1, token)))
        token = token[:, 0]
    train, rollout = (torch.cat(side, dim=1) for side in zip(*columns, strict=True))
    assert "placeholder" not in named(estimate_provenance(train, rollout))

    # Chance does not explain that eight tokens have one value.
    rollout[::42, 7] = -1.2345
    found = estimate_provenance(train, rollout).finding("placeholder")
    assert (found.tokens, found.title) == (8, "placeholders in place of the rollout's log-probs")


def test_rounding_to_16_bits_says_how_much_of_the_difference_it_makes():
    pairs = healthy(noise=0.0, rounded=False)
    stored = pairs.rollout.bfloat16().float()
    finding = estimate_provenance(pairs.train, stored, pairs.mask, cu_seqlens=pairs.cu_seqlens).finding("storage")
    difference = (pairs.train - stored).double()
    assert finding.severity == "note"
    assert finding.evidence["rounding_std"] == pytest.approx(float(difference.square().mean().sqrt()), rel=0.1)
    assert finding.evidence["explained_share"] > 0.9
    noisy = estimate(faults().inject("storage", healthy(noise=0.15), severity="fp16")).finding("storage")
    assert noisy.evidence["explained_share"] < 0.05


def test_a_truncation_on_both_sides_contradicts_itself_and_is_not_claimed():
    """Every likely token is certain, the even ones on one side only and the odd ones on the other."""
    pairs = healthy()
    even = torch.arange(len(pairs.train)) % 2 == 0
    likely = pairs.train > -0.6
    train = pairs.train.masked_fill(likely & even, 0.0)
    rollout = pairs.rollout.masked_fill(likely & ~even, 0.0)
    found = estimate_provenance(train, rollout, pairs.mask, cu_seqlens=pairs.cu_seqlens)
    assert "truncated" not in found.codes


def test_certain_tokens_are_a_truncation_only_where_likelier_ones_are_certain_too():
    """The same number of exact zeros: on the likeliest tokens with a choice, then on any that are still likely."""
    base = healthy().train.double()
    choice = ((base < UNCERTAIN) & (base > -0.7)).nonzero().squeeze(-1)
    likeliest = choice[base[choice].argsort(descending=True)[:200]]
    scattered = choice[:: len(choice) // 200][:200]
    cut, holes = base.clone(), base.clone()
    cut[likeliest], holes[scattered] = 0.0, 0.0
    assert certain_share(base, cut) == pytest.approx(200 / len(base))
    assert certain_share(base, holes) == 0.0


def test_tokens_that_come_near_to_certain_deny_a_truncation():
    """Doubts to the power 2.5: of 1,000 about 690 become certain, the rest nearly so, as no truncation leaves them."""
    doubts = torch.logspace(-2.9, -1.6, 1000, dtype=torch.float64)
    base, other = (torch.log1p(-x) for x in (doubts, doubts**2.5))
    certain, nearly = other > CERTAIN, (other <= CERTAIN) & (other > 10 * CERTAIN)
    assert int(certain.sum()) > 2 * int(nearly.sum()) > 600
    assert certain_share(base, other) == 0.0
    assert certain_share(base, other.masked_fill(nearly, 0.0)) > 0.9


@pytest.mark.parametrize(("cause", "severity", "share", "seed"), [("tempered", 0.5, 0.1, 1), ("zero", 0.02, 0.25, 7)])
def test_few_rows_that_are_cold_or_have_a_few_zeros_are_not_called_truncated(cause, severity, share, seed):
    broken = faults().inject(cause, healthy(seed), severity=severity, share=share, seed=seed)
    assert "truncated" not in named(estimate(broken))


@pytest.mark.parametrize("temperature", [0.5, 0.7])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_other_weights_of_a_cold_policy_are_not_called_truncated(temperature, seed):
    """Large noise on the logits makes some tokens certain on one side; rows that have one were once picked for it."""
    assert "truncated" not in named(estimate(healthy(seed, rows=48, length=120, noise=2.0, temperature=temperature)))


@pytest.mark.parametrize("top_p", [0.9, 0.98])
def test_a_truncation_of_one_row_is_named_with_this_row(top_p):
    broken = faults().inject("truncated", healthy(), severity=top_p, share=1 / 24)
    assert named(estimate(broken)) == {"truncated"}
    assert rows_named(estimate(broken), "truncated") == 1


def test_a_low_temperature_alone_makes_tokens_certain_and_is_no_truncation():
    found = estimate(faults().inject("tempered", healthy(), severity=0.5))
    assert named(found) == {"tempered"}


def test_a_pair_without_a_pattern_says_that_it_cannot_tell_noise_from_weights():
    (finding,) = estimate(healthy()).findings
    assert finding.code == "matched"
    assert finding.confidence is None
    assert "cannot tell ordinary noise from other weights, because" in finding.reason
    pairs = healthy()
    same = estimate_provenance(pairs.train, pairs.train, pairs.mask, cu_seqlens=pairs.cu_seqlens)
    assert "one may be a copy of the other" in same.findings[0].reason


def test_token_ids_alone_bound_how_unlikely_a_sampled_token_can_be():
    """Of 512 tokens, none below e^-14 is sampled three times in a row; of a large vocabulary it might be."""
    pairs = healthy(vocabulary=512)
    train, rollout = pairs.train.clone(), pairs.rollout.clone()
    for start in pairs.cu_seqlens[:-1].tolist():
        train[start : start + 4] = rollout[start : start + 4] = -15.0
    ids = torch.arange(len(train)) % 512
    without = estimate_provenance(train, rollout, pairs.mask, cu_seqlens=pairs.cu_seqlens)
    found = estimate_provenance(train, rollout, pairs.mask, cu_seqlens=pairs.cu_seqlens, token_ids=ids)
    assert "foreign_tokens" not in without.codes
    assert found.finding("foreign_tokens").tokens == 4 * 24
    with pytest.raises(ValueError, match="token_ids"):
        estimate_provenance(train, rollout, pairs.mask, cu_seqlens=pairs.cu_seqlens, token_ids=ids[:5])


@pytest.mark.parametrize("filled", [0.0, -9999.0, math.nan])
def test_a_list_that_is_too_short_is_told_from_tokens_that_nobody_sampled(filled):
    """The last log-probs of some rows are missing, and the trainer finds those tokens as likely as the rest."""
    pairs = healthy(rows=32)
    ends = pairs.cu_seqlens[1:]
    place = torch.arange(len(pairs.train))
    short = (ends[pairs.row] - place <= 20) & (pairs.row % 3 == 0)
    broken = pairs.rollout.masked_fill(short, filled)
    found = estimate_provenance(pairs.train, broken, pairs.mask, cu_seqlens=pairs.cu_seqlens)
    assert named(found) == {"placeholder"}
    assert rows_named(found, "placeholder") == 11

    # What a tool or the padding wrote there is more of a surprise.
    foreign = pairs.train.masked_fill(short, -9.0)
    found = estimate_provenance(foreign, broken, pairs.mask, cu_seqlens=pairs.cu_seqlens)
    assert named(found) == {"foreign_tokens"}


@pytest.mark.parametrize("lag", [1, -1, 3])
def test_rows_that_are_shifted_from_some_token_on_are_named_with_these_tokens(lag):
    """Two of 24 rows lose or gain a token at their 40th: the rest is shifted by one."""
    pairs = healthy()
    rollout = pairs.rollout.clone()
    starts = pairs.cu_seqlens.tolist()
    for row in (3, 17):
        tail = slice(starts[row] + 40, starts[row + 1])
        rollout[tail] = rollout[tail].roll(lag)
    found = estimate_provenance(pairs.train, rollout, pairs.mask, cu_seqlens=pairs.cu_seqlens)
    assert named(found) == {"shifted"}
    finding = found.finding("shifted")
    assert finding.rows == 2
    tails = sum(starts[row + 1] - starts[row] - 40 for row in (3, 17))
    assert finding.tokens == pytest.approx(tails, abs=12)
    assert "from some later token on" in finding.reason


@pytest.mark.parametrize("lag", [1, -3])
def test_a_row_that_mostly_goes_together_may_still_be_shifted_from_some_token_on(lag):
    """Where the right start is long, or the policy sure of most tokens, the whole row correlates by 0.8."""
    broken = faults().inject("late_shift", healthy(temperature=0.5), severity=lag, share=0.2)
    assert rows_named(estimate(broken), "shifted") == int(broken.affected.sum()) == 5


@pytest.mark.parametrize(("noise", "temperature", "seed"), [(1.0, 0.5, 1), (2.0, 0.7, 3)])
def test_one_surprising_token_beside_another_is_no_shift(noise, temperature, seed):
    assert named(estimate(healthy(seed, rows=48, length=120, noise=noise, temperature=temperature))) == set()


def test_many_short_rows_do_not_show_a_cause_by_chance():
    broken = faults().inject("tempered", healthy(rows=3000, length=16, spread=0.1), severity=0.7, share=0.3)
    assert named(estimate(broken)) == {"tempered"}


def test_the_check_of_a_log_reads_the_placeholder_that_an_engine_wrote(tmp_path):
    pairs = healthy()
    rollout = pairs.rollout.masked_fill((torch.arange(24) < 6)[pairs.row], -9999.0)
    with RolloutLogWriter(tmp_path / "log.parquet") as log:
        log.write(
            RolloutBatch.from_packed(
                pairs.mask, cu_seqlens=pairs.cu_seqlens, rollout_log_prob=rollout, old_log_prob=pairs.train
            )
        )
    finding = check_logs([tmp_path / "log.parquet"]).provenance.finding("placeholder")
    assert "missing (written as " in finding.reason
    assert (finding.rows, finding.row_share) == (6, 0.25)


def test_the_sweep_names_right_causes_only_in_a_sample_of_it():
    found = list(faults().sweep(seeds=1, causes=["shifted", "tool"]))
    assert len(found) == 2 * 4 * 5
    assert [naming.wrong for naming in found if naming.wrong] == []
    assert sum(naming.named for naming in found) == 40
