"""The scripts of experiments/diagnosis on a small sample: logs match their labels, and the scores are correct."""

import csv
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="pip install 'rollcorr[train]'")
pytest.importorskip("pyarrow", reason="pip install 'rollcorr[log]'")

LANES = Path(__file__).parents[2] / "experiments" / "diagnosis"


@pytest.fixture(scope="module")
def lanes():
    """The scripts import each other by name, as scripts do."""
    sys.path.insert(0, str(LANES))
    try:
        import expected
        import healthy_logs
        import live_faults
        import log_files
        import small_model
        import threads

        yield {
            module.__name__: module for module in (expected, healthy_logs, live_faults, log_files, small_model, threads)
        }
    finally:
        sys.path.remove(str(LANES))


@pytest.fixture(scope="module")
def model(lanes):
    return lanes["small_model"].load_model()


def generator(seed=0):
    return torch.Generator("cpu").manual_seed(seed)


def test_sampler_and_trainer_of_equal_weights_agree_to_rounding(lanes, model):
    tools = lanes["small_model"]
    prompts = tools.make_prompts(model, 6, generator=generator(), longest=12)
    drawn = tools.sample(model, prompts, tokens=12, generator=generator(1), temperature=0.7)
    scored = tools.score(model, prompts, drawn.ids, temperature=0.7)
    for rollout, train in zip(drawn.log_prob, scored, strict=True):
        assert rollout == pytest.approx(train, abs=2e-5)


def test_unmasked_pads_and_an_old_cache_change_what_is_sampled(lanes, model):
    tools = lanes["small_model"]
    prompts = [[1, 403, 407, 261], [1, 403, 407, 261, 378, 432, 383, 286]]
    other = tools.quantized(model, bits=3)

    def k3(**options):
        drawn = tools.sample(model, prompts, tokens=8, generator=generator(), **options)
        return lanes["log_files"].mean_k3(drawn.log_prob, tools.score(model, prompts, drawn.ids))

    assert k3() < 1e-9
    assert k3(pads_unmasked=True) > 1e-5
    assert k3(cache_model=other) > 1e-5


def test_an_update_moves_the_policy_and_a_zeroed_adapter_is_the_policy_before(lanes, model):
    tools = lanes["small_model"]
    prompts = tools.make_prompts(model, 4, generator=generator(), longest=8)
    ids = tools.sample(model, prompts, tokens=8, generator=generator()).ids
    before = tools.score(model, prompts, ids)

    *_, updated = tools.train(tools.copied(model).requires_grad_(True), 1, generator=generator(), rows=4, tokens=8)
    assert tools.score(updated, prompts, ids) != before

    adapted, parameters, zero = tools.with_adapter(model, rank=2, seed=0)
    for parameter in parameters:
        parameter.data += 0.05
    assert tools.score(adapted, prompts, ids) != before
    zero()
    assert tools.score(adapted, prompts, ids) == before


def test_rounding_keeps_as_many_levels_as_its_bits_allow(lanes):
    weight = torch.randn(3, 64, generator=generator(), device="cpu")
    rounded = lanes["small_model"].rounded(weight, bits=4, group=32)
    for row in rounded:
        for group in row.split(32):
            assert len(group.unique()) <= 16
    assert (rounded - weight).abs().max() <= weight.abs().max() / 7


def test_a_piece_of_a_response_has_what_came_before_in_its_prompt(lanes):
    healthy = lanes["healthy_logs"]
    whole = healthy.Row([1, 2], [3, 4, 5, 6], [-1.0, -2.0, -3.0, -4.0], [-1.1, -2.1, -3.1, -4.1], [])
    piece = healthy._cut(whole, 1, 3)
    assert (piece.prompt, piece.ids, piece.rollout, piece.train) == ([1, 2, 3], [4, 5], [-2.0, -3.0], [-2.1, -3.1])


def test_a_replayed_log_scores_both_sides_over_the_sets_that_it_records(lanes, model, monkeypatch):
    healthy = lanes["healthy_logs"]
    monkeypatch.setattr(healthy, "POOL_ROWS", 3)
    monkeypatch.setattr(healthy, "POOL_TOKENS", 6)
    rows = healthy.endless_rows(model, healthy.Group(engine="fp32", temperature=1.0, top_k=5), seed=0)
    row = next(rows)
    assert row.train == pytest.approx(row.rollout, abs=2e-5)
    assert all(len(kept) == 5 and token in kept for kept, token in zip(row.kept, row.ids, strict=True))


def test_every_thread_has_a_cause_of_the_table_and_stands_once(lanes):
    threads, expected = lanes["threads"], lanes["expected"]
    assert all(thread.cause in expected.CLASSES for thread in threads.THREADS)
    assert len({thread.name for thread in threads.THREADS}) == len(threads.THREADS) == 10


def test_every_fault_is_made_and_expected_and_codes_belong_to_one_class(lanes):
    expected, faults = lanes["expected"], lanes["live_faults"].FAULTS
    assert set(expected.FAULTS) == {fault for fault in faults if not fault.startswith("healthy")}
    codes = [code for codes in expected.CLASSES.values() for code in codes]
    assert len(codes) == len(set(codes))


def test_without_a_null_the_weights_must_be_named_where_the_token_id_explains_enough(lanes):
    right = lanes["expected"].right_alone
    assert right("rope_theta", "weights_differ", id_explains=True)
    assert not right("rope_theta", "unexplained", id_explains=True)
    assert right("rope_theta", "unexplained", id_explains=False)
    assert right("no_bos", "template", id_explains=True)
    assert right("prefix_cache", "template", id_explains=False)
    assert not right("left_pads", "truncated", id_explains=False)
    assert not right("rope_theta", "template", id_explains=False)


def test_a_log_of_a_fault_is_written_with_its_entry(lanes, model, tmp_path):
    faults, files = lanes["live_faults"], lanes["log_files"]
    prompts = [[1, 403, 407], [1, 403, 407, 261]]
    case = faults.Case(model, model, fed=lambda prompt: prompt[1:])
    drawn = faults.draw(case, prompts, engine="fp32", temperature=1.0, tokens=6, seed=3)
    faults.write_drawn(tmp_path / "log.parquet", drawn, engine="fp32", temperature=1.0, step=4, version=3)

    entry = faults._entry("log.parquet", "no_bos", drawn, engine="fp32", temperature=1.0, null="", null_k3=1.0)
    files.write_index(tmp_path, [entry])
    assert files.read_index(tmp_path) == (entry,)
    with (tmp_path / files.INDEX).open(encoding="utf-8") as file:
        assert next(csv.DictReader(file))["fault"] == "no_bos"

    from rollcorr.rollout_log import read_rollout_log

    (batch,) = read_rollout_log([tmp_path / "log.parquet"])
    row = batch.to_rows()[1]
    assert row["prompt_ids"] == prompts[1]
    assert row["policy_versions"] == [{"start": 0, "length": len(row["response_ids"]), "version": 3}]
    assert entry.k3 > 1e-4
