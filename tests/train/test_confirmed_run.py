"""`confirm` on the rollouts and the checkpoints of a run."""

import io

from rich.console import Console

from rollcorr.confirm import confirm
from rollcorr.train import train
from rollcorr.train.grpo.policy import load_policy


def test_the_checkpoint_before_a_step_scores_it(micro_config, tmp_path):
    train(micro_config("steps=2", "checkpoint.every=1", "log.rollouts=true"), console=Console(file=io.StringIO()))
    run = tmp_path / "run"
    gaps = {}
    for step in (1, 2):
        model = load_policy(str(run / "checkpoints" / f"step_{step:06d}")).model
        result = confirm(run / "rollouts", model, steps=(2, 2))
        gaps[step] = result.sides["trainer"].gaps["plain"]
    assert gaps[1] < 1e-9 < 1e-4 < gaps[2]
