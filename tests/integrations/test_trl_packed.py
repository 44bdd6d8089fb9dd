"""The loss of packed rows in a fake AsyncGRPOTrainer; test_trl_async.py runs TRL's own."""

import pytest
import torch
import trl_packed
from processes import start_ranks
from trl_packed import CONFIG, loss_of, packed

from rollcorr.integrations.trl import attach


def test_loss_of_packed_rows_by_hand():
    loss, model, trainer = loss_of(range(4))
    inputs, _ = packed(range(4))
    log_prob, rollout = model.log_prob.flip(0), inputs["old_log_probs"][0, :-2]
    ratio = (log_prob - rollout).detach().exp()
    kept = (ratio >= 0.7) & (ratio <= 1.4)
    total = torch.tensor(0.0)
    for row in range(4):
        of_row = inputs["segment_id"][0, :-2] == row
        weight = (log_prob - rollout)[of_row].sum().detach().exp().clamp(max=1.2)
        terms = weight * inputs["advantages"][0, :-2] * log_prob
        total = total - terms[of_row & kept].sum()
    assert 0 < kept.sum() < len(kept)
    torch.testing.assert_close(loss, total / kept.sum() / 2)
    assert trainer.logged["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 - float(kept.float().mean()))


def test_auxiliary_loss_is_added():
    plain, _, _ = loss_of(range(4))
    loss, model, _ = loss_of(range(4), aux=True)
    torch.testing.assert_close(loss, plain + 0.5 * model.log_prob.sum() / 2)


def test_measuring_returns_the_loss_of_trl():
    loss, _, trainer = loss_of(range(4), config="measure")
    assert loss == 7
    assert "rollout_corr/k3_kl" in trainer.logged


@pytest.mark.xdist_group("ranks")
def test_two_ranks_equal_one_process(tmp_path):
    start_ranks(trl_packed.save_loss, tmp_path, 2)
    (first, start, log), (second, end, _) = (
        torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)
    )
    loss, model, trainer = loss_of(range(4))
    loss.backward()
    torch.testing.assert_close((first + second) / 2, loss.detach())
    halves = torch.cat([start.flip(0), end.flip(0)]) / 2  # as DDP averages
    torch.testing.assert_close(halves, model.log_prob.grad.flip(0))
    assert log["rollout_corr/k3_kl"] == pytest.approx(trainer.logged["rollout_corr/k3_kl"])


def test_decoupled_configuration_is_refused():
    _, _, trainer = loss_of(range(4))
    with pytest.raises(ValueError, match=r"bypass_mode=False needs π_old, .* Set bypass_mode=True"):
        attach(trainer, CONFIG | {"bypass_mode": False, "loss_type": "ppo_clip"})
    with pytest.raises(ValueError, match="have no effect on AsyncGRPOTrainer"):
        attach(trainer, disable_trl_correction=True)
