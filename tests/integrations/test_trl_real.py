"""The adapter in TRL's own trainers. `make test-trl` installs TRL; elsewhere recorded numbers of it are compared."""

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed; `make test-trl` runs these tests in an environment of its own")
pytestmark = pytest.mark.filterwarnings("ignore", "error::rollcorr.config.InertOptionWarning")  # others' code warns

from trl import GRPOTrainer, RLOOTrainer  # noqa: E402
from trl_cases import (  # noqa: E402
    LOSSES,
    MODES,
    completions,
    grpo_trainer,
    loss_and_gradient,
    prompts,
    replayed,
    rloo_trainer,
    with_options,
)

from rollcorr.integrations.trl import RolloutCorrectionMixin, attach  # noqa: E402

CASES = [(loss, mode) for loss in LOSSES for mode in MODES if loss != "vespo" or mode.startswith("token")]
BOUNDS = [(3.0, None), (1.3, 0.6), (None, 0.8)]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return attach(replayed(grpo_trainer(tmp_path_factory.mktemp("grpo")), *completions()))


def assert_equal(ours, theirs):
    (loss, gradient), (their_loss, their_gradient) = ours, theirs
    torch.testing.assert_close(loss, their_loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, their_gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("upper", "lower"), BOUNDS)
@pytest.mark.parametrize(("loss_type", "mode"), CASES)
def test_loss_and_gradient_equal_those_of_trl(trainer, loss_type, mode, upper, lower):
    with_options(trainer, mode, upper, lower)
    trainer.loss_type = loss_type
    attach(trainer)

    own_batch = GRPOTrainer._generate_and_score_completions(trainer, prompts())
    batch = trainer._generate_and_score_completions(prompts())
    assert own_batch["importance_sampling_ratio"].unique().numel() > 1  # the options act on this batch
    assert_equal(loss_and_gradient(trainer, batch), loss_and_gradient(trainer, own_batch))
