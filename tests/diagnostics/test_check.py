"""Checking rollout logs: the whole equals its parts, and what is odd in the raw columns is named with its place."""

import math
import weakref

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rollcorr.diagnostics.log_check.tally as module
from rollcorr.config import RolloutCorrectionConfig, SamplingSpec
from rollcorr.core.sampling import KeptSets
from rollcorr.correction import correct
from rollcorr.diagnostics.log_check.check import DIAGNOSIS, check_logs, choose_config
from rollcorr.rollout_log import BatchLimits, RolloutBatch, RolloutLogError, RolloutLogWriter, convert_log
from rollcorr.run_directory.stored_run import BadInputError


def tensors(seed=0, rows=12, length=9, noise=0.1):
    generator = torch.Generator().manual_seed(seed)
    rollout = -3 * torch.rand(rows, length, generator=generator) - 0.5
    train = (rollout + noise * torch.randn(rows, length, generator=generator)).clamp(max=-0.01)
    mask = torch.rand(rows, length, generator=generator) < 0.8
    mask[:, 0] = True
    return train, rollout, mask


def log(path, *batches, **columns):
    """A log of (step, train, rollout, mask) batches."""
    with RolloutLogWriter(path) as writer:
        for step, train, rollout, mask in batches:
            names = {"old_log_prob": train, **columns}
            writer.write(RolloutBatch.from_padded(mask, rollout_log_prob=rollout, step=step, **names))
    return path


@settings(max_examples=8)
@given(seed=st.integers(0, 99), batch_size=st.integers(1, 40), level=st.sampled_from(["token", "sequence"]))
def test_streaming_in_any_batch_size_equals_one_call(tmp_path_factory, seed, batch_size, level):
    config = RolloutCorrectionConfig(rollout_is=level, rollout_rs="seq_mean_k3", rollout_rs_threshold=0.01)
    path = tmp_path_factory.mktemp("log") / "log.parquet"
    parts = [(step, *tensors(seed + step)) for step in (1, 2, 3)]
    result = check_logs([log(path, *parts)], config, batch_size=batch_size)
    whole = correct(*(torch.cat(column) for column in list(zip(*parts, strict=True))[1:]), config).metrics()
    for name, value in whole.items():
        assert result.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-9), name
    assert result.rows == 36
    for (step, *batch), metrics in zip(parts, result.series, strict=True):
        assert metrics["step"] == step
        assert metrics["rollout_corr/kl"] == pytest.approx(
            correct(*batch, config).metrics()["rollout_corr/kl"], rel=1e-5
        )


def test_steps_may_be_spread_over_batches_and_files(tmp_path):
    first, second = tensors(1), tensors(2)
    a = log(tmp_path / "a.parquet", (2, *second), (1, *first))
    b = log(tmp_path / "b.jsonl", (1, *second))
    result = check_logs([a, b], batch_size=5)
    assert [metrics["step"] for metrics in result.series] == [1, 2]
    assert [metrics["rollout_corr/sequence_count"] for metrics in result.series] == [24, 12]
    assert result.files == (str(a), str(b))


def test_the_order_of_rows_does_not_matter(tmp_path):
    train, rollout, mask = tensors()
    step = torch.tensor([1, 2] * 6)
    shuffled = check_logs([log(tmp_path / "a.parquet", (step, train, rollout, mask))])
    order = step.argsort(stable=True)
    sorted_ = check_logs([log(tmp_path / "b.parquet", (step[order], train[order], rollout[order], mask[order]))])
    for ours, theirs in zip(shuffled.series, sorted_.series, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12)


def test_a_log_without_steps_is_one_entry(tmp_path):
    result = check_logs([log(tmp_path / "log.parquet", (None, *tensors()))])
    assert len(result.series) == 1
    assert result.health.steps is None


def test_a_small_mismatch_gives_no_finding_with_the_default_diagnosis(tmp_path):
    result = check_logs([log(tmp_path / "log.parquet", (1, *tensors(noise=0.01, rows=20)))])
    assert (result.health.findings, result.health.verdict) == ((), "not judged")
    (sentence,) = result.health.not_judged
    assert sentence.startswith("weights not judged")
    assert result.config is DIAGNOSIS
    assert "rollout_corr/rollout_is_veto_fraction" in result.metrics


def test_rewards_are_averaged_over_those_that_are_known(tmp_path):
    reward = torch.tensor([1.0] * 5 + [float("nan")] * 2 + [0.0] * 5)
    result = check_logs([log(tmp_path / "log.parquet", (1, *tensors()), reward=reward)])
    assert result.metrics["reward/mean"] == 0.5


def test_the_training_side_is_old_log_prob_then_log_prob_and_said(tmp_path):
    train, rollout, mask = tensors()
    both = log(tmp_path / "both.parquet", (1, rollout, rollout, mask), log_prob=train)
    assert check_logs([both]).train_column == "old_log_prob"
    assert "π is the column old_log_prob, μ is rollout_log_prob" in check_logs([both]).remarks
    assert check_logs([both], train_column="log_prob").train_column == "log_prob"
    only = log(tmp_path / "only.parquet", (1, train, rollout, mask), old_log_prob=None, log_prob=train)
    assert check_logs([only]).train_column == "log_prob"


def test_a_copied_old_log_prob_is_degenerate_and_bypass_measures_the_current_policy(tmp_path):
    train, rollout, mask = tensors()
    path = log(tmp_path / "log.parquet", (1, rollout, rollout, mask), log_prob=train)
    result = check_logs([path]).health
    (finding,) = result.notes
    assert finding.title.startswith("degenerate")
    assert result.verdict == "not judged"
    bypass = check_logs([path], RolloutCorrectionConfig(bypass_mode=True))
    assert bypass.train_column == "log_prob"
    assert bypass.health.values["kl"] != 0


def test_zeros_that_the_trainer_contradicts_are_found(tmp_path):
    train, rollout, mask = tensors()
    train[3, :2], rollout[3, :2], mask[3, :2] = torch.tensor([-5.0, -0.5]), 0.0, True
    result = check_logs([log(tmp_path / "log.parquet", (1, train, rollout, mask))])
    (finding,) = [f for f in result.health.warnings if f.metric == "log/contradicted_zero_count"]
    assert finding.value == 1, "a zero against −0.5 nats may be rounding, one against −5 is not"
    assert result.metrics["log/zero_fraction"] == pytest.approx(2 / mask.sum().item())


def test_masked_zeros_and_placeholders_are_not_looked_at(tmp_path):
    train, rollout, mask = tensors(noise=0.01)
    mask[2] = False
    mask[2, 0] = True
    rollout[2, 1:] = torch.tensor([0.0, -9999.0, 3.0, float("nan"), 0.0, 0.0, 0.0, 0.0])
    assert check_logs([log(tmp_path / "log.parquet", (1, train, rollout, mask))]).health.findings == ()


def test_placeholders_are_flagged_with_their_place_and_read_as_missing(tmp_path):
    train, rollout, mask = tensors(noise=0.01)
    rollout[4, 0] = rollout[7, 0] = -9999.0
    path = log(tmp_path / "log.parquet", (1, train, rollout, mask))
    result = check_logs([path])
    (finding,) = [f for f in result.health.warnings if "−9999" in f.title]
    assert (finding.metric, finding.value) == ("log/rollout_log_prob", 2.0)
    assert finding.place.startswith(f"{path}, row 4")
    assert result.health.values["nonfinite_count"] == 2
    assert abs(result.health.values["kl"]) < 0.1


def test_positive_log_probs_are_flagged_unless_they_are_densities(tmp_path):
    train, rollout, mask = tensors(noise=0.01)
    path = log(tmp_path / "log.parquet", (1, train + 4, rollout + 4, mask))
    assert {f.title for f in check_logs([path]).health.warnings} == {"log-probs above 0"}
    assert check_logs([path], diffusion=True).health.warnings == ()


def test_rows_of_zeros_are_flagged(tmp_path):
    train, rollout, mask = tensors(noise=0.01)
    mask[5], rollout[5], train[5] = True, 0.0, -0.5
    result = check_logs([log(tmp_path / "log.parquet", (1, train, rollout, mask))])
    assert "most log-probs of a sequence are exactly 0" in {f.title for f in result.health.warnings}


def test_zeros_on_both_sides_are_tokens_without_a_choice(tmp_path):
    """As where the kept sets were replayed, and the log records neither them nor the settings."""
    train, rollout, mask = tensors(noise=0.01)
    mask[5], rollout[5, :-1], train[5, :-1] = True, 0.0, 0.0
    result = check_logs([log(tmp_path / "log.parquet", (1, train, rollout, mask))])
    assert "zeros" not in {finding.code for finding in result.health.warnings}


def test_an_interrupt_reports_what_was_seen(tmp_path):
    path = log(tmp_path / "log.parquet", (1, *tensors(1)), (2, *tensors(2)))
    seen = []

    def interrupt(rows, total):
        assert total == 24
        seen.append(rows)
        if sum(seen) >= 12:
            raise KeyboardInterrupt

    result = check_logs([path], batch_size=6, on_rows=interrupt)
    assert result.interrupted
    assert result.rows == 12
    assert "interrupted: this covers 12 of 24 rows only" in result.remarks


def test_a_configuration_that_raises_on_missing_values_counts_them_here(tmp_path):
    train, rollout, mask = tensors()
    train[0, 0] = float("nan")
    path = log(tmp_path / "log.parquet", (1, train, rollout, mask))
    config = RolloutCorrectionConfig(rollout_is="token", nonfinite="raise")
    assert check_logs([path], config).health.values["nonfinite_count"] == 1


def test_a_log_without_a_valid_token_is_not_called_healthy(tmp_path):
    path = tmp_path / "log.jsonl"
    rows = [{"response_mask": [False], "rollout_log_prob": [-1.0], "old_log_prob": [-1.0], "step": 1}]
    with RolloutLogWriter(path) as writer:
        writer.write(RolloutBatch.from_rows(rows))
    health = check_logs([path]).health
    assert (health.findings, health.verdict) == ((), "not judged")
    assert health.not_judged[0].startswith("nothing was measured: ")


def test_bad_input_names_file_column_and_fix(tmp_path):
    train, rollout, mask = tensors()
    path = log(tmp_path / "log.parquet", (1, train, rollout, mask), old_log_prob=None)
    with pytest.raises(
        BadInputError, match=r"log\.parquet: no column old_log_prob or log_prob.*no training side.*score the tokens"
    ):
        check_logs([path])
    with pytest.raises(BadInputError, match="old_log_prob or log_prob, not 'advantages'"):
        check_logs([path], train_column="advantages")
    with pytest.raises(RolloutLogError, match="nowhere"):
        check_logs([tmp_path / "nowhere.parquet"])
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(BadInputError, match="there is no row"):
        check_logs([tmp_path / "empty.jsonl"])


def test_the_measured_configuration_is_a_preset_a_file_of_any_generation_or_the_default(tmp_path):
    old = tmp_path / "old.yaml"
    old.write_text("algorithm: {rollout_is: true, rollout_is_threshold: 3.0, rollout_is_level: sequence}\n")
    assert choose_config() is DIAGNOSIS
    assert choose_config(preset="decoupled_geo_rs").rollout_rs == "seq_mean_k1"
    assert choose_config(settings=[str(old)]).rollout_is == "sequence"
    for bad in ({"preset": "decoupled_goe_rs"}, {"preset": "disabled", "settings": [str(old)]}):
        with pytest.raises(BadInputError):
            choose_config(**bad)
    old.write_text("algorithm: {rollout_correction: null}\n")
    with pytest.raises(BadInputError, match="nothing to measure; try --preset disabled"):
        choose_config(settings=[str(old)])


def test_memory_holds_one_batch_at_a_time(tmp_path, monkeypatch):
    path = log(tmp_path / "log.parquet", *[(step, *tensors(step)) for step in range(5)])
    sizes = []
    monkeypatch.setattr(module, "validate_batch", lambda batch: sizes.append(len(batch)) or ())
    check_logs([path], batch_size=7)
    assert max(sizes) == 7
    assert sum(sizes) == 60


@pytest.mark.parametrize(("suffix", "rows"), [("parquet", 200), ("jsonl", 20)])
def test_memory_does_not_grow_with_the_log_nor_with_the_length_of_its_rows(tmp_path, monkeypatch, suffix, rows):
    """One row group, as foreign writers make them, in rows of 20,000 tokens: 256 of those are too many for a batch."""
    tokens = 20_000
    values = pa.array(torch.randn(rows * tokens).sub(9).numpy())
    column = pa.ListArray.from_arrays(pa.array(range(0, rows * tokens + 1, tokens), pa.int32()), values)
    pq.write_table(pa.table({"rollout_log_prob": column, "old_log_prob": column}), tmp_path / "log.parquet")
    del column, values
    if suffix == "jsonl":
        monkeypatch.setitem(BatchLimits.__init__.__kwdefaults__, "text_bytes", 4 << 20)  # about 100,000 tokens
        convert_log(tmp_path / "log.parquet", tmp_path / "log.jsonl", batch_size=5)
    alive, seen, before = weakref.WeakSet(), [], pa.total_allocated_bytes()

    def look(batch):
        alive.add(batch)
        seen.append((len(alive), int(batch.lengths.sum()), pa.total_allocated_bytes() - before))
        return ()

    monkeypatch.setattr(module, "validate_batch", look)
    assert check_logs([tmp_path / f"log.{suffix}"]).rows == rows
    batches, held, arrow = map(max, zip(*seen, strict=True))
    assert batches <= 2, "the one at work, and the one before it until its name is taken"
    assert held <= 1 << 18
    assert arrow < 16_000_000, "the Parquet file's columns are 32 MB"


def truncated(rows=30, length=12, seed=0):
    """A log of a truncated sampler, as columns: 5 ids kept with mass 0.8, or one; the trainer's log-probs are full."""
    generator = torch.Generator().manual_seed(seed)
    alone = torch.rand(rows, length, generator=generator) < 0.6
    train = torch.where(alone, -0.02, -4 * torch.rand(rows, length, generator=generator) - 0.4)
    rollout = torch.where(alone, 0.0, train - math.log(0.8))
    ids, mask = torch.randint(7, 207, (rows, length), generator=generator), torch.ones(rows, length)
    pairs = zip(ids.flatten().tolist(), alone.flatten().tolist(), strict=True)
    kept = KeptSets.of([[token] if one else [token, 1, 2, 3, 4] for token, one in pairs])
    return train, rollout, mask, {"kept": kept, "response_ids": ids}


def titles(result):
    return {finding.title for finding in result.health.findings}


def test_a_truncated_log_is_told_from_placeholders_and_its_sets_are_named(tmp_path):
    train, rollout, mask, columns = truncated()
    found = check_logs([log(tmp_path / "log.parquet", (1, train, rollout, mask), **columns)])
    assert "most log-probs of a sequence are exactly 0" not in titles(found)
    (finding,) = [f for f in found.health.findings if f.code == "truncated"]
    assert finding.fix.endswith("this log has the sets, in kept_ids and kept_offsets")
    replayed = check_logs([log(tmp_path / "replayed.jsonl", (1, rollout, rollout - 1e-5, mask), **columns)])
    assert not {t for t in titles(replayed) if "truncated" in t or "kept" in t}


def test_kept_sets_that_cannot_be_replayed_are_a_finding(tmp_path):
    train, rollout, mask, columns = truncated()
    ids = columns["kept"].ids.clone()
    first = int(columns["kept"].offsets.diff().argmax())
    ids[columns["kept"].offsets[first] + 1] = ids[columns["kept"].offsets[first]]
    columns["kept"] = KeptSets(ids, columns["kept"].offsets)
    result = check_logs([log(tmp_path / "log.parquet", (1, train, rollout, mask), **columns)])
    (finding,) = [f for f in result.health.findings if f.code == "kept_twice"]
    assert (finding.title, finding.first_row) == ("ids twice in one set", 0)
    assert finding.reason.startswith("1 in this row")


def test_a_bad_file_among_good_ones_gives_a_partial_verdict_on_request(tmp_path):
    good = log(tmp_path / "good.parquet", (1, *tensors(noise=0.01, rows=20)))
    other = log(tmp_path / "other.jsonl", (2, *tensors(noise=0.01, rows=20)))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 this is no log")
    (tmp_path / "cut.jsonl").write_text(other.read_text() + '{"rollout_log_prob": [-1.0], "old_lo\n')
    with pytest.raises(RolloutLogError, match=r"bad\.parquet"):
        check_logs([tmp_path])
    result = check_logs([tmp_path], keep_going=True, batch_size=5)
    assert result.rows == 60, "the batches before the damage count"
    assert [name for text in result.unreadable for name in ("bad.parquet", "cut.jsonl") if name in text] == [
        "bad.parquet",
        "cut.jsonl",
    ]
    assert result.health.verdict == "not judged"
    assert result.health.not_judged[0].startswith("this is the verdict on part of the log: 2 files could not be read")
    assert sum(remark.startswith("left out: ") for remark in result.remarks) == 2
    assert check_logs([good], keep_going=True).unreadable == ()
    with pytest.raises(BadInputError, match="not a whole Parquet file"):
        check_logs([tmp_path / "bad.parquet"], keep_going=True)


def test_a_file_without_a_side_is_left_out_wherever_it_stands(tmp_path):
    train, rollout, mask = tensors(noise=0.01, rows=20)
    for name in ("a.jsonl", "c.jsonl"):
        log(tmp_path / name, (1, train, rollout, mask), old_log_prob=None)
    log(tmp_path / "b.jsonl", (1, train, rollout, mask))
    result = check_logs([tmp_path], keep_going=True)
    assert result.rows == 20
    assert len(result.unreadable) == 2


def test_mixed_sampling_settings_are_named(tmp_path):
    train, rollout, mask = tensors(noise=0.01, rows=20)
    warm, cold = (SamplingSpec(temperature=t, logprobs="processed") for t in (1.0, 0.7))
    with RolloutLogWriter(tmp_path / "log.parquet") as writer:
        for step, spec in ((1, warm), (2, cold)):
            columns = {"rollout_log_prob": rollout, "old_log_prob": train, "step": step, "sampling": spec}
            writer.write(RolloutBatch.from_padded(mask, **columns))
    (note,) = check_logs([tmp_path / "log.parquet"]).health.notes
    assert note.code == "mixed_settings"
    assert "temperature: 0.7, 1.0" in note.reason


@pytest.mark.parametrize("noise", [0.003, 0.1])
@pytest.mark.parametrize("kept_tokens", [2, 5])
def test_replayed_kept_sets_without_recorded_settings_are_not_called_truncated(tmp_path, kept_tokens, noise):
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(60, 40, 32, generator=generator)
    keep = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, logits.topk(kept_tokens).indices, True)
    noisy = logits + noise * torch.randn(logits.shape, generator=generator)
    rollout, train = (x.masked_fill(~keep, -math.inf).log_softmax(-1) for x in (logits, noisy))
    ids = torch.multinomial(rollout.exp().flatten(0, 1), 1, generator=generator).view(60, 40)
    sets = [row.nonzero().flatten().tolist() for row in keep.flatten(0, 1)]
    rollout, train = (x.gather(-1, ids[..., None]).squeeze(-1) for x in (rollout, train))
    columns = {"kept": KeptSets.of(sets), "response_ids": ids}
    result = check_logs([log(tmp_path / "log.parquet", (1, train, rollout, torch.ones(60, 40)), **columns)])
    assert result.health.warnings == ()


def test_a_wrong_temperature_is_the_cause_and_its_numbers_follow(tmp_path):
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(64, 50, 32, generator=generator)
    sampler, trainer = ((logits / t).log_softmax(-1) for t in (0.5, 1.0))
    ids = torch.multinomial(sampler.exp().flatten(0, 1), 1, generator=generator).view(64, 50)
    rollout, train = (x.gather(-1, ids[..., None]).squeeze(-1) for x in (sampler, trainer))
    health = check_logs([log(tmp_path / "log.parquet", (1, train, rollout, torch.ones(64, 50)))]).health
    (cause,) = [cause for cause in health.causes if cause.finding.severity != "note"]
    assert cause.finding.code == "tempered"
    assert "kl" in {below.finding.metric for below in cause.consequences}
