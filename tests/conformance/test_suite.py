"""The conformance suite: ours passes it, a planted fault fails its own property, and counterexamples are small."""

from __future__ import annotations

import functools
import math
import random
import types
from pathlib import Path

import oracle
import pytest
import torch
from implementations import IMPLEMENTATIONS
from their_correction import correct_batch

from rollcorr.conformance import PROPERTIES, grade_function, grade_property, own_correction
from rollcorr.conformance.batches import draw_rows, make_token, smallest, tensors_of
from rollcorr.kernels.correction import dispatch, reference


def ours(impl):
    function = functools.partial(own_correction, impl=impl)
    function.merge = own_correction.merge
    return function


@pytest.mark.parametrize("impl", [name for name in IMPLEMENTATIONS if name != "triton"])
def test_ours_passes_all_fifteen(impl):
    grades = list(grade_function(ours(impl), batches=20 if impl == "cpu" else 6))
    assert [str(grade) for grade in grades if grade.verdict != "pass"] == []
    assert [grade.property.number for grade in grades] == list(range(1, 16))


PLANTED = {
    1: ("log_weight, units = batch.log_ratio, batch.counted", "log_weight, units = batch.log_ratio / 2, batch.counted"),
    2: ("log_weight = log_product if", "log_weight = log_product / count.clamp(min=1) if"),
    3: ("value, units, described = estimate,", "value, units, described = -estimate,"),
    4: ('if criterion.scope == "seq_sum" else total /', 'if criterion.scope == "seq_sum" else -total /'),
    5: ("return layout.sequence_sum(values, mask, cu_seqlens=self.cu_seqlens)", "return (values * mask).sum(dim=-1)"),
    6: ("    compared = measured | zero_probability\n", "    compared = measured = mask\n"),
    7: ("raw, log_weight, config)", "raw, log_weight, config).masked_fill(log_weight > 88, 0.0)"),
    8: ('rows.moments["weight" if token_level', 'rows.moments["weight_raw" if token_level'),
    9: (
        'rows.sample("weight", token_weight, batch.counted)',
        'rows.sample("weight", token_weight, batch.counted | True)',
    ),
    11: ("units = has_counted\n", "units = has_counted | True\n"),
    12: (
        "loss_mask = _reject(batch, config, rows)",
        "loss_mask = [mask, _reject(batch, config, rows)][config.rollout_is is not None]",
    ),
    13: ("batch.valid & (rejectors_of_token == 0)", "batch.valid & (rejectors_of_token < max(len(rejected) - 1, 1))"),
    14: ('rejected["veto"] = batch.valid & batch.expand(vetoed)', 'rejected["veto"] = catastrophic'),
    15: (
        "    rows.add_tokens(d, measured, compared, config)\n",
        "    rows.add_tokens(d, measured, compared, config)\n"
        '    sums["k3"] = _masked_sum(d.float().exp() - 1 - d.float(), measured)\n',
    ),
}
"""Property → what is replaced in a copy of the reference implementation. Property 10 is about `merge`."""


def planted(number, monkeypatch):
    """Ours with the fault of a property."""
    function = ours("reference")
    if number == 10:
        function.merge = lambda results: {
            name: sum(result[name] for result in results) / len(results)
            for name, value in results[0].items()
            if isinstance(value, float)
        }
        return function
    source = Path(reference.__file__).read_text(encoding="utf-8")
    before, after = PLANTED[number]
    assert source.count(before) == 1
    copy = types.ModuleType("copy_of_reference")
    exec(compile(source.replace(before, after), "copy_of_reference", "exec"), vars(copy))
    monkeypatch.setattr(dispatch, "reference_correction", copy.reference_correction)
    return function


@pytest.mark.parametrize("wanted", PROPERTIES, ids=lambda wanted: wanted.number)
def test_a_planted_fault_fails_its_property(wanted, monkeypatch):
    grade = grade_property(planted(wanted.number, monkeypatch), wanted, batches=25)
    assert grade.verdict == "fail", str(grade)
    assert len(grade.counterexample) <= 2
    assert max(map(len, grade.counterexample)) <= 2


def test_the_counterexample_of_a_stranger_is_smallest():
    """Written before the suite: each fault is one of its author's, and one or two tokens show it."""
    grades = {grade.property.number: grade for grade in grade_function(correct_batch)}
    assert [n for n, grade in grades.items() if grade.verdict == "pass"] == [1, 7, 12, 13]
    assert [n for n, grade in grades.items() if grade.verdict == "not applicable"] == [3, 10]
    sizes = {n: sum(map(len, grade.counterexample)) for n, grade in grades.items() if grade.verdict == "fail"}
    assert sizes == {2: 2, 4: 1, 5: 1, 6: 1, 8: 2, 9: 1, 11: 1, 14: 2, 15: 1}
    assert str(grades[2]).splitlines()[1:] == [
        "    required: w = min(exp Σ d, ceiling) for each sequence, with no bound before the sum",
        "    train_log_prob = [[-1., -1.]]",
        "    rollout_log_prob = [[-1. , -1.1]]",
        "    response_mask = [[ True,  True]]",
        "    level='sequence', ceiling=2.0",
    ]


def test_shrinking_keeps_only_the_needed_tokens():
    rows = tuple(tuple(make_token(d) for d in row) for row in ((0.3, 2.53, -0.7), (0.1, 0.2)))
    found = smallest(rows, lambda rows: any(token[0] - token[1] > 1.7 for row in rows for token in row))
    assert found == ((make_token(3.0),),)


def test_a_missing_option_or_output_is_not_applicable():
    def weights_only(train, rollout, mask):
        return {"weights": (train - rollout).exp()}

    grades = {grade.property.number: grade for grade in grade_function(weights_only, batches=5)}
    assert grades[2].reason == "it takes no option 'level'"
    assert grades[8].reason == "it has no ess"
    assert grades[1].verdict == "pass"
    assert {grade.verdict for grade in grades.values()} == {"pass", "fail", "not applicable"}


def test_an_error_of_the_call_is_no_grade():
    def broken(train, rollout, mask, *, level="token", token_band=None):
        if level == "sequence":
            raise NotImplementedError("tokens only")
        return {"weights": torch.ones(3), "loss_mask": mask}

    grades = {grade.property.number: grade for grade in grade_function(broken, batches=5)}
    assert grades[1].verdict == "error"
    assert "weights is (3,); return a tensor of (2, 3) or (B, 1)" in grades[1].reason

    def tokens_only(train, rollout, mask, *, level="token"):
        if level == "sequence":
            raise NotImplementedError("tokens only")
        return {"weights": (train - rollout).exp()}

    grade = grade_property(tokens_only, PROPERTIES[1])
    assert (grade.verdict, "tokens only" in grade.reason) == ("not applicable", True)


def test_expected_numbers_are_those_of_the_oracle():
    """The checks accept the float64 oracle of the tests on every batch that they draw."""

    def correct(train, rollout, mask, *, level="token", ceiling=None, token_band=None, geometric_band=None, veto=None):
        bands = {"token": token_band, "seq_mean": geometric_band}
        criteria = tuple(oracle.Criterion(scope, "k1", *band) for scope, band in bands.items() if band)
        settings = oracle.Settings(level=level, upper=ceiling, criteria=criteria, veto=veto)
        found = oracle.correct(train.double().tolist(), rollout.double().tolist(), mask.tolist(), settings)
        metrics = found.metrics
        output = {"loss_mask": torch.tensor(found.loss_mask), "k3": metrics["k3_kl"], **metrics}
        if level is not None:
            output |= {"weights": torch.tensor(found.weights), "ess": metrics["rollout_is_eff_sample_size"]}
        return output

    grades = list(grade_function(correct, batches=20))
    assert [str(grade) for grade in grades if grade.verdict != "pass" and grade.property.number != 10] == []


def test_drawn_batches_hold_each_kind():
    generator = random.Random(0)
    drawn = [draw_rows(generator, special=(math.nan, 200.0)) for _ in range(40)]
    tokens = [token for rows in drawn for row in rows for token in row]
    assert {len(rows) for rows in drawn} == {1, 2, 3, 4}
    assert any(math.isnan(token[0]) for token in tokens)
    assert all(token[0] <= 0 and token[1] <= 0 for token in tokens if token[0] == token[0])
    assert sum(not token[2] for token in tokens) > 20
    train, rollout, mask = tensors_of(drawn[0])
    assert train.shape == rollout.shape == mask.shape
    assert (train.dtype, mask.dtype) == (torch.float32, torch.bool)
