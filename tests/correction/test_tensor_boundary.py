"""Invalid tensors raise an error that names them; unusual ones return the same numbers, at every entry point.

All entry points share their checks. So each argument meets the kinds of a tensor in turn. The compiled kernel reads
memory by its address, and meets all of them.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from boundary_cases import (
    BOOL,
    DECOUPLED,
    ENTRIES,
    FLOAT,
    IDS,
    IMPLEMENTATIONS,
    MASK,
    NUMBER,
    PACKED,
    B,
    arguments,
    batch,
    tensors_of,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from rollcorr import correct
from rollcorr.core import boundary, layout
from rollcorr.core.sampling import KeptSets
from rollcorr.correction import Detail
from rollcorr.correction.losses import PolicyLogProbs, policy_loss

ARGUMENTS = [(entry, name) for entry in ENTRIES for name in ENTRIES[entry].kinds]
OFFSETS = [(entry, "cu_seqlens") for entry in PACKED]


def of_kind(*kinds: str) -> list[tuple[str, str]]:
    return [(entry, name) for entry, name in ARGUMENTS if ENTRIES[entry].kinds[name] in kinds]


def in_turn(cases: list, kinds) -> list[tuple]:
    """Each case with the next kind; the compiled kernel with every kind."""
    kinds, pairs = list(kinds), []
    for i, case in enumerate(cases):
        case = (case,) if isinstance(case, str) else case
        chosen = kinds if case[0].startswith("correct cpu") else [kinds[i % len(kinds)]]
        pairs += [(*case, kind) for kind in chosen]
    return pairs


def called(entry: str, **changed) -> list[torch.Tensor]:
    """Call an entry point with valid arguments, some of them changed, and return its result."""
    case = ENTRIES[entry]
    given = arguments(case) | changed
    unknown = changed.keys() - arguments(case).keys()
    assert not unknown
    return tensors_of(case.call(**given))


def assert_equal(actual: list[torch.Tensor], expected: list[torch.Tensor], **tolerance) -> None:
    assert len(actual) == len(expected) > 0
    for one, other in zip(actual, expected, strict=True):
        if one.dtype == torch.bool:  # as bytes: a view of the result must not see more than torch does
            one, other = one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
        torch.testing.assert_close(one, other, equal_nan=True, check_stride=False, **tolerance)


class Named(torch.Tensor):
    """A subclass that only adds a name."""


def freed(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def negated_view(x: torch.Tensor) -> torch.Tensor:
    """Return the same numbers as the negation of the memory, marked by the tensor's negative bit."""
    return torch.imag(torch.complex(torch.zeros_like(x), -x).conj())


def every_other(x: torch.Tensor) -> torch.Tensor:
    wide = x.new_zeros(*x.shape, 2)
    wide[..., 0], wide[..., 1] = x, 1
    return wide[..., 0]


def odd_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return the same bool with bytes 2, 255 and 4 for true, as in a view of foreign bytes."""
    odd = torch.tensor([2, 255, 4, 1], dtype=torch.uint8).repeat(x.numel())[: x.numel()].view(x.shape)
    return (odd * x).view(torch.bool)


NO_TENSORS = {"array": lambda x: x.numpy(), "list": lambda x: x.tolist()}
MEMORY = {
    "sparse": (lambda x: x.to_sparse(), "is sparse_coo, and dense tensors are needed"),
    "complex": (lambda x: x.to(torch.complex64), "torch.complex64; real numbers or bool are needed"),
    "freed": (freed, "memory of .* was freed"),
}
PLACE = {
    "another device": (lambda x: x.to("meta"), "is on (cpu|meta) and .* is on (cpu|meta); move them to one device"),
    "0-d": (lambda x: x.flatten()[0], r"\(\)|shape|row|\(…"),
}
SAME = {
    "a Parameter": lambda x: torch.nn.Parameter(x, requires_grad=x.is_floating_point()),
    "a subclass that only adds methods": lambda x: x.as_subclass(Named),
    "strided": every_other,
    "transposed in memory": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "a buffer": lambda x: torch.nn.Buffer(x),
}


@pytest.mark.parametrize(("entry", "kind"), in_turn(ENTRIES, NO_TENSORS))
def test_what_is_no_tensor_is_refused_by_name_with_the_fix(entry, kind):
    for name, right in arguments(ENTRIES[entry]).items():
        given, label = NO_TENSORS[kind](right), "list" if kind == "list" else r"numpy\.ndarray"
        with pytest.raises(TypeError, match=rf"{name} must be a.* tensor, got {label}; give torch\.as_tensor\({name}"):
            called(entry, **{name: given})


@pytest.mark.parametrize(("entry", "kind"), [*in_turn(ENTRIES, MEMORY), *itertools.product(ENTRIES, PLACE)])
def test_a_tensor_that_cannot_be_used_is_refused_by_name(entry, kind):
    spoil, said = (MEMORY | PLACE)[kind]
    given = arguments(ENTRIES[entry])
    for name, right in given.items():
        if kind == "another device" and len(given) == 1:  # no argument to disagree with
            assert all(result.is_meta for result in called(entry, **{name: right.to("meta")}))
            continue
        with pytest.raises(ValueError, match=said) as caught:
            called(entry, **{name: spoil(right)})
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "name", "dtype"), in_turn(of_kind(FLOAT), [torch.int64, torch.bool, torch.float8_e4m3fn])
)
def test_log_probs_and_losses_must_be_floating_point(entry, name, dtype):
    given = arguments(ENTRIES[entry])[name].to(dtype)
    with pytest.raises(ValueError, match=rf"{name}.*{str(dtype).removeprefix('torch.')}"):
        called(entry, **{name: given})


@pytest.mark.parametrize(("entry", "name", "dtype"), in_turn(of_kind(IDS) + OFFSETS, [torch.float32, torch.bool]))
def test_ids_and_offsets_must_be_integers(entry, name, dtype):
    with pytest.raises(ValueError, match=f"{name} must hold integers, got {dtype}"):
        called(entry, **{name: arguments(ENTRIES[entry])[name].to(dtype)})


@pytest.mark.parametrize(("entry", "kind"), in_turn(ENTRIES, SAME))
def test_the_same_numbers_in_another_shell_give_the_same_result(entry, kind):
    expected = called(entry)
    for name, right in arguments(ENTRIES[entry]).items():
        given = SAME[kind](right)
        is_log_prob = ENTRIES[entry].kinds.get(name) == FLOAT
        if ENTRIES[entry].explicit == "cpu" and is_log_prob and given.stride(-1) != 1:
            with pytest.raises(ValueError, match=rf"the tokens of {name} do not lie next to each other"):
                called(entry, **{name: given})
            continue
        if name == "temperature":
            given = given.detach()  # one that requires a gradient would get none
        assert_equal(called(entry, **{name: given}), expected)


@pytest.mark.parametrize(
    "entry", [entry for entry in ENTRIES if entry.startswith(("correct", "linear", "policy_loss"))]
)
def test_negated_views_are_read_negated(entry):
    """A kernel that reads memory by its address would see the numbers with the other sign."""
    for name, plain in arguments(ENTRIES[entry]).items():
        if ENTRIES[entry].kinds.get(name) not in (FLOAT, NUMBER):
            continue
        given = negated_view(plain)
        assert given.is_neg()
        if entry.startswith("correct cpu"):
            with pytest.raises(ValueError, match=f"{name} is a view of the negative of its memory"):
                called(entry, **{name: given})
        else:
            assert_equal(called(entry, **{name: given}), called(entry, **{name: plain}))


def test_negated_mask_is_checked_like_others():
    mask = negated_view(torch.tensor([[1.0, -1.0]], dtype=torch.float64))
    with pytest.raises(ValueError, match="response_mask contains -1 at row 0, column 1"):
        correct(torch.zeros(1, 2), torch.zeros(1, 2), mask)


@pytest.mark.parametrize("entry", dict.fromkeys(entry for entry, _ in of_kind(MASK, BOOL)))
def test_any_byte_but_zero_is_true(entry):
    for name, kind in ENTRIES[entry].kinds.items():
        if kind in (MASK, BOOL):
            given = odd_bytes(arguments(ENTRIES[entry])[name])
            assert given.view(torch.uint8).max() > 1
            assert_equal(called(entry, **{name: given}), called(entry))


CONFIGS = [(None, False), ("disabled", True), (DECOUPLED, True), ({"rollout_is": "sequence"}, False)]


@pytest.mark.parametrize(("config", "detail"), CONFIGS)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_metrics_count_tokens_and_not_bytes(impl, config, detail):
    given = batch()
    log_probs, mask = (given["train_log_prob"], given["rollout_log_prob"]), given["response_mask"]
    plain = correct(*log_probs, mask, config, impl=impl, detail=detail)
    odd = correct(*log_probs, odd_bytes(mask), config, impl=impl, detail=detail)
    assert_equal(tensors_of(odd), tensors_of(plain))
    assert odd.metrics() == plain.metrics()


MASK_TYPES = [torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize(("entry", "name", "dtype"), in_turn(of_kind(MASK), MASK_TYPES))
def test_a_mask_of_any_real_type_is_the_same_mask(entry, name, dtype):
    given = arguments(ENTRIES[entry])[name].to(dtype) * 3
    assert_equal(called(entry, **{name: given}), called(entry))


SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64, torch.half, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize(
    ("entry", "name", "dtype"), in_turn([pair for pair in of_kind(MASK, BOOL) if "linear" not in pair[0]], SIGNED)
)
def test_negative_and_non_finite_masks_raise(entry, name, dtype):
    right = arguments(ENTRIES[entry])[name]
    last = tuple(size - 1 for size in right.shape)
    where = f"row {last[0]}, column {last[1]}" if len(last) == 2 else f"index {last[0]}"
    for bad in (-100, -1, float("nan"), float("inf")) if dtype.is_floating_point else (-100, -1):
        given = right.to(dtype).clone()
        given[last] = bad
        with pytest.raises(
            ValueError, match=rf"\w*(mask|keep) contains {bad:g} at {where}, and must be 0 or a positive"
        ):
            called(entry, **{name: given})


def test_labels_in_place_of_a_mask_raise():
    """A label of −100 is not 0, so as a mask labels would keep every token."""
    labels = torch.full((4, 6), -100)
    labels[:, 3:] = 5
    x = torch.zeros(4, 6)
    with pytest.raises(ValueError, match=r"response_mask contains -100 at row 0, column 0, .*give labels != -100"):
        correct(x, x, labels)
    assert correct(x, x, labels != -100).loss_mask.sum() == 12


@pytest.mark.parametrize(
    ("entry", "dtype"),
    in_turn([name for name, case in ENTRIES.items() if FLOAT in case.kinds.values()], [torch.bfloat16, torch.float16]),
)
def test_half_precision_is_widened_by_every_implementation(entry, dtype):
    case = ENTRIES[entry]
    if entry.startswith("correct cpu") and dtype == torch.float16:
        with pytest.raises(ValueError, match=r"is torch\.float16, and it reads float32 and bfloat16"):
            called(entry, **arguments(case, dtype=dtype))
        return
    halves = arguments(case, dtype=dtype)
    widened = {name: x.float() if x.dtype == dtype else x for name, x in halves.items()}
    results, expected = called(entry, **halves), called(entry, **widened)
    rounded = torch.finfo(dtype).eps if entry.startswith(("token_", "seq_", "aggregate")) else 1e-6
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=8 * rounded, atol=8 * rounded, equal_nan=True)


@pytest.mark.parametrize("entry", [name for name in ENTRIES if not name.startswith(("linear", "grpo", "dr_", "rloo"))])
def test_nothing_gives_nothing(entry):
    case = ENTRIES[entry]
    for shape in [(0, 0), (4, 0)] if case.packed else [(0, 0), (0, 4), (4, 0)]:
        given = {}
        for name, tensor in arguments(case).items():
            if name == "cu_seqlens":
                given[name] = torch.zeros(shape[0] + 1, dtype=torch.int64)
            elif tensor.shape == (B,) and not (case.packed and tensor.numel() != B):
                given[name] = tensor.new_zeros(shape[0])
            else:
                given[name] = tensor.new_zeros(0 if case.packed else shape)
        results = tensors_of(case.call(**given))
        assert results
        assert all(bool(torch.isfinite(x.double()).all()) for x in results), shape


# --- Offsets -------------------------------------------------------------------------------------------------------

BAD_OFFSETS = {
    "falling": (lambda n: [0, 9, 4, 12, 15, n], "cu_seqlens must not fall, but entry 2 is 4 after 9"),
    "far beyond the data": (lambda n: [0, 1 << 40, 1 << 41, 1 << 42, 1 << 43, n], "cu_seqlens must not fall"),
    "negative": (lambda n: [0, -(1 << 40), 3, 4, 5, n], "cu_seqlens must not fall, but entry 1 is -1099511627776"),
    "ends too early": (lambda n: [0, 7, 10, 10, 15, n - 1], "cu_seqlens must end at the number of tokens, 21, got 20"),
    "ends too late": (lambda n: [0, 7, 10, 10, 15, n + 1000], "end at the number of tokens, 21, got 1021"),
    "starts late": (lambda n: [2, 7, 10, 10, 15, n], "cu_seqlens must start at 0, got 2"),
    "starts before": (lambda n: [-5, 7, 10, 10, 15, n], "cu_seqlens must start at 0, got -5"),
    "empty": (lambda n: [], r"cu_seqlens must be \(B \+ 1,\) with at least one entry, got \(0,\)"),
    "no sequence": (lambda n: [n], "cu_seqlens has one entry, which is no sequence, but .* has 21 tokens"),
}


@pytest.mark.parametrize(("entry", "kind"), in_turn(PACKED, BAD_OFFSETS))
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_offsets_that_do_not_describe_the_tokens_are_refused(entry, kind, dtype):
    values, said = BAD_OFFSETS[kind]
    offsets = torch.tensor(values(21), dtype=torch.int64)
    offsets = offsets.clamp(torch.iinfo(dtype).min, torch.iinfo(dtype).max).to(dtype)
    said = said.replace("-1099511627776", str(max(torch.iinfo(dtype).min, -1099511627776)))
    with pytest.raises(ValueError, match=said):
        called(entry, cu_seqlens=offsets)


def test_offsets_of_wrong_rank_raise():
    for entry in PACKED:
        with pytest.raises(ValueError, match=r"cu_seqlens must be \(B \+ 1,\)"):
            called(entry, cu_seqlens=torch.tensor([[0, 21]]))


@pytest.mark.parametrize(("entry", "dtype"), in_turn(PACKED, [torch.int32, torch.int16, torch.uint8]))
def test_offsets_of_any_integer_type_are_the_same_offsets(entry, dtype):
    given = arguments(ENTRIES[entry])["cu_seqlens"].to(dtype)
    assert_equal(called(entry, cu_seqlens=given), called(entry))


READ_BY_TORCH = [name for name in PACKED if not name.startswith("correct cpu")]


def hide_values(monkeypatch):
    """Leave values unread, as on a GPU. On the CPU torch raises wherever an index leaves a tensor."""
    for module in (layout, boundary):
        monkeypatch.setattr(module, "in_host_memory", lambda *_: False)


@pytest.mark.parametrize("entry", READ_BY_TORCH)
def test_unread_right_offsets_change_nothing(entry, monkeypatch):
    expected = called(entry)
    hide_values(monkeypatch)
    assert_equal(called(entry), expected)


@pytest.mark.parametrize(("entry", "kind"), in_turn(READ_BY_TORCH, BAD_OFFSETS))
def test_unread_wrong_offsets_never_leave_the_data(entry, kind, monkeypatch):
    expected = called(entry)
    hide_values(monkeypatch)
    offsets = torch.tensor(BAD_OFFSETS[kind][0](21), dtype=torch.int64)
    if kind in ("empty", "no sequence"):
        with pytest.raises(ValueError, match="cu_seqlens"):
            called(entry, cu_seqlens=offsets)
    else:
        assert [x.shape for x in called(entry, cu_seqlens=offsets)] == [x.shape for x in expected]


@pytest.mark.parametrize("kind", [kind for kind in BAD_OFFSETS if kind not in ("empty", "no sequence")])
def test_bounded_offsets_rise_from_zero_to_the_token_count(kind, monkeypatch):
    monkeypatch.setattr(boundary, "in_host_memory", lambda *_: False)
    bounded = boundary.bounded_offsets(torch.tensor(BAD_OFFSETS[kind][0](21)), 21)
    boundary.check_cu_seqlens(bounded, 21)
    right = torch.tensor([0, 7, 10, 10, 15, 21])
    assert torch.equal(boundary.bounded_offsets(right, 21), right)
    assert boundary.bounded_offsets(torch.tensor([0]), 0).tolist() == [0]


def test_offsets_of_many_sequences_are_checked_to_the_last():
    offsets = torch.arange(100_001)
    boundary.check_cu_seqlens(offsets, 100_000)
    offsets[-2] = 100_001
    with pytest.raises(ValueError, match="entry 100000 is 100000 after 100001"):
        boundary.check_cu_seqlens(offsets, 100_000)


# --- Transforms and traces -----------------------------------------------------------------------------------------

TRANSFORMED = [name for name in ENTRIES if not name.startswith("linear_log_prob")]


def refuses_transforms(entry: str) -> bool:
    return ENTRIES[entry].explicit not in (None, "reference")


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own: slower than it could be
@pytest.mark.parametrize("entry", TRANSFORMED)
def test_vmap_gives_what_a_loop_gives_or_one_sentence(entry):
    given = arguments(ENTRIES[entry])
    layout_ = {name: given.pop(name) for name in ("cu_seqlens",) if name in given}
    stacked = {name: torch.stack([x, x.flip(0)]) for name, x in given.items()}

    def call(tensors):
        return tuple(tensors_of(ENTRIES[entry].call(**tensors, **layout_)))

    if refuses_transforms(entry):
        with pytest.raises(ValueError, match=r"impl='\w+' cannot take this batch: .*torch.func"):
            torch.vmap(call)(stacked)
        return
    results = torch.vmap(call)(stacked)
    for i in range(2):
        expected = call({name: x[i] for name, x in stacked.items()})
        assert_equal([x[i] for x in results], list(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, when it loads forward mode
@pytest.mark.parametrize("transform", ["grad", "jvp", "functional_call"])
@pytest.mark.parametrize(
    "entry", ["policy_loss plain, padded", "policy_loss bypass, padded", "policy_loss bypass, packed"]
)
def test_losses_have_the_same_gradient_under_torch_func(entry, transform):
    given = arguments(ENTRIES[entry])
    leaf = given["log_prob"].clone().requires_grad_()
    ENTRIES[entry].call(**given | {"log_prob": leaf}).loss.backward()

    def loss(log_prob):
        return ENTRIES[entry].call(**given | {"log_prob": log_prob}).loss

    if transform == "grad":
        torch.testing.assert_close(torch.func.grad(loss)(given["log_prob"]), leaf.grad)
    elif transform == "jvp":
        _, tangent = torch.func.jvp(loss, (given["log_prob"],), (torch.ones_like(leaf),))
        torch.testing.assert_close(tangent, leaf.grad.sum(), rtol=1e-4, atol=1e-6)
    else:
        module = torch.nn.Linear(1, 1, bias=False)
        parameters = {"weight": torch.zeros(1, 1)}
        by_scale = torch.func.grad(
            lambda p: loss(given["log_prob"] + torch.func.functional_call(module, p, (torch.ones(1, 1),)).sum())
        )(parameters)
        torch.testing.assert_close(by_scale["weight"].sum(), leaf.grad.sum(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("kept", ["whole", "kept"])
def test_log_probs_of_hidden_states_work_under_torch_func_by_the_reference_or_say_so(impl, kept):
    entry = f"linear_log_prob {impl}, {kept}"
    given = arguments(ENTRIES[entry])

    def total(hidden):
        return ENTRIES[entry].call(**given | {"hidden": hidden}).log_prob.sum()

    if impl == "torch":
        with pytest.raises(ValueError, match=r"inside a transform of .*; use impl='reference'"):
            torch.func.grad(total)(given["hidden"])
        return
    leaf = given["hidden"].clone().requires_grad_()
    total(leaf).backward()
    torch.testing.assert_close(torch.func.grad(total)(given["hidden"]), leaf.grad)


@pytest.mark.parametrize("entry", ENTRIES)
def test_fake_tensors_give_fake_results_of_the_right_shape(entry):
    given = arguments(ENTRIES[entry])
    expected = called(entry)
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(x) for name, x in given.items()}
        if entry.startswith("correct cpu"):
            with pytest.raises(ValueError, match="torch is tracing it"):
                ENTRIES[entry].call(**fakes)
            return
        if entry.startswith("linear_log_prob") and entry.endswith("kept"):
            with pytest.raises(AssertionError, match="convert all Tensors to FakeTensors"):  # torch's own
                ENTRIES[entry].call(**fakes)
            return
        results = tensors_of(ENTRIES[entry].call(**fakes))
    assert [(type(x).__name__, x.shape) for x in results] == [("FakeTensor", x.shape) for x in expected]


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry.startswith(("correct", "linear"))])
def test_fake_and_real_tensors_do_not_meet(entry):
    """Buffers made on the way are fake inside the mode and real outside: a kernel would write to address 0."""
    given = arguments(ENTRIES[entry])
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(x) for name, x in given.items()}
        with pytest.raises((ValueError, AssertionError), match=r"convert all Tensors|torch is tracing it"):
            ENTRIES[entry].call(**given)

    # The reference makes no buffer for a padded batch.
    if entry == "correct reference, padded":
        assert {type(x).__name__ for x in called(entry, **fakes)} == {"FakeTensor"}
        return
    with pytest.raises((ValueError, AssertionError), match=r"convert all Tensors|is a FakeTensor"):
        ENTRIES[entry].call(**fakes)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_traced_graph_computes_again_and_holds_no_old_result(impl):
    """A kernel that torch does not see would leave its result in the graph as a constant."""
    from torch.fx.experimental.proxy_tensor import make_fx

    given = arguments(ENTRIES[f"correct {impl}, padded"])
    train = given.pop("train_log_prob")

    def weights(train):
        return ENTRIES[f"correct {impl}, padded"].call(train, **given).weights

    if impl == "cpu":
        with pytest.raises(ValueError, match="torch is tracing"):
            make_fx(weights)(train)
        return
    traced = make_fx(weights)(train)
    torch.testing.assert_close(traced(train - 0.5), weights(train - 0.5))


@pytest.mark.filterwarnings("ignore:.torch.jit.trace. is deprecated", "ignore::torch.jit.TracerWarning")
def test_a_jit_trace_computes_again_and_holds_no_old_result():
    given = arguments(ENTRIES["correct auto, padded"])
    train = given.pop("train_log_prob")

    def weights(train):
        return ENTRIES["correct auto, padded"].call(train, **given).weights

    traced = torch.jit.trace(weights, train, check_trace=False)
    torch.testing.assert_close(traced(train - 0.5), weights(train - 0.5))


def test_tensors_that_compute_in_their_own_way_are_refused():
    class Counting(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("must not be reached")

    for entry in ("correct auto, padded", "token_mean, padded", "grpo_advantages", "linear_log_prob torch, whole"):
        name = next(iter(ENTRIES[entry].kinds))
        strange = torch.Tensor._make_subclass(Counting, arguments(ENTRIES[entry])[name])
        with pytest.raises(ValueError, match=f"{name} is a Counting, and plain tensors are needed"):
            called(entry, **{name: strange})


def test_nested_tensors_are_refused():
    x = torch.zeros(3)
    with pytest.raises(ValueError, match="x is nested"), pytest.warns(UserWarning, match="nested"):
        boundary.check_tensors(x=torch.nested.nested_tensor([x, x[:2]]))


def test_zeros_without_memory_are_zeros():
    zeros = torch._efficientzerotensor(2, 3)
    assert zeros.data_ptr() == 0
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert correct(zeros, torch.zeros(2, 3), mask, DECOUPLED).weights.tolist() == [[1.0] * 3] * 2
    with pytest.raises(ValueError, match="train_log_prob has no memory; call clone"):
        correct(zeros, torch.zeros(2, 3), mask, DECOUPLED, impl="cpu")


# --- Arguments next to a batch ----------------------------------------------------------------------------------------


def test_buffers_positions_denominators_and_sets_pass_the_same_boundary():
    given = batch()
    log_probs, mask = (given["train_log_prob"], given["rollout_log_prob"]), given["response_mask"]
    with pytest.raises(TypeError, match=r"out loss_mask must be a tensor, got numpy\.ndarray"):
        correct(*log_probs, mask, "disabled", out=(None, mask.numpy()))
    with pytest.raises(TypeError, match="position_ids must be a tensor, got list"):
        correct(*log_probs, mask, DECOUPLED, detail=Detail(position_ids=[[0]]))
    with pytest.raises(TypeError, match=r"kept ids must be a tensor, got numpy\.ndarray"):
        KeptSets(np.zeros(0, dtype=np.int32), torch.zeros(1, dtype=torch.int64))
    counts = ENTRIES["count_denominators, padded"].call(mask)
    spread = dataclasses.replace(counts, tokens=counts.tokens.expand(3))
    with pytest.raises(ValueError, match=r"a denominator \(3,\) must be a number or a 0-d tensor"):
        ENTRIES["token_mean, padded"].call(given["loss"], mask, spread)


# --- A correction and its tokens -----------------------------------------------------------------------------------


def corrected(*, packed: bool = False):
    given = batch(packed=packed)
    cu_seqlens = given.get("cu_seqlens")
    correction = correct(
        given["old_log_prob"], given["rollout_log_prob"], given["response_mask"], DECOUPLED, cu_seqlens=cu_seqlens
    )
    return given, correction


def loss_of(given, correction, **options):
    return policy_loss(
        PolicyLogProbs(**{name: given[name] for name in ("log_prob", "old_log_prob", "rollout_log_prob")}),
        given["advantages"],
        given["response_mask"],
        config=DECOUPLED,
        correction=correction,
        cu_seqlens=given.get("cu_seqlens"),
        **options,
    )


def rows_of(given, rows):
    return {name: x[rows] for name, x in given.items() if x.shape[:1] == (B,)}


@pytest.mark.parametrize("packed", [False, True])
def test_a_correction_of_the_same_tokens_is_taken(packed):
    given, correction = corrected(packed=packed)
    assert torch.equal(loss_of(given, correction).loss_mask, correction.loss_mask)
    copies = given | {name: given[name].clone() for name in ("response_mask", *(["cu_seqlens"] if packed else []))}
    assert torch.equal(loss_of(copies, correction).loss, loss_of(given, correction).loss)


def test_a_correction_of_other_rows_is_refused():
    given, correction = corrected()
    with pytest.raises(ValueError, match=r"correction.loss_mask \(5, 7\) and response_mask \(2, 7\) differ"):
        loss_of(rows_of(given, slice(0, 2)), correction)
    with pytest.raises(ValueError, match=r"correction keeps \d+ tokens outside of response_mask"):
        loss_of(rows_of(given, torch.tensor([1, 0, 2, 4, 3])), correction)


def test_a_correction_under_a_narrower_or_a_wider_mask_is_refused():
    given, correction = corrected()
    wider = given | {"response_mask": torch.ones_like(given["response_mask"])}
    with pytest.raises(ValueError, match="correction was computed with a response_mask that differs at 17 tokens"):
        loss_of(wider, correction)
    narrower = given | {"response_mask": torch.zeros_like(given["response_mask"])}
    with pytest.raises(ValueError, match=r"keeps \d+ tokens outside of response_mask.*take the rows of the correction"):
        loss_of(narrower, correction)


def test_a_correction_of_other_sequences_is_refused():
    given, correction = corrected(packed=True)
    shifted = given | {"cu_seqlens": torch.tensor([0, 6, 10, 10, 15, 21])}
    with pytest.raises(ValueError, match="correction has other cu_seqlens than the loss"):
        loss_of(shifted, correction)
    fewer = given | {"cu_seqlens": torch.tensor([0, 21])}
    with pytest.raises(ValueError, match="correction has other cu_seqlens than the loss"):
        loss_of(fewer, correction)


def test_a_correction_on_another_device_is_refused_by_both_names():
    given, correction = corrected()
    moved = dataclasses.replace(correction, loss_mask=correction.loss_mask.to("meta"))
    with pytest.raises(ValueError, match=r"response_mask is on cpu and correction\.loss_mask is on meta"):
        loss_of(given, moved)


def test_a_part_of_a_correction_that_was_cut_out_by_hand_needs_denominators():
    given, correction = corrected()
    rows = torch.tensor([3, 0])
    part = dataclasses.replace(correction, weights=correction.weights[rows], loss_mask=correction.loss_mask[rows])
    with pytest.raises(ValueError, match=r"cut or changed by hand.*take correction\[rows\], or pass denominators"):
        loss_of(rows_of(given, rows), part)
    output = loss_of(rows_of(given, rows), part, denominators=correction.denominators())
    assert torch.equal(output.loss_mask, correction.loss_mask[rows])
