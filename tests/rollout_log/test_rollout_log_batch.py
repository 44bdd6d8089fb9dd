"""Batches from a trainer's tensors, and exact round trips through every file format."""

import doctest
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_python

import rollcorr.rollout_log.batch
from rollcorr.config import SamplingSpec
from rollcorr.core.sampling import KeptSets
from rollcorr.rollout_log import RolloutBatch, RolloutLogError, RolloutLogWriter, read_rollout_log
from rollcorr.rollout_log.schema import list_array

pa = pytest.importorskip("pyarrow", reason="needs rollcorr[log]")

NAN = math.nan
MASK = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 1, 1]])


def through_file(batch, suffix):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"log{suffix}"
        with RolloutLogWriter(path) as log:
            log.write(batch)
        return list(read_rollout_log(path))


def bits(tensor):
    return tensor.contiguous().view(torch.int32)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The fields of `SamplingSpec` that the log distinguishes."""

    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 20
    logprobs: str = "processed"
    engine: str | None = "vllm"
    engine_version: str | None = "0.32.0"
    policy_version: int | None = 4


def test_right_padding_is_cut_and_holes_are_kept():
    batch = RolloutBatch.from_padded(MASK, rollout_log_prob=torch.arange(12.0).view(3, 4))
    assert batch.lengths.tolist() == [3, 0, 4]
    assert batch.cu_seqlens.tolist() == [0, 3, 3, 7]
    assert batch.response_mask().tolist() == MASK.bool().tolist()
    assert batch.packed("response_mask").tolist() == [True, False, True, False, True, True, True]
    assert batch.packed("rollout_log_prob").tolist() == [0, 1, 2, 8, 9, 10, 11]
    assert batch.padded("rollout_log_prob").tolist() == [[0, 1, 2, 0], [0, 0, 0, 0], [8, 9, 10, 11]]
    assert batch.padded("rollout_log_prob", length=5, fill=-1)[0].tolist() == [0, 1, 2, -1, -1]


def test_lengths_keep_masked_tokens_at_the_end():
    batch = RolloutBatch.from_padded(MASK, lengths=torch.tensor([4, 2, 4]), response_ids=torch.arange(12).view(3, 4))
    assert batch.lengths.tolist() == [4, 2, 4]
    assert batch.padded("response_ids").tolist() == [[0, 1, 2, 3], [4, 5, 0, 0], [8, 9, 10, 11]]
    assert batch.response_mask().tolist() == MASK.bool().tolist()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_the_type_of_the_mask_changes_nothing(dtype):
    batch = RolloutBatch.from_padded(MASK.to(dtype), log_prob=torch.zeros(3, 4))
    assert batch.response_mask().tolist() == MASK.bool().tolist()


def test_every_column_by_hand():
    batch = RolloutBatch.from_padded(
        MASK,
        step=3,
        sequence_id=[10, 11, 12],
        group_id=torch.tensor([5, 5, 6]),
        prompt_ids=torch.tensor([[0, 7], [8, 9], [0, 0]]),
        prompt_mask=torch.tensor([[0, 1], [1, 1], [0, 0]]),
        reward=torch.tensor([1.0, NAN, 0.5], dtype=torch.bfloat16),
        policy_versions=[[(0, 1, 8), (1, 2, 9)], [], None],
        sampling={"temperature": 0.7, "top_k": 20, "logprobs": "raw"},
        kept_ids=[[1, 2, 3], [], None],
        kept_offsets=[torch.tensor([0, 1, 2, 3]), [0], None],
        engine="transformers",
        model=None,
    )
    assert batch.values("step").tolist() == [3, 3, 3]
    assert batch.objects("sequence_id") == ["10", "11", "12"]
    assert batch.objects("group_id") == ["5", "5", "6"]
    assert batch.padded("prompt_ids").tolist() == [[7, 0], [8, 9], [0, 0]]
    assert batch.ragged("prompt_ids")[1].tolist() == [1, 2, 0]
    reward = batch.values("reward")
    assert reward.dtype == torch.float32
    assert reward[[0, 2]].tolist() == [1.0, 0.5]
    assert reward[1].isnan()
    spans = [{"start": 0, "length": 1, "version": 8}, {"start": 1, "length": 2, "version": 9}]
    assert batch.objects("policy_versions") == [spans, [], None]
    assert batch.objects("sampling")[2]["temperature"] == 0.7  # a double: it comes back as it was set
    assert batch.objects("sampling")[2]["min_p"] is None
    assert [part.tolist() for part in batch.ragged("kept_offsets")] == [[0, 1, 2, 3, 0], [4, 1, 0]]
    assert batch.objects("kept_ids") == [[1, 2, 3], [], None]
    assert batch.objects("engine") == ["transformers"] * 3
    assert "model" not in batch.columns


def test_kept_sets_come_back_packed_over_all_rows():
    mask = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 0]])
    sets = [[[1, 2], [3], [4]], [], [[5], [6, 7]]]
    rows = [[sum(map(len, row[:t])) for t in range(len(row) + 1)] for row in sets]
    columns = {"kept_ids": [[token for kept in row for token in kept] for row in sets], "kept_offsets": rows}
    kept = RolloutBatch.from_padded(mask, **columns).kept_sets()
    assert kept.ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert kept.offsets.tolist() == [0, 2, 3, 4, 5, 7]
    columns["kept_offsets"] = [rows[0], rows[1], rows[2][:-1]]
    batch = RolloutBatch.from_padded(mask, **columns)
    with pytest.raises(RolloutLogError, match="row 2, column kept_offsets: 2 offsets for a response of 2 tokens"):
        batch.kept_sets()


def test_kept_sets_of_sampled_tokens_become_columns_and_come_back():
    """A hole keeps no id; packed and padded agree; the row without a token has one offset."""
    mask = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 0]])
    kept = KeptSets.of([[1, 2], [4], [5], [6, 7]])
    batch = RolloutBatch.from_padded(mask, kept=kept)
    assert batch.objects("kept_ids") == [[1, 2, 4], [], [5, 6, 7]]
    assert batch.objects("kept_offsets") == [[0, 2, 2, 3], [0], [0, 1, 3]]
    assert batch.kept_sets().select(batch.packed("response_mask").nonzero()[:, 0]).ids.tolist() == kept.ids.tolist()
    packed = RolloutBatch.from_packed(torch.tensor([1, 0, 1, 1, 1]), cu_seqlens=torch.tensor([0, 3, 3, 5]), kept=kept)
    assert packed.objects("kept_offsets") == batch.objects("kept_offsets")
    with pytest.raises(ValueError, match="kept sets are of 4 tokens, response_mask has 5"):
        RolloutBatch.from_padded(torch.ones(1, 5), kept=kept)


def test_versions_of_tokens_become_spans():
    versions = torch.tensor([[3, 3, 4], [5, 9, 9], [7, 8, 9]])
    batch = RolloutBatch.from_padded(torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]]), policy_versions=versions)
    spans = [{"start": 0, "length": 2, "version": 3}, {"start": 2, "length": 1, "version": 4}]
    assert batch.objects("policy_versions") == [spans, [{"start": 0, "length": 1, "version": 5}], []]


def test_a_sampling_spec_fills_engine_and_policy_version():
    batch = RolloutBatch.from_padded(MASK, sampling=Spec(), engine_version="mine")
    assert batch.objects("engine") == ["vllm"] * 3
    assert batch.objects("engine_version") == ["mine"] * 3
    assert batch.objects("policy_versions")[0] == [{"start": 0, "length": 3, "version": 4}]
    assert batch.objects("policy_versions")[1] == []
    assert batch.objects("sampling")[0]["logprobs"] == "processed"
    mixed = RolloutBatch.from_padded(MASK, sampling=[Spec(), None, Spec(engine=None, policy_version=None)])
    assert mixed.objects("engine") == ["vllm", None, None]
    assert mixed.objects("policy_versions")[1:] == [None, None]
    assert mixed.objects("sampling")[1] is None


def test_the_sampling_fields_are_those_of_the_sampling_spec():
    spec = SamplingSpec(temperature=0.3, top_k=5, engine="transformers")
    batch = RolloutBatch.from_padded(MASK, sampling=spec)
    settings = batch.objects("sampling")[0]
    assert None not in settings.values()
    assert SamplingSpec(**settings, engine=batch.objects("engine")[0]) == spec


padded_batches = st.tuples(st.integers(0, 5), st.integers(0, 6), st.integers(0, 2**16))


@settings(deadline=None, max_examples=25)
@given(shape=padded_batches, suffix=st.sampled_from([".parquet", ".jsonl", ".jsonl.gz"]))
def test_any_padded_batch_comes_back_bit_for_bit(shape, suffix):
    B, T, seed = shape
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(B, T, generator=generator) < 0.5
    ids = torch.randint(0, 2**31 - 1, (B, T), generator=generator)
    patterns = torch.randint(-(2**31), 2**31 - 1, (B, T), generator=generator, dtype=torch.int32)
    log_prob = patterns.view(torch.float32)  # every kind of float: tiny, huge, −0.0, ±inf, NaN
    log_prob = torch.where(log_prob.isnan(), NAN, log_prob) if "json" in suffix else log_prob
    reward = log_prob.sum(1).nan_to_num(1.5)  # only NaN would be a column without records
    batch = RolloutBatch.from_padded(mask, response_ids=ids, rollout_log_prob=log_prob, reward=reward)
    back = through_file(batch, suffix)
    if not B:
        assert back == []
        return
    (back,) = back
    inside = torch.arange(T) < batch.lengths[:, None]
    assert torch.equal(back.lengths, batch.lengths)
    assert torch.equal(back.packed("response_mask"), mask[inside])
    assert torch.equal(back.packed("response_ids"), ids[inside].int())
    assert torch.equal(bits(back.packed("rollout_log_prob")), bits(log_prob[inside]))
    assert torch.equal(back.values("reward"), reward)


@settings(deadline=None, max_examples=25)
@given(shape=padded_batches)
def test_packed_and_padded_tensors_make_the_same_batch(shape):
    B, T, seed = shape
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, T + 1, (B,), generator=generator)
    inside = torch.arange(T) < lengths[:, None]
    mask = (torch.rand(B, T, generator=generator) < 0.5) & inside
    values = torch.randn(B, T, generator=generator)
    padded = RolloutBatch.from_padded(mask, lengths=lengths, advantages=values, step=1)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    packed = RolloutBatch.from_packed(mask[inside], cu_seqlens=cu_seqlens, advantages=values[inside], step=1)
    assert padded.records.equals(packed.records)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_null_and_missing_values_come_back_as_nan_and_null(suffix):
    rows = [
        {"rollout_log_prob": [-1.0, None], "response_mask": [0, 1], "reward": None, "step": 1},
        {"rollout_log_prob": None, "response_mask": None, "response_ids": [4, 5], "reward": 2.0, "step": None},
        {"rollout_log_prob": [], "response_mask": [], "response_ids": [], "group_id": "a"},
    ]
    (batch,) = through_file(RolloutBatch.from_rows(rows), suffix)
    assert batch.lengths.tolist() == [2, 2, 0]
    values = batch.packed("rollout_log_prob")
    assert values[0] == -1.0
    assert values[1:].isnan().all()
    assert batch.packed("response_mask").tolist() == [False, True, True, True]
    assert batch.objects("rollout_log_prob")[1:] == [None, []]
    assert batch.objects("group_id") == [None, None, "a"]
    assert not batch.has("old_log_prob")
    with pytest.raises(RolloutLogError, match=r"row 0, column response_ids: 0 values for a response of 2 tokens"):
        batch.packed("response_ids")
    with pytest.raises(RolloutLogError, match=r"row 1, column step: not recorded"):
        batch.values("step")


def test_a_mask_that_nobody_recorded_is_true_everywhere():
    batch = RolloutBatch.from_rows([{"log_prob": [-1.0, -2.0]}, {"log_prob": [-3.0]}])
    assert batch.response_mask().tolist() == [[True, True], [True, False]]


def test_a_column_that_is_not_there_says_what_is():
    batch = RolloutBatch.from_padded(MASK, step=1)
    with pytest.raises(RolloutLogError, match="column old_log_prob: not recorded; recorded are step, response_mask"):
        batch.padded("old_log_prob")
    with pytest.raises(RolloutLogError, match="no token column, only reward"):
        _ = RolloutBatch.from_rows([{"reward": 1.0}]).lengths


def test_rows_and_objects_are_plain_python():
    batch = RolloutBatch.from_padded(MASK, reward=[1, 2, 3])
    assert batch.to_rows()[0] == {"response_mask": [True, False, True], "reward": 1.0}
    assert RolloutBatch.from_rows(batch.to_rows()).records.equals(batch.records)


def test_arrow_tables_of_others_are_cast():
    table = pa.table(
        {
            "response_ids": pa.array([[1, 2], None, [3]], pa.large_list(pa.int64())),
            "rollout_log_prob": pa.array([[-0.1, None], [-1.5, -2.5], [0.0]], pa.list_(pa.float64())),
            "old_log_prob": pa.array([[np.float16(-0.5), np.float16(-1)]] * 3, pa.list_(pa.float16(), 2)),
            "response_mask": pa.array([[1, 0], [1, 1], [0]], pa.list_(pa.uint8())),
            "group_id": pa.array(["a", None, "a"]).dictionary_encode(),
            "sequence_id": pa.array([1, 2, 3]),
            "sampling": pa.array([{"top_p": 0.5, "seed": 3}, None, {"top_p": None, "seed": 4}]),
            "log_prob": pa.nulls(3),
            "something_else": pa.array([1, 2, 3]),
        }
    )
    batch = RolloutBatch.from_arrow(table)
    assert "something_else" not in batch.columns
    assert batch.objects("response_ids") == [[1, 2], None, [3]]
    rollout = batch.packed("rollout_log_prob")
    assert rollout.dtype == torch.float32
    torch.testing.assert_close(rollout, torch.tensor([-0.1, NAN, -1.5, -2.5, 0.0]), rtol=0, atol=0, equal_nan=True)
    assert batch.objects("old_log_prob")[1] == [-0.5, -1.0]
    assert batch.objects("response_mask") == [[True, False], [True, True], [False]]
    assert batch.objects("group_id") == ["a", None, "a"]
    assert batch.objects("sequence_id") == ["1", "2", "3"]
    assert [s and s["top_p"] for s in batch.objects("sampling")] == [0.5, None, None]
    assert not batch.has("log_prob")
    assert RolloutBatch.from_arrow(table.slice(1, 2)).records.equals(batch.records.slice(1, 2), check_metadata=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"old_logprob": torch.zeros(3, 4)}, "Did you mean 'old_log_prob'"),
        ({"log_prob": torch.zeros(3, 5)}, r"log_prob \(3, 5\) and response_mask \(3, 4\) differ"),
        ({"advantages": torch.zeros(3)}, r"advantages \(3,\) and response_mask \(3, 4\) differ"),
        ({"reward": torch.zeros(2)}, "reward has 2 rows, response_mask has 3"),
        ({"reward": torch.zeros(3, 1)}, "row 0, column reward"),
        ({"lengths": torch.tensor([2, 0, 4])}, r"lengths\[0\] is 2, outside 3 \(last sampled token\) to 4 \(T\)"),
        ({"lengths": torch.tensor([3, 0])}, r"lengths must be \(3,\) for 3 rows, got \(2,\)"),
        ({"prompt_ids": torch.zeros(3, 2)}, r"prompt_ids \(3, 2\) needs a prompt_mask of its shape, got None"),
        ({"sampling": {"beam": 4}}, "sampling has no field 'beam'"),
        ({"sampling": "greedy"}, "sampling takes a SamplingSpec or a mapping, got 'greedy'"),
        ({"policy_versions": "v3"}, "got 'v3'"),
        ({"response_ids": torch.full((3, 4), 2**40)}, "row 0, column response_ids: .* cannot be read as list<"),
    ],
)
def test_bad_arguments_name_the_value_and_the_limit(arguments, message):
    with pytest.raises(ValueError, match=message):
        RolloutBatch.from_padded(MASK, **arguments)


def test_bad_layouts_are_refused():
    with pytest.raises(ValueError, match=r"response_mask must be \(B, T\), got \(4,\); packed: from_packed"):
        RolloutBatch.from_padded(torch.ones(4))
    messages = {
        "end at the number of tokens, 4, got 3": [0, 3],
        "start at 0, got 1": [1, 4],
        "not fall, but entry 2 is 4 after 5": [0, 5, 4],
        "be .* with at least one entry": [],
    }
    for message, cu_seqlens in messages.items():
        with pytest.raises(ValueError, match=f"cu_seqlens must {message}"):
            RolloutBatch.from_packed(torch.ones(4), cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int64))
    batch = RolloutBatch.from_padded(MASK)
    with pytest.raises(ValueError, match="length 2 is shorter than the longest row, 4 tokens"):
        batch.padded("response_mask", length=2)
    with pytest.raises(ValueError, match="'reward' is not one of the token columns"):
        batch.packed("reward")
    with pytest.raises(ValueError, match="'sampling' is struct"):
        batch.ragged("sampling")
    with pytest.raises(ValueError, match="'engine' is not one number per sequence"):
        batch.values("engine")


def test_the_first_row_that_does_not_fit_is_named():
    rows = [{"response_ids": [1]}, {"response_ids": [1, "x"]}]
    with pytest.raises(RolloutLogError, match=r"row 1, column response_ids: .*; expected list<int32>"):
        RolloutBatch.from_rows(rows)
    with pytest.raises(RolloutLogError, match="row 1, column response_ids: null inside the list"):
        RolloutBatch.from_rows([{"response_ids": [1]}, {"response_ids": [1, None]}])
    with pytest.raises(RolloutLogError, match="row 0, column policy_versions: null inside the list"):
        RolloutBatch.from_rows([{"policy_versions": [{"start": 0, "length": 1}]}])
    with pytest.raises(ValueError, match="'respnse_ids' is not a column"):
        RolloutBatch.from_rows([{"respnse_ids": [1]}])


def test_pyarrow_is_imported_only_when_used_and_its_absence_names_the_extra():
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "import torch; from rollcorr.rollout_log import RolloutBatch\n"
        "try: RolloutBatch.from_padded(torch.ones(1, 1))\n"
        "except ImportError as error: assert 'rollcorr[log]' in str(error), error\n"
        "else: raise SystemExit('no error')\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_a_batch_too_large_for_32_bit_offsets_asks_for_parts():
    with pytest.raises(
        ValueError, match=r"2147483648 values in one batch, the limit is 2\^31 - 1; write the batch in parts"
    ):
        list_array(pa.array([], pa.float32()), np.array([2**31]))


def test_the_example_of_the_docstring_is_right():
    results = doctest.testmod(rollcorr.rollout_log.batch, extraglobs={"torch": torch})
    assert (results.attempted, results.failed) == (3, 0)


def test_masks_with_negative_values_are_refused():
    mask, offsets = torch.tensor([[1, -100], [0, 1]]), torch.tensor([0, 2, 4])
    with pytest.raises(ValueError, match="response_mask contains -100 at row 0, column 1"):
        RolloutBatch.from_padded(mask)
    with pytest.raises(ValueError, match="response_mask contains -100 at index 1"):
        RolloutBatch.from_packed(mask.flatten(), cu_seqlens=offsets)
