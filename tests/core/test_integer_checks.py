"""Ids, offsets and masks that lead nowhere raise in host memory, by position, and stay inside the data on a device."""

from __future__ import annotations

import pytest
import torch

from rollcorr.config.sampling_spec import SamplingSpec
from rollcorr.core import boundary, layout, logprobs, sampling
from rollcorr.core.advantages import dr_grpo_advantages, grpo_advantages, rloo_advantages
from rollcorr.core.boundary import check_mask_values, usable_ids
from rollcorr.core.sampling import KeptSets
from rollcorr.correction.scoring import actor_entropy, actor_log_prob, linear_actor_log_prob
from rollcorr.kernels.linear_logprob import linear_dispatch, linear_log_prob
from rollcorr.kernels.linear_logprob.compose import id_ranges
from rollcorr.layouts import from_row, pack_padded, pad_packed, positions_of_cu_seqlens, unpack_list

N, D, V = 4, 3, 11
REPLAYED = SamplingSpec(temperature=0.7, top_k=8, logprobs="processed", engine="vllm", support="replayed")
RECOMPUTED = SamplingSpec(temperature=0.7, top_k=8, logprobs="processed", engine="vllm", support="recomputed")
RAW = SamplingSpec()
BAD_IDS = [-100, -1, V, 2**31]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def sets(ids=(0, 1, 2, 3, 4, 9)):
    return KeptSets(torch.tensor(ids, dtype=torch.int32), torch.tensor([0, 2, 4, 5, 6]))


def normal(*shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64).to(dtype)


def of_logits(function, *arguments):
    return lambda ids, kept, dtype: function(
        normal(N, V, dtype=dtype), ids, *(kept if x is sets else x for x in arguments)
    )


def of_hidden(function=linear_log_prob, *arguments, replayed, **options):
    def call(ids, kept, dtype, **more):
        given = options | ({"kept": kept} if replayed else {}) | more
        return function(normal(N, D, dtype=dtype), normal(V, D, dtype=dtype), ids, *arguments, **given)

    return call


SUPPORT = torch.ones(N, V, dtype=torch.bool)
MASKABLE = {
    f"linear_log_prob {impl}{form}{dropping}": of_hidden(replayed=bool(form), impl=impl, **options)
    for impl in ("torch", "reference")
    for form in ("", ", kept")
    for dropping, options in (("", {}), (", nothing dropped", {"compact": False}))
} | {
    "linear_actor_log_prob": of_hidden(linear_actor_log_prob, RAW, replayed=False),
    "linear_actor_log_prob, kept": of_hidden(linear_actor_log_prob, REPLAYED, replayed=True),
}
OF_IDS = MASKABLE | {
    "token_log_prob": of_logits(logprobs.token_log_prob),
    "supported_log_prob": of_logits(logprobs.supported_log_prob, SUPPORT),
    "kept_log_prob": of_logits(logprobs.kept_log_prob, sets),
    "kept_log_mass, kept": of_logits(logprobs.kept_log_mass, sets),
    "kept_entropy, kept": of_logits(logprobs.kept_entropy, sets),
    "with_sampled": lambda ids, kept, dtype: sampling.with_sampled(SUPPORT, ids),
    "actor_log_prob": of_logits(actor_log_prob, RAW),
    "actor_log_prob, kept": lambda ids, kept, dtype: actor_log_prob(
        normal(N, V, dtype=dtype), ids, REPLAYED, kept=kept
    ),
    "actor_entropy": of_logits(actor_entropy, RECOMPUTED),
    "actor_entropy, kept": lambda ids, kept, dtype: actor_entropy(normal(N, V, dtype=dtype), ids, REPLAYED, kept=kept),
}
OF_SETS = {name: call for name, call in OF_IDS.items() if "kept" in name}


def tensors(result):
    return [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]


@pytest.fixture
def on_a_device(monkeypatch):
    """As on a GPU, where values are not read: torch raises on the CPU wherever an index leaves a tensor."""
    for module in (boundary, layout, sampling, linear_dispatch):
        monkeypatch.setattr(module, "in_host_memory", lambda *_: False)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", BAD_IDS)
@pytest.mark.parametrize("name", OF_IDS)
def test_token_ids_outside_the_vocabulary_raise(name, bad, dtype):
    with pytest.raises(ValueError, match=f"token_ids contains {bad} at index 2, and must be from 0 to 10"):
        OF_IDS[name](torch.tensor([1, 0, bad, 4]), sets(), dtype)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [-100, -1, V, 2**31 - 1])
@pytest.mark.parametrize("name", OF_SETS)
def test_kept_ids_outside_the_vocabulary_raise(name, bad, dtype):
    with pytest.raises(ValueError, match=rf"kept\.ids contains {bad} at index 3, and must be from 0 to 10"):
        OF_SETS[name](torch.tensor([1, 0, 4, 4]), sets((0, 1, 2, bad, 4, 9)), dtype)


def test_ids_of_a_subclass_are_checked():
    class Named(torch.Tensor):
        """A subclass that only adds a name."""

    with pytest.raises(ValueError, match="token_ids contains -1 at index 1"):
        logprobs.token_log_prob(torch.zeros(2, V), torch.tensor([0, -1]).as_subclass(Named))


@pytest.mark.parametrize(("check", "value"), [(lambda x: usable_ids("x", x, (0, V)), V), (check_mask_values, -1)])
def test_a_single_value_is_named_without_a_place(check, value):
    with pytest.raises(ValueError, match=f"contains {value} at its only entry"):
        check(torch.tensor(value))


def test_padded_token_ids_are_named_by_row():
    ids = torch.tensor([[1, 0], [4, -100]])
    with pytest.raises(ValueError, match="token_ids contains -100 at row 1, column 1"):
        linear_log_prob(torch.zeros(2, 2, D), torch.zeros(V, D), ids)
    with pytest.raises(ValueError, match="token_ids must hold integers"):
        logprobs.token_log_prob(torch.zeros(2, 2, V), ids.float())


@pytest.mark.parametrize("bad", BAD_IDS)
@pytest.mark.parametrize("name", MASKABLE)
def test_outside_the_mask_ids_may_be_anything(name, bad):
    mask = torch.tensor([True, True, False, True]).view(torch.uint8).mul(2).view(torch.bool)  # bytes 0 and 2
    kept = sets((0, 1, 2, 3, min(bad, 2**31 - 1), 9))
    result = MASKABLE[name](torch.tensor([1, 0, bad, 4]), kept, torch.float64, mask=mask)
    expected = MASKABLE[name](torch.tensor([1, 0, 4, 4]), sets(), torch.float64, mask=mask)
    for one, other in zip(tensors(result), tensors(expected), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("bad", BAD_IDS)
@pytest.mark.parametrize("name", OF_IDS)
def test_ids_on_a_device_stay_inside(name, bad, on_a_device):
    ids, kept_id = torch.tensor([1, 0, bad, 4]), min(bad, 2**31 - 1)
    results = tensors(OF_IDS[name](ids, sets((0, 1, 2, kept_id, 4, 9)), torch.float64))
    clamped = sets((0, 1, 2, min(max(bad, 0), V - 1), 4, 9))
    expected = tensors(OF_IDS[name](ids.clamp(0, V - 1), clamped, torch.float64))
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize("offsets", [[0, 10**6, 4, 5, 6], [0, 2, -9, 5, 6], [3, 2, 1, 0, 0], [0, 9, 9, 9, 9]])
@pytest.mark.parametrize("name", OF_SETS)
def test_offsets_of_sets_on_a_device_stay_inside(name, offsets, on_a_device):
    kept = KeptSets(torch.tensor([0, 1, 2, 3, 4, 9], dtype=torch.int32), torch.tensor(offsets))
    for result in tensors(OF_SETS[name](torch.tensor([1, 0, 5, 4]), kept, torch.float64)):
        assert result.shape == (N,)


def test_ids_without_values_are_not_read():
    with torch.device("meta"):
        ids, kept = torch.zeros(N, dtype=torch.int64), KeptSets(torch.zeros(6, dtype=torch.int32), torch.arange(N + 1))
        assert logprobs.kept_log_prob(torch.zeros(N, V), ids, kept).log_prob.is_meta
        assert boundary.usable_ids("ids", ids, (0, V), mask=ids == 0).is_meta


def test_any_integers_name_a_group():
    rewards, ids = torch.tensor([1.0, 3.0, 2.0, 6.0]), torch.tensor([-100, -100, 2**31, -1])
    for estimate in (grpo_advantages, dr_grpo_advantages, rloo_advantages):
        assert torch.equal(estimate(rewards, ids), estimate(rewards, torch.tensor([0, 0, 1, 2])))


class TwoRanks:
    """A group whose second rank has rows 5 … 10 of the head."""

    def size(self):
        return 2


@pytest.mark.parametrize("bad", [-100, -1, 4, V, 2**31])
def test_ids_in_no_slice_raise(bad, monkeypatch):
    def all_gather(parts, own, group):
        parts[0].copy_(own)
        parts[1].copy_(torch.tensor([5, V]))

    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    ids, weight = torch.tensor([3, 5, bad]), torch.zeros(4, D)
    ranges = id_ranges(weight, ids, 0, TwoRanks())
    message = rf"token_ids contains {bad} at index 2, .* and in a rank's slice: \(0, 4\), \(5, 11\)"
    with pytest.raises(ValueError, match=message):
        linear_log_prob(torch.zeros(3, D), weight, ids, vocab_group=TwoRanks())
    assert boundary.usable_ids("ids", ids[:2], *ranges).tolist() == [3, 5]


# --- Offsets --------------------------------------------------------------------------------------------------------

OF_OFFSETS = {
    "expand": lambda offsets, dtype: layout.expand(torch.zeros(2, dtype=dtype), torch.zeros(6), cu_seqlens=offsets),
    "sequence_sum": lambda offsets, dtype: layout.sequence_sum(
        torch.ones(6, dtype=dtype), torch.ones(6).bool(), cu_seqlens=offsets
    ),
    "sequence_mean": lambda offsets, dtype: layout.sequence_mean(
        torch.ones(6, dtype=dtype), torch.ones(6).bool(), cu_seqlens=offsets
    ),
    "sequence_max": lambda offsets, dtype: layout.sequence_max(
        torch.ones(6, dtype=dtype), torch.ones(6).bool(), cu_seqlens=offsets
    ),
    "token_count": lambda offsets, dtype: layout.token_count(torch.ones(6).bool(), cu_seqlens=offsets),
    "sequence_ids": lambda offsets, dtype: layout.sequence_ids(torch.ones(6, dtype=dtype), cu_seqlens=offsets),
    "positions_of_cu_seqlens": lambda offsets, dtype: positions_of_cu_seqlens(offsets, 6),
    "unpack_list": lambda offsets, dtype: unpack_list(torch.zeros(6, dtype=dtype), offsets),
    "from_row": lambda offsets, dtype: from_row(torch.zeros(1, 6, dtype=dtype), cu_seqlens=offsets),
    "KeptSets": lambda offsets, dtype: KeptSets(torch.zeros(6, dtype=torch.int32), offsets.long()),
}
BAD_OFFSETS = {
    "falling": ([0, 10**6, 6], "must not fall, but entry 2 is 6 after 1000000"),
    "starts late": ([1, 4, 6], "must start at 0, got 1"),
    "ends late": ([0, 4, 7], "must end at the number of (tokens|ids), 6, got 7"),
    "negative": ([0, -4, 6], "must not fall, but entry 1 is -4 after 0"),
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", BAD_OFFSETS)
@pytest.mark.parametrize("name", OF_OFFSETS)
def test_offsets_that_do_not_describe_tokens_raise(name, kind, dtype):
    offsets, message = BAD_OFFSETS[kind]
    for integers in (torch.int64, torch.int32):
        with pytest.raises(ValueError, match=message):
            OF_OFFSETS[name](torch.tensor(offsets, dtype=integers), dtype)


@pytest.mark.parametrize("kind", BAD_OFFSETS)
@pytest.mark.parametrize("name", [name for name in OF_OFFSETS if name not in ("unpack_list", "from_row", "KeptSets")])
def test_offsets_on_a_device_stay_inside(name, kind, on_a_device):
    right = OF_OFFSETS[name](torch.tensor([0, 4, 6]), torch.float32)
    assert OF_OFFSETS[name](torch.tensor(BAD_OFFSETS[kind][0]), torch.float32).shape == right.shape


def test_sums_on_a_gpu_bound_their_offsets(monkeypatch):
    """`segment_reduce` without checks would read beyond the data."""
    seen = []
    monkeypatch.setattr(boundary, "in_host_memory", lambda *_: False)
    monkeypatch.setattr(layout, "_adds_by_atomics", lambda values: True)
    monkeypatch.setattr(torch, "segment_reduce", lambda values, kind, *, lengths, unsafe: seen.append(lengths.tolist()))
    layout.sequence_sum(torch.ones(6), torch.ones(6).bool(), cu_seqlens=torch.tensor([0, 10**6, 4, 6]))
    assert seen == [[6, 0, 0]]


@pytest.mark.parametrize("bad", BAD_IDS)
def test_rows_of_kept_sets_must_exist(bad):
    with pytest.raises(ValueError, match=f"rows contains {bad} at index 1, and must be from 0 to 3"):
        sets().select(torch.tensor([0, bad]))


# --- Masks ----------------------------------------------------------------------------------------------------------

REAL = [
    torch.bool,
    *(getattr(torch, f"{u}int{bits}") for u in ("", "u") for bits in (8, 16, 32, 64)),
    *DTYPES,
    torch.half,
]
SIGNED = [dtype for dtype in REAL if dtype.is_signed]
PADDED = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
OF_MASKS = {
    "pack": lambda mask: layout.pack(PADDED, mask)[0],
    "pack_padded": lambda mask: pack_padded(PADDED, inside=mask).tensors[0],
    "pad_packed": lambda mask: pad_packed(torch.tensor([1.0, 2.0, 4.0]), mask),
    "KeptSets.padded": lambda mask: KeptSets.of([[1], [2], [4]]).padded(mask).offsets,
}


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("name", OF_MASKS)
def test_masks_of_every_dtype_select_the_same(name, dtype):
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    expected = OF_MASKS[name](mask.bool())
    assert torch.equal(OF_MASKS[name](mask.to(dtype)), expected)
    assert torch.equal(OF_MASKS[name](mask.mul(3).to(dtype)), expected)
    if name.startswith("p"):
        assert expected.tolist() in ([1.0, 2.0, 4.0], [[1.0, 2.0, 0.0], [4.0, 0.0, 0.0]])


@pytest.mark.parametrize("values", [2, 9])
@pytest.mark.parametrize("dtype", REAL)
def test_counts_of_values_and_places_agree(values, dtype):
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).to(dtype)
    with pytest.raises(ValueError, match=f"mask has 3 true entries for {values} values"):
        pad_packed(torch.zeros(values), mask)
    with pytest.raises(ValueError, match=f"mask has 3 true entries for {values} values"):
        KeptSets.of([[1]] * values).padded(mask)


@pytest.mark.covering(2)
@pytest.mark.parametrize("bad", [-100, -1, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", SIGNED)
@pytest.mark.parametrize("name", OF_MASKS)
def test_negative_and_non_finite_masks_raise(name, dtype, bad):
    if not dtype.is_floating_point and bad not in (-100, -1):
        return
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]]).to(dtype)
    mask[1, 0] = bad
    with pytest.raises(
        ValueError, match=f"(mask|inside) contains {bad:g} at row 1, column 0, and must be 0 or a positive"
    ):
        OF_MASKS[name](mask)


def test_a_negative_zero_is_a_zero():
    mask = torch.tensor([[-0.0, 1.0, 1.0], [1.0, -0.0, 0.0]])
    assert pack_padded(PADDED, inside=mask).tensors[0].tolist() == [2.0, 3.0, 4.0]
