"""Before `impl="auto"` uses the Triton kernels, it compares them with torch; here fakes replace the kernels.

With Triton, test_triton_self_check.py runs the same check on the kernels themselves.
"""

from __future__ import annotations

import json
import math
import warnings

import pytest
import torch
from correction_cases import configuration

from rollcorr import correct, policy_loss, warm
from rollcorr.correction import PolicyLogProbs
from rollcorr.integrations import verl
from rollcorr.integrations.verl import v2025_11
from rollcorr.kernels.correction import dispatch, implementations
from rollcorr.kernels.correction.call import Batch
from rollcorr.kernels.correction.cpu import library
from rollcorr.kernels.correction.torch.blocks import torch_correction
from rollcorr.kernels.correction.triton import self_check
from rollcorr.kernels.correction.triton.self_check import Verdict, read_verdict, write_verdict

CPU = torch.device("cpu")


def stand_in(batch: Batch, config, *, splits=None):
    """A correct kernel whose blocks have a different size than the reference's."""
    return torch_correction(batch._replace(mask=batch.mask != 0), config, block_tokens=600)


def sabotaged(part):
    """The fake with one fault."""

    def kernel(batch, config, *, splits=None):
        output = stand_in(batch, config)
        if part == "weights" and output.weights is not None:
            output.weights.view(-1)[-1] += 0.01
        if part == "loss_mask":
            output.loss_mask.view(-1)[17] ^= True
        if part == "sequence_kept":
            output.sequence_kept[0] ^= True
        if part == "metrics":
            output.statistics.rows["moments"][0][1] *= 1.001
        if part == "error":
            raise RuntimeError("ptxas died\nat length")
        return output

    return kernel


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A temporary cache, and a process without verdicts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(self_check, "_verdicts", {})
    return tmp_path / "rollcorr" / "kernels"


def test_kernels_that_compute_the_same_agree():
    assert self_check.check_kernels(CPU, stand_in) == Verdict(True)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ("weights", r"standard, whole blocks, float32: weights differ at 1 of 7168 tokens, by up to 0\.0\d+"),
        ("loss_mask", "loss_mask differs at 1 of 7168 places"),
        ("sequence_kept", "sequence_kept differs at 1 of 7 places"),
        ("metrics", r"rollout_corr/\w+ is \S+, and \S+ by torch"),
        ("error", "standard, whole blocks, float32: RuntimeError: ptxas died$"),
    ],
)
def test_a_sabotaged_kernel_is_found_and_what_is_wrong_is_said(part, reason):
    verdict = self_check.check_kernels(CPU, sabotaged(part))
    assert not verdict.agrees
    assert verdict.failed == (part == "error")
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(verdict.reason)


def test_a_kernel_whose_runs_differ_is_found():
    runs = iter([0.0, 1e-9] * 99)

    def unsteady(batch, config, *, splits=None):
        output = stand_in(batch, config)
        output.statistics.rows["moments"][0][1] += next(runs)
        return output

    assert "two runs give different metrics" in self_check.check_kernels(CPU, unsteady).reason


def test_the_probes_cover_every_layout_dtype_level_and_poison():
    assert {p.packed for p in self_check.PROBES} == {True, False}
    padded = {p.T for p in self_check.PROBES if not p.packed}
    assert {T % 512 == 0 for T in padded} == {True, False}
    assert {T % 16 == 0 for T in padded if T % 512} == {True, False}
    dtypes = {p.train for p in self_check.PROBES}
    assert dtypes == {torch.float32, torch.bfloat16, torch.float16, torch.float64}
    assert {p.options.get("rollout_is") for p in self_check.PROBES} == {None, "token", "sequence", "geometric"}
    for probe in self_check.PROBES:
        train, rollout, mask, _ = self_check.probe_batch(probe, CPU)
        assert train[mask == 0].isnan().all()
        assert rollout[mask == 0].isinf().all()
        assert train[mask != 0].isnan().any()
        assert (train[mask != 0] == -math.inf).any()


def test_a_verdict_is_made_once_and_the_next_process_reads_it(cache, monkeypatch):
    calls = []
    monkeypatch.setattr(self_check, "check_kernels", lambda device: calls.append(device) or Verdict(True))
    assert self_check.known_verdict(CPU) is None
    assert self_check.is_verified(CPU)
    assert self_check.is_verified(CPU)
    assert calls == [CPU]

    monkeypatch.setattr(self_check, "_verdicts", {})  # the next process
    assert self_check.known_verdict(CPU) == Verdict(True)
    assert self_check.is_verified(CPU)
    assert calls == [CPU]
    assert [path.suffix for path in cache.iterdir()] == [".json"]


def test_a_difference_is_warned_of_once_in_a_process_and_an_error_is_tried_again_in_the_next(cache, monkeypatch):
    found = Verdict(False, "standard: loss_mask differs")
    monkeypatch.setattr(self_check, "check_kernels", lambda device: found)
    with pytest.warns(UserWarning, match=r"impl='auto' takes torch on cpu.*\(standard: loss_mask differs\)"):
        assert not self_check.is_verified(CPU)
    assert not self_check.is_verified(CPU)  # and no second warning, which would be an error here
    assert read_verdict(self_check.machine_of(CPU)) == found

    for path in cache.iterdir():
        path.unlink()
    monkeypatch.setattr(self_check, "_verdicts", {})
    found = Verdict(False, "ptxas died", failed=True)
    with pytest.warns(UserWarning, match=r"could not be run here \(ptxas died\)"):
        assert not self_check.is_verified(CPU)
    assert read_verdict(self_check.machine_of(CPU)) is None


def test_a_verdict_holds_for_one_device_driver_triton_and_package(cache):
    machine = self_check.machine_of(CPU)
    assert {"device", "torch", "triton", "rollcorr"} <= machine.keys()
    write_verdict(machine, Verdict(True))
    for name in machine:
        assert read_verdict(machine | {name: "another"}) is None
    assert read_verdict(machine) == Verdict(True)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[]", b'{"agrees": true}', b'{"machine": 1, "agrees": 1}']
)
def test_a_damaged_verdict_is_no_verdict(cache, content):
    machine = self_check.machine_of(CPU)
    write_verdict(machine, Verdict(True))
    (path,) = cache.iterdir()
    path.write_bytes(content)
    assert read_verdict(machine) is None
    write_verdict(machine, Verdict(True))
    assert read_verdict(machine) == Verdict(True)


def test_a_home_that_cannot_be_written_costs_a_check_and_no_error(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked / "below"))
    machine = self_check.machine_of(CPU)
    write_verdict(machine, Verdict(True))
    assert read_verdict(machine) is None


def batch_on_a_device(monkeypatch):
    """A batch that claims to be on a GPU; the kernels accept it."""
    meta = torch.zeros(2, 4, device="meta")

    class OnDevice:
        device = torch.device("cuda", 0)

    monkeypatch.setattr(dispatch.triton, "why_not", lambda *_: None)
    return Batch(meta, meta, OnDevice())


@pytest.mark.parametrize(("agrees", "taken"), [(True, "triton"), (False, "torch")])
def test_auto_takes_triton_on_a_device_where_it_agrees(monkeypatch, agrees, taken):
    asked = []
    monkeypatch.setattr(dispatch.self_check, "is_verified", lambda device: asked.append(device) or agrees)
    assert dispatch._fastest_implementation(batch_on_a_device(monkeypatch), configuration()) == taken
    assert asked == [torch.device("cuda", 0)]


def test_a_batch_that_the_kernels_do_not_take_needs_no_verdict(monkeypatch):
    batch = batch_on_a_device(monkeypatch)
    monkeypatch.setattr(dispatch.triton, "why_not", lambda *_: "rollout_is_floor is 0.5")
    monkeypatch.setattr(dispatch.self_check, "is_verified", lambda device: pytest.fail("was asked"))
    assert dispatch._fastest_implementation(batch, configuration()) == "torch"


def test_while_a_graph_is_captured_nothing_is_verified(monkeypatch):
    monkeypatch.setattr(self_check, "_verdicts", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not self_check.is_verified(torch.device("cuda", 0))
    assert not self_check._verdicts


@pytest.mark.parametrize(
    ("verdict", "note"),
    [
        (None, "not yet compared with torch"),
        (Verdict(True), "'auto' takes them"),
        (Verdict(False, "weights differ"), "'auto' takes torch instead.*weights differ"),
    ],
)
def test_info_says_whether_auto_takes_triton(monkeypatch, verdict, note):
    monkeypatch.setattr(dispatch.triton, "status", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dispatch.self_check, "known_verdict", lambda device: verdict)
    with pytest.raises(AssertionError, match=note):
        raise AssertionError(implementations()["triton"][1])


def names_of_runs(monkeypatch):
    """Which implementations run from now on."""
    ran = []
    for name, function in (
        ("torch", "torch_correction"),
        ("cpu", "cpu_correction"),
        ("reference", "reference_correction"),
    ):
        original = getattr(dispatch, function)
        monkeypatch.setattr(
            dispatch, function, lambda *a, _name=name, _run=original, **k: ran.append(_name) or _run(*a, **k)
        )
    return ran


def small_batch(dtype=torch.float32):
    train = torch.tensor([[-1.0, -2.0, -0.5]], dtype=dtype)
    return train, train - 0.1, torch.ones(1, 3, dtype=torch.bool)


def test_a_configuration_names_the_implementation_for_every_caller(monkeypatch):
    ran = names_of_runs(monkeypatch)
    config = configuration(rollout_is="token", bypass_mode=True, loss_type="reinforce", impl="reference")
    train, rollout, mask = small_batch()
    correct(train, rollout, mask, config)
    correct(train, rollout, mask, "decoupled_token_is", impl="torch")
    correct(train, rollout, mask, {"rollout_is": "token", "impl": "reference"})
    policies = PolicyLogProbs(log_prob=train.requires_grad_(), rollout_log_prob=rollout)
    policy_loss(policies, torch.ones(1, 3), mask, config=config, whole_step=True)
    assert ran == ["reference", "torch", "reference", "reference"]


def test_the_call_goes_before_the_configuration(monkeypatch):
    ran = names_of_runs(monkeypatch)
    correct(*small_batch(), configuration(rollout_is="token", impl="reference"), impl="torch")
    assert ran == ["torch"]


def test_configurations_that_differ_in_the_implementation_alone_are_equal_and_keep_it():
    one, other = configuration(rollout_is="token", impl="torch"), configuration(rollout_is="token")
    assert one == other
    assert hash(one) == hash(other)
    assert other.with_options(rollout_is_threshold=3.0).impl == "auto"
    assert one.with_options(rollout_is_threshold=3.0).impl == "torch"
    with pytest.raises(ValueError, match="impl must be"):
        configuration(impl="cuda")


def test_the_environment_says_what_auto_means_and_no_more(monkeypatch):
    ran = names_of_runs(monkeypatch)
    monkeypatch.setenv("ROLLCORR_IMPL", "reference")
    correct(*small_batch(), rollout_is="token")
    correct(*small_batch(), rollout_is="token", impl="torch")
    correct(*small_batch(), configuration(rollout_is="token", impl="torch"))
    assert ran == ["reference", "torch", "torch"]
    monkeypatch.setenv("ROLLCORR_IMPL", "fast")
    with pytest.raises(
        ValueError, match="ROLLCORR_IMPL must be one of auto, reference, torch, cpu, triton, got 'fast'"
    ):
        correct(*small_batch())


def test_where_the_named_implementation_does_not_take_a_batch_it_is_said_once(monkeypatch):
    monkeypatch.setenv("ROLLCORR_IMPL", "cpu")
    dispatch.warn_once.cache_clear()
    batch = small_batch(torch.float64)
    with pytest.warns(
        UserWarning, match="ROLLCORR_IMPL=cpu cannot take this batch: .*float64.*; impl='torch' takes it"
    ):
        correct(*batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        correct(*batch)


@pytest.mark.parametrize("packed", [False, True])
def test_warm_runs_once_and_names_the_implementation(monkeypatch, packed):
    ran = names_of_runs(monkeypatch)
    named = warm("decoupled_token_is", "cpu", shape=(2, 8), packed=packed, mask_dtype=torch.int64)
    assert [named] == ran
    assert named == ("torch" if library.status()[0] is None else "cpu")
    assert warm(configuration(impl="reference"), "cpu", shape=(2, 8)) == "reference"
    with pytest.raises(ValueError, match="nothing to make ready"):
        warm(None, "cpu")


def test_verls_configurations_carry_it():
    options = {"rollout_is": "token", "impl": "torch"}
    for generation in (verl, v2025_11):
        assert generation.RolloutCorrectionConfig.read(options).to_config().impl == "torch"
    assert verl.RolloutCorrectionConfig.read(options).to_correction().impl == "torch"


def test_a_verdict_file_says_what_it_holds_for(cache):
    machine = self_check.machine_of(CPU)
    write_verdict(machine, Verdict(False, "weights differ"))
    (path,) = cache.iterdir()
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert kept == {"machine": machine, "agrees": False, "reason": "weights differ"}
