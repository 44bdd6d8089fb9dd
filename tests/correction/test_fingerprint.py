"""A loss notices the correction of other rows: twenty incorrect loops, each at its first step, and correct ones."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from implementations import per_implementation

from rollcorr import Monitor, PolicyLogProbs, correct, policy_loss
from rollcorr.config import checks
from rollcorr.correction import correction_checks
from rollcorr.kernels.correction.dispatch import correction_kernel

PRESET = "decoupled_token_is"


class Rollouts:
    """Four full sequences of six tokens: rows differ only by their values; float32."""

    def __init__(self, seed=0, *, dtype=torch.float32, noise=0.3):
        generator = torch.Generator().manual_seed(seed)
        draws = torch.randn(4, 4, 6, generator=generator)
        self.old = (-2 + 0.5 * draws[0]).to(dtype)
        self.rollout = (self.old + noise * draws[1]).to(dtype)
        self.now = (self.old + 0.2 * draws[2]).to(dtype)
        self.advantages, self.mask = draws[3], torch.ones(4, 6, dtype=torch.bool)

    def correct(self, **options):
        return correct(self.old, self.rollout, self.mask, PRESET, **options)

    def swapped(self):
        return correct(self.rollout, self.old, self.mask, PRESET)

    def loss(self, correction, rows=slice(None), **changed):
        """The loss of some rows; `changed` replaces a policy of these rows."""
        given = {"log_prob": self.now, "old_log_prob": self.old, "rollout_log_prob": self.rollout}
        given = {name: values[rows] for name, values in given.items()} | changed
        mask = self.mask[rows]
        return policy_loss(PolicyLogProbs(**given), self.advantages[rows], mask, correction=correction)


B = Rollouts()
OTHER = Rollouts(1)
EACH = torch.arange(4)
SHUFFLED = torch.tensor([2, 0, 3, 1])

INCORRECT = {
    "arguments of correct swapped": lambda: B.loss(B.swapped()),
    "swapped, then a slice": lambda: B.loss(B.swapped()[1:3], slice(1, 3)),
    "swapped, then an index tensor": lambda: B.loss(B.swapped()[EACH], EACH),
    "swapped, then a list": lambda: B.loss(B.swapped()[[1, 2]], [1, 2]),
    "swapped, then clones": lambda: B.loss(B.swapped(), old_log_prob=B.old.clone(), rollout_log_prob=B.rollout.clone()),
    "swapped, then another dtype": lambda: B.loss(
        B.swapped(), old_log_prob=B.old.double(), rollout_log_prob=B.rollout.double()
    ),
    "swapped, and one of them given": lambda: B.loss(B.swapped(), rollout_log_prob=None),
    "policies of the loss swapped": lambda: B.loss(B.correct(), old_log_prob=B.rollout, rollout_log_prob=B.old),
    "the sampler as old policy": lambda: B.loss(B.correct(), old_log_prob=B.rollout, rollout_log_prob=None),
    "rows shuffled, then split": lambda: B.loss(B.correct().split(2)[0], SHUFFLED[:2]),
    "rows reversed": lambda: B.loss(B.correct(), EACH.flip(0)),
    "rows sorted by length": lambda: B.loss(B.correct(), B.old.sum(-1).argsort()),
    "slice off by one": lambda: B.loss(B.correct()[0:2], slice(1, 3)),
    "micro-batches in another order": lambda: B.loss(B.correct().split(2)[1], slice(0, 2)),
    "another mini-batch": lambda: B.loss(B.correct().mini_batch(slice(0, 2)), slice(2, 4)),
    "bool rows of the complement": lambda: B.loss(B.correct()[EACH < 2], EACH >= 2),
    "a row twice": lambda: B.loss(B.correct()[[0, 0]], slice(0, 2)),
    "the step before": lambda: B.loss(OTHER.correct()),
    "another batch's sampler": lambda: B.loss(B.correct(), rollout_log_prob=OTHER.rollout),
    "old policy after the update": lambda: B.loss(B.correct(), old_log_prob=B.now.clone() + 0.01),
    "buffers overwritten in place": lambda: B.loss(_overwritten()),
    "log-probs at another temperature": lambda: B.loss(B.correct(), old_log_prob=B.old / 0.9),
    "a pickled correction": lambda: B.loss(pickle.loads(pickle.dumps(OTHER.correct()))),
    "packed sequences in another order": lambda: _packed(EACH, SHUFFLED),
}


def _overwritten():
    """The correction of a batch whose tensors then receive the next one."""
    old, rollout = OTHER.old.clone(), OTHER.rollout.clone()
    correction = correct(old, rollout, OTHER.mask, PRESET)
    old.copy_(B.old)
    rollout.copy_(B.rollout)
    return correction


def _packed(corrected, given):
    """Packed sequences in one order, with the correction of a different order. All have six tokens."""
    offsets = torch.arange(5) * 6
    mask = B.mask.flatten()
    correction = correct(B.old[corrected].flatten(), B.rollout[corrected].flatten(), mask, PRESET, cu_seqlens=offsets)
    names = {"log_prob": B.now, "old_log_prob": B.old, "rollout_log_prob": B.rollout}
    policies = PolicyLogProbs(**{name: values[given].flatten() for name, values in names.items()})
    return policy_loss(policies, B.advantages[given].flatten(), mask, correction=correction)


@pytest.fixture
def device(monkeypatch):
    """Treat tensors as if they were on a device, whose values must not be read."""
    monkeypatch.setattr(correction_checks, "in_host_memory", lambda *_: False)


@per_implementation
@pytest.mark.parametrize("loop", INCORRECT)
def test_incorrect_loops_raise_at_the_first_step(loop):
    message = "are swapped" if "swap" in loop or loop == "the sampler as old policy" else "correction is of other rows"
    with pytest.raises(ValueError, match=message):
        INCORRECT[loop]()


@pytest.mark.parametrize("loop", INCORRECT)
def test_incorrect_loops_alarm_a_monitor_on_devices(loop, device, tmp_path):
    with Monitor(tmp_path) as monitor:
        monitor.correct(B.old, B.rollout, B.mask)
        monitor.add(INCORRECT[loop]())
        metrics = monitor.step()
        assert metrics["actor/correction_mismatch"] > 0
        assert "correction_mismatch" in [finding.code for finding in monitor.alarms]


def test_a_loss_alone_alarms_a_monitor(device, tmp_path):
    with Monitor(tmp_path) as monitor:
        monitor.add(B.loss(OTHER.correct()))
        monitor.step()
        assert [finding.code for finding in monitor.alarms] == ["correction_mismatch"]


NAN = torch.tensor(float("nan"))
CORRECT = {
    "the whole batch": lambda c: B.loss(c),
    "a slice": lambda c: B.loss(c[1:3], slice(1, 3)),
    "an index tensor": lambda c: B.loss(c[SHUFFLED], SHUFFLED),
    "a list": lambda c: B.loss(c[[3, 0]], [3, 0]),
    "bool rows": lambda c: B.loss(c[EACH > 1], EACH > 1),
    "a mini-batch split": lambda c: B.loss(c.mini_batch(SHUFFLED).split(2)[1], SHUFFLED[2:]),
    "no rows": lambda c: B.loss(c[:0], slice(0, 0)),
    "a copied correction": lambda c: B.loss(copy.deepcopy(c)),
    "clones": lambda c: B.loss(c, old_log_prob=B.old.clone()),
    "bfloat16 of one side": lambda c: B.loss(c, old_log_prob=B.old.bfloat16()),
    "bfloat16 of the other": lambda c: B.loss(c, rollout_log_prob=B.rollout.bfloat16()),
    "float16 of both": lambda c: B.loss(c, old_log_prob=B.old.half(), rollout_log_prob=B.rollout.half()),
    "no rollout_log_prob": lambda c: B.loss(c, rollout_log_prob=None),
    "a missing log-prob": lambda c: B.loss(c, rollout_log_prob=B.rollout.where(EACH[:, None] > 0, NAN)),
    "packed": lambda c: _packed(SHUFFLED, SHUFFLED),
}


@per_implementation
@pytest.mark.parametrize("loop", CORRECT)
def test_correct_loops_pass(loop):
    assert CORRECT[loop](B.correct()).statistics.names["moments"].count(correction_checks.MISMATCH) == 0


@pytest.mark.parametrize("loop", CORRECT)
def test_correct_loops_show_no_mismatch_on_devices(loop, device):
    assert CORRECT[loop](B.correct()).statistics.read().moments[correction_checks.MISMATCH].mean == 0.0


def test_a_float64_correction_serves_a_float32_loss():
    wide = Rollouts(dtype=torch.float64)
    correction = wide.correct()
    narrow = {"old_log_prob": wide.old.float(), "rollout_log_prob": wide.rollout.float()}
    assert wide.loss(correction, log_prob=wide.now.float(), **narrow).loss.isfinite()
    with pytest.raises(ValueError, match="are swapped"):
        wide.loss(wide.swapped(), log_prob=wide.now.float(), **narrow)


def test_swapped_bfloat16_within_rounding_is_found():
    """|d| is below 2 ulp everywhere, but no value was converted: the exchanged sums are exactly the correction's."""
    close = Rollouts(dtype=torch.bfloat16, noise=0.01)
    assert close.loss(close.correct()).loss.isfinite()
    with pytest.raises(ValueError, match="are swapped"):
        close.loss(close.swapped())


def test_a_swap_before_a_conversion_is_found():
    """The exchanged sums fit within rounding to bfloat16, and the sums in order do not."""
    far = Rollouts(noise=2.0)
    rounded = {"old_log_prob": far.old.bfloat16(), "rollout_log_prob": far.rollout.bfloat16()}
    assert far.loss(far.correct(), **rounded).loss.isfinite()
    with pytest.raises(ValueError, match="are swapped"):
        far.loss(far.swapped(), **rounded)


@pytest.mark.parametrize("changed", ["old_log_prob", "rollout_log_prob"])
def test_either_policy_shows_other_rows_beside_missing_tokens(changed):
    """The sums skip a missing token in every row and are still compared."""
    rollout = B.rollout.index_fill(1, torch.tensor([2]), float("nan"))
    correction = correct(B.old, rollout, B.mask, PRESET)
    given = {"old_log_prob": B.old, "rollout_log_prob": rollout}
    assert B.loss(correction, **given).loss.isfinite()
    with pytest.raises(ValueError, match=f"of other rows: in row 0, {changed}"):
        B.loss(correction, **given | {changed: given[changed][SHUFFLED]})


@pytest.mark.parametrize("rollout", ["given", "omitted"])
def test_the_policy_itself_as_old_policy_is_a_remark(rollout):
    given = {} if rollout == "given" else {"rollout_log_prob": None}
    checks.warn_once.cache_clear()
    with pytest.warns(UserWarning, match="old_log_prob equals log_prob"):
        B.loss(B.correct(), old_log_prob=B.now.detach(), **given)
    assert B.loss(B.correct(), old_log_prob=B.now.detach(), **given).loss.isfinite()  # once per process


@pytest.mark.parametrize("rollout", ["given", "omitted"])
def test_the_policy_itself_after_a_swap_raises(rollout):
    given = {} if rollout == "given" else {"rollout_log_prob": None}
    nearly = B.old + 1e-3
    with pytest.raises(ValueError, match="are swapped"):
        B.loss(B.swapped(), log_prob=nearly, old_log_prob=nearly.detach(), **given)


@pytest.mark.parametrize(("step", "is_swap"), [(0.047, True), (0.049, False)])
def test_a_swap_is_twenty_times_nearer(step, is_swap):
    """The sampler is 1 nat above the old policy, and π_old = π_θ moved toward it by `step`: 20 · step < 1 − step."""
    rows = Rollouts(noise=0.0)
    rows.rollout = rows.old + 1.0
    own = rows.old + step
    checks.warn_once.cache_clear()
    with pytest.raises(ValueError, match="swapped") if is_swap else pytest.warns(UserWarning, match="equals log_prob"):
        rows.loss(rows.swapped(), log_prob=own, old_log_prob=own, rollout_log_prob=None)


def test_the_policy_itself_excuses_no_other_rows():
    rows = SHUFFLED
    with pytest.raises(ValueError, match="of other rows: in row 0, rollout_log_prob"):
        B.loss(B.correct(), rows, old_log_prob=B.now[rows].detach())


def test_the_error_names_the_first_row_and_both_sums():
    old = B.old.clone()
    old[2:] += 1
    with pytest.raises(ValueError, match=rf"in row 2, old_log_prob has 6 response tokens.*{B.old[2].sum():.4f}"):
        B.loss(B.correct(), old_log_prob=old)


def test_another_number_of_tokens_is_found_on_devices(device):
    """Masks are not compared there, and sequences with different numbers of measured tokens have no comparable sums."""
    mask = B.mask.clone()
    mask[1, 3:] = False
    policies = PolicyLogProbs(log_prob=B.now, old_log_prob=B.old, rollout_log_prob=B.rollout)
    correction = correct(B.old, B.rollout, B.mask, "measure")
    moments = policy_loss(policies, B.advantages, mask, correction=correction).statistics.read().moments
    assert moments[correction_checks.MISMATCH].mean == 1 / 4


def test_a_correction_moved_to_a_device_keeps_its_fingerprint():
    moved = B.correct().to("meta")
    assert moved.fingerprint.sums.is_meta
    assert moved.fingerprint.sums.shape == (4, 4)


@pytest.mark.parametrize("impl", ["torch", "cpu"])
@pytest.mark.parametrize("mask_share", [1.0, 0.8])
def test_kernels_sum_the_policies_alike(impl, mask_share):
    """Equal values, whose float32 sums are rounded in one direction; blocks of every kind."""
    generator = torch.Generator().manual_seed(0)
    train = torch.full((6, 3000), -0.7)
    rollout = train + torch.tensor([0.0, 0.01, 0.5, 2.0, 10.0, 1e4])[:, None] * -torch.rand(
        6, 3000, generator=generator
    )
    mask = torch.rand(6, 3000, generator=generator) < mask_share
    train[1, 7], rollout[2, 8] = -torch.inf, torch.nan
    config = B.correct().config
    sums, expected = (correction_kernel(train, rollout, mask, config, impl=x).policy_sums for x in (impl, "reference"))
    largest = torch.stack([mask.sum(-1) * x.nan_to_num(0, 0, 0).abs().amax(-1) for x in (train, rollout)])
    assert torch.equal(sums[:2], expected[:2])
    assert ((sums - expected)[2:].abs() <= 0.2 * 2**-23 * largest).all()  # a tenth of the loss's tolerance


@pytest.mark.filterwarnings("ignore:old_log_prob equals log_prob")
def test_noise_of_the_old_policy_is_no_swap():
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        log_prob, noise = -0.1 - torch.rand(1, 200, generator=generator), torch.randn(2, 1, 200, generator=generator)
        mask = torch.ones(1, 200)
        correction = correct(log_prob + 1e-3 * noise[0], log_prob + 1e-3 * noise[1], mask, "decoupled_token_is")
        policies = PolicyLogProbs(log_prob=log_prob.clone().requires_grad_(), old_log_prob=log_prob)
        policy_loss(policies, torch.ones(1), mask, correction=correction)


def test_a_converted_old_policy_equal_to_the_rollout_is_no_swap():
    old, mask = -torch.rand(4, 50, generator=torch.Generator().manual_seed(0)) - 0.1, torch.ones(4, 50)
    correction = correct(old.bfloat16(), old.clone(), mask, "decoupled_token_is")
    policies = PolicyLogProbs(log_prob=(old - 0.1).requires_grad_(), old_log_prob=old + 0)
    policy_loss(policies, torch.ones(4), mask, correction=correction)
