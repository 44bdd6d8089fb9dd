"""Causes that the place of an excess names or refutes, and "unknown" with its place."""

import numpy as np
import pytest
import torch
from null_logs import log_softmax, logits, rollouts, write_rows

from rollcorr.diagnostics import check_logs, estimate_provenance, null_of_logs
from rollcorr.diagnostics.null.excess_place import places
from rollcorr.diagnostics.null.excess_tokens import ExcessTokens
from rollcorr.diagnostics.provenance.pair_sample import Context, PairSample, SampleRow


@pytest.fixture(scope="module")
def null(tmp_path_factory):
    return null_of_logs([write_rows(tmp_path_factory.mktemp("null") / "null.parquet", rollouts(rows=96, seed=2))])


def checked(tmp_path, null, rows):
    return check_logs([write_rows(tmp_path / "log.parquet", rows)], null=null)


def changed(rows, change):
    """The rows with other log-probs of the rollout: `change(ids, rollout)` returns them."""
    return [
        {**row, "rollout_log_prob": change(np.array(row["response_ids"]), np.array(row["rollout_log_prob"])).tolist()}
        for row in rows
    ]


def first(result):
    return result.causes[0].code


def test_a_penalty_on_seen_ids(tmp_path, null):
    def penalty(ids, rollout):
        seen = np.array([one in ids[:place] for place, one in enumerate(ids)])
        return rollout + np.where(seen, -0.25, 0.15)

    result = checked(tmp_path, null, changed(rollouts(), penalty))
    assert first(result) == "penalty_on_one_side"
    assert "generation_config.json" in result.causes[0].fix


def test_the_last_token_alone(tmp_path, null):
    result = checked(tmp_path, null, changed(rollouts(), lambda ids, x: np.append(x[:-1], x[-1] - 3)))
    assert (first(result), result.causes[0].where) == ("last_token_differs", {"from_end": [[0, 0]]})


def test_the_rest_is_judged_without_the_last_token(tmp_path, null):
    """The last token carries most of the excess, and the other tokens have other weights."""
    two = changed(rollouts(weights=0.1), lambda ids, x: np.append(x[:-1], x[-1] - 3))
    result = checked(tmp_path, null, two)
    assert [cause.code for cause in result.causes] == ["last_token_differs", "weights_differ"]
    assert result.causes[1].reason.startswith("without distance to the last token 0")


def test_some_rows_beside_ordinary_ones(tmp_path, null):
    rows, others = rollouts(rows=64), rollouts(rows=64, weights=0.3)
    mixed = [other if number % 4 == 1 else row for number, (row, other) in enumerate(zip(rows, others, strict=True))]
    result = checked(tmp_path, null, mixed)
    assert first(result) == "some_rows_differ"
    assert result.causes[0].where == {"rows": list(range(1, 64, 4))}


def test_positions_without_a_name(tmp_path, null):
    def hidden(ids, rollout):
        shift = np.random.default_rng(int(ids[0])).normal(size=11) * 0.4
        return rollout + np.concatenate([np.zeros(20), shift, np.zeros(len(rollout) - 31)])

    result = checked(tmp_path, null, changed(rollouts(), hidden))
    cause = result.causes[0]
    assert (cause.code, cause.where) == ("unknown", {"positions": [[20, 30]]})
    assert "position 20 to 30" in cause.reason
    assert result.health.verdict == "unhealthy"
    assert cause.confirm


def test_other_weights_at_twice_the_null(tmp_path, null):
    """Such an excess passes for one place by chance: the other tokens seem to match the null."""
    result = checked(tmp_path, null, rollouts(rows=24, seed=9, weights=0.015))
    assert first(result) == "weights_differ"
    assert result.causes[0].evidence["ratio"] < 3


def test_missing_mass_is_no_dropout(tmp_path, null):
    """The trainer scores a different id for one token in ten: no axis explains d, but the mean of π / μ is 0.9."""
    random = np.random.default_rng(5)
    result = checked(
        tmp_path, null, changed(rollouts(), lambda ids, x: np.where(random.random(len(x)) < 0.1, x / 4, x))
    )
    assert first(result) == "unknown"


def test_clamped_values(tmp_path, null):
    result = checked(tmp_path, null, changed(rollouts(), lambda ids, x: np.maximum(x, -4)))
    assert first(result) == "clamped_values"
    assert "exactly -4" in result.causes[0].reason.replace("−", "-")


def test_values_of_the_likeliest_ids(tmp_path, null):
    def largest(ids, rollout):
        of_likeliest = log_softmax(1.5 * logits()[ids[:-1]]).max(-1)
        return np.append(rollout[:1], of_likeliest)

    def sharp(ids, rollout):
        own = log_softmax(1.5 * logits()[ids[:-1]])[np.arange(len(ids) - 1), ids[1:]]
        return np.append(rollout[:1], own)

    rows = changed(rollouts(), sharp)
    rows = [{**row, "old_log_prob": row["rollout_log_prob"]} for row in rows]
    assert first(checked(tmp_path, None, changed(rows, largest))) == "other_ids"


def test_rounded_values(tmp_path, null):
    result = checked(tmp_path, null, changed(rollouts(), lambda ids, x: x.round(1)))
    assert first(result) == "storage"
    assert result.causes[0].title == "log-probs are rounded"


def test_log_softmax_in_16_bits():
    own = torch.linspace(-6, -1e-3, 400).log_softmax(0)
    right = torch.cat([own, torch.linspace(-0.004, -5e-4, 20)])
    rounded = torch.cat([own.bfloat16().float(), torch.zeros(20)])
    found = estimate_provenance(rounded[None], right[None])
    assert "bf16_log_softmax" in found.codes
    stored = torch.cat([own.bfloat16().float(), right[400:].bfloat16().float()])
    assert "bf16_log_softmax" not in estimate_provenance(stored[None], right[None]).codes


def test_equal_prefixes_have_equal_hashes():
    prompt, response = torch.tensor([5, 6]), torch.tensor([7, 5, 8])
    context = Context.of(prompt, response)
    assert context.seen.tolist() == [False, True, False]
    assert Context.of(prompt, torch.tensor([7, 5, 9])).prefix.tolist()[:2] == context.prefix.tolist()[:2]
    assert Context.of(torch.tensor([5]), torch.tensor([6, 7, 5])).prefix[1] != context.prefix[0]


def test_equal_prefixes_refute_dropout(tmp_path, null):
    """The same noise after the same prompt and response: a fixed policy; new noise each time: dropout."""
    once = rollouts(rows=24, dropout=0.3)
    assert first(checked(tmp_path, null, once)) == "stochastic_trainer"
    (tmp_path / "log.parquet").unlink()
    assert first(checked(tmp_path, null, [row for row in once for _ in range(2)])) != "stochastic_trainer"
    (tmp_path / "log.parquet").unlink()

    # The same responses, scored twice by a trainer that draws anew.
    random = np.random.default_rng(4)
    twice = [row for row in rollouts(rows=24) for _ in range(2)]
    assert first(checked(tmp_path, null, changed(twice, lambda ids, x: x + 0.2 * random.normal(size=120)))) == (
        "stochastic_trainer"
    )


def test_places_are_those_of_other_rows(null):
    """Noise chooses values without excess in the rows that did not choose them."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(40, 30, generator=generator) * 0.1
    rows = {
        index: SampleRow(one - 1, torch.full((30,), -1.0), torch.ones(30, dtype=torch.bool), torch.arange(30))
        for index, one in enumerate(noise)
    }
    tokens = ExcessTokens.of(PairSample(1, rows, 1200), null.profile)
    assert not [place for place in places(tokens) if place.of_noise < 0.7]
    assert tokens.chosen(tokens.places["positions"] < 3).places["positions"].max() == 2


@pytest.mark.parametrize("onset", range(2, 7))
def test_the_turn_of_onset(onset):
    generator = torch.Generator().manual_seed(onset)
    turn = torch.arange(6).repeat_interleave(14)
    mask = (torch.arange(84) % 14 < 8).expand(48, -1)
    train = -torch.rand(48, 84, generator=generator) * 3
    noise = torch.randn(48, 84, generator=generator)
    rollout = (train + noise * torch.where(turn + 1 >= onset, 0.5, 0.01)).clamp(max=-1e-3)
    found = estimate_provenance(train, rollout, mask).finding("turn_drift")
    assert found.where == {"turn": [[onset, 6]]}
