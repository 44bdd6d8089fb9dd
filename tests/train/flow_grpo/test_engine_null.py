"""A null of pictures from any `DiffusionEngine`, and from the rollout copy."""

import pytest
import torch
from typer.testing import CliRunner

from rollcorr.cli import app
from rollcorr.diagnostics import read_picture_null
from rollcorr.engines import DiffusionRollout

MINE = """
from dataclasses import replace


class Copy:
    '''The rollout copy of a trainer as an engine.'''

    engine = "my engine"

    def __init__(self, trainer, change=lambda rollout: rollout):
        self.trainer, self.change = trainer, change

    def sample(self, prompts, windows, *, seed):
        trainer = self.trainer
        return self.change(trainer.sampler.sample(trainer.prompts(prompts), windows, seed=seed, step=0))


def without_means(trainer):
    return Copy(trainer, lambda rollout: replace(rollout, data={
        name: tensor for name, tensor in rollout.data.items() if name != "prev_sample_mean"
    }))


def shifted(trainer):
    return Copy(trainer, lambda rollout: replace(rollout, sigmas=rollout.sigmas**2))
"""


@pytest.fixture
def null(flow_run, tmp_path):
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")

    def measure(*arguments, dtype="bfloat16"):
        options = [f"--config={override}" for override in (*flow_run, f"rollout.dtype={dtype}")]
        return CliRunner().invoke(app, ["null", *options, *arguments, "--rows=24", "-o", str(tmp_path / "null.json")])

    return measure


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_matmul", "float32"])
def test_any_engine_gives_a_null(null, tmp_path, dtype):
    """The rollout copy as an engine of one's own measures the same rounding as the copy itself."""
    found = []
    for sampler in ([], [f"--sampler={tmp_path / 'mine.py'}:Copy"]):
        result = null(*sampler, dtype=dtype)
        assert result.exit_code == 0, result.output
        found.append(read_picture_null(tmp_path / "null.json"))
        (tmp_path / "null.json").unlink()
    assert [null.origin.engine for null in found] == [(f"rollout copy, {dtype}",), ("my engine",)]
    assert [null.pictures for null in found] == [24, 24]
    assert found[1].exact_kl == pytest.approx(found[0].exact_kl, rel=0.5, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "message"),
    [("without_means", "prev_sample_mean"), ("shifted", "schedules differ"), ("nobody", "cannot be loaded")],
)
def test_engines_that_give_no_null_are_explained(null, tmp_path, name, message):
    result = null(f"--sampler={tmp_path / 'mine.py'}:{name}")
    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ")
    assert not (tmp_path / "null.json").exists()


def test_a_family_in_a_file_runs_no_code(null, tmp_path):
    """A configuration may be a stranger's; typed in the command, the same option is trusted."""
    marker, family = tmp_path / "ran", tmp_path / "family.py"
    family.write_text(
        f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n"
        "from rollcorr.train.flow_grpo.families import StableDiffusion3\n",
        encoding="utf-8",
    )
    file, option = tmp_path / "run.yaml", f"{family}:StableDiffusion3"
    file.write_text(f"recipe: flow_grpo\nmodel:\n  family: {option}\n", encoding="utf-8")
    result = null(f"--config={file}")
    assert result.exit_code == 2
    assert "model.family" in result.output
    assert not marker.exists()
    assert null(f"--config={file}", f"--config=model.family={option}").exit_code == 0
    assert marker.exists()


def test_a_trainer_samples_with_an_engine(flow_trainer):
    trainer, asked = flow_trainer("rollout.dtype=float32"), []

    class Copy:
        engine = "copy"

        def sample(self, prompts, windows, *, seed):
            asked.append((prompts, tuple(windows.shape)))
            return trainer.sampler.sample(trainer.prompts(prompts), windows, seed=seed, step=0)

    trajectories, texts = trainer.sample(1, Copy())
    assert asked == [(texts, (12, 2))]
    assert isinstance(trajectories, DiffusionRollout)
    scores = trainer.score_all(trajectories, trainer.model)
    torch.testing.assert_close(scores["log_probs"], trajectories.data["rollout_log_probs"], rtol=0, atol=1e-5)
