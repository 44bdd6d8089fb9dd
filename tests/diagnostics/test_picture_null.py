"""A null of pictures: measured from functions, a configuration or a log, and the verdict that it gives."""

import numpy as np
import pytest
from test_diffusion_rules import write_log
from typer.testing import CliRunner

from rollcorr import check_logs
from rollcorr.cli import app
from rollcorr.diagnostics import PictureNull, null_of_logs, read_null, read_picture_null
from rollcorr.diagnostics.null import Origin
from rollcorr.diagnostics.null.picture_rows import FIELDS, PictureRows
from rollcorr.run_directory.stored_run import BadInputError

SOURCE = """
import torch

STD = 0.2


def sample(number):
    generator = torch.Generator().manual_seed(number)
    mean = torch.zeros(32, 1, 3, 8, 8)
    after = mean + STD * torch.randn(mean.shape, generator=generator)
    return {"prev_sample_mean": mean, "std": torch.full((32, 1), STD), "timesteps": torch.full((32, 1), 500.0),
            "latents": torch.cat([mean, after], 1), "rollout_log_probs": density(after, mean), "engine": "mine"}


def score(data):
    mean = data["prev_sample_mean"] + 0.002
    return {"prev_sample_mean": mean, "log_probs": density(data["latents"][:, 1:], mean)}


def density(after, mean):
    return -((after - mean) / STD).square().flatten(2).mean(-1) / 2 - 0.6895
"""
KL = 192 * 0.002**2 / (2 * 0.2**2)


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_two_functions_give_a_null(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE, encoding="utf-8")
    where = tmp_path / "mine.py"
    result = invoke(
        "null", "--sampler", f"{where}:sample", "--trainer", f"{where}:score", "--rows", 64, "-o", tmp_path / "n.json"
    )
    assert result.exit_code == 0, result.output
    null = read_picture_null(tmp_path / "n.json")
    assert (null.pictures, null.dimensions, null.origin.engine) == (64, 192, ("mine",))
    assert null.exact_kl == pytest.approx(KL, rel=1e-4)
    with pytest.raises(BadInputError, match="a null of pictures"):
        read_null(tmp_path / "n.json")


@pytest.mark.parametrize("given", [["--sampler", "a:b"], ["--config", "a.yaml", "--sampler", "a:b"]])
def test_half_a_source_is_an_error(tmp_path, given):
    result = invoke("null", *given, "-o", tmp_path / "n.json")
    assert result.exit_code == 2
    assert not (tmp_path / "n.json").exists()


def test_the_null_grows_with_the_size(tmp_path):
    null = null_of_logs([write_log(tmp_path / "a.parquet", kl=2.0)])
    assert isinstance(null, PictureNull)
    assert null.expected(_rows(dimensions=768, timestep=1000.0)) == pytest.approx(2.0 * 768 / 65_536)


def _rows(**columns):
    values = np.full((1, len(FIELDS)), np.nan)
    for name, value in columns.items():
        values[0, FIELDS.index(name)] = value
    return PictureRows(values)


def test_an_unseen_timestep_takes_the_velocity_error():
    seen = _rows(picture=0, dimensions=10, timestep=800.0, sigma=0.8, sigma_next=0.7, step_std=0.3, kl=0.1)
    other = _rows(picture=0, dimensions=10, timestep=600.0, sigma=0.6, sigma_next=0.5, step_std=0.2)
    null = PictureNull.of(seen, name="n", origin=Origin())

    # c = dt − s² (1 − σ) / 2σ and KL = e² D c² / 2s², for one velocity error e.
    c = [-0.1 - 0.09 * 0.2 / 1.6, -0.1 - 0.04 * 0.4 / 1.2]
    assert null.expected(other) == pytest.approx(0.1 * (c[1] ** 2 / 0.08) / (c[0] ** 2 / 0.18))


def test_check_reads_a_null_of_pictures(tmp_path):
    null_of_logs([write_log(tmp_path / "null.parquet", kl=0.01, seed=1)]).save(tmp_path / "null.json")
    log = write_log(tmp_path / "log.parquet", kl=0.01)
    assert invoke("check", log, "--null", tmp_path / "null.json").exit_code == 0
    assert invoke("check", write_log(tmp_path / "far.parquet", kl=0.5), "--null", tmp_path / "null.json").exit_code == 1
    assert invoke("check", log).exit_code == 3


def test_a_log_without_the_exact_kl_is_no_null(tmp_path):
    with pytest.raises(BadInputError, match="no exact KL"):
        null_of_logs([write_log(tmp_path / "log.parquet", kl=0.01, with_kl=False)])


def test_a_damaged_null_is_an_error(tmp_path):
    path = tmp_path / "null.json"
    path.write_text('{"format": "rollcorr-picture-null", "version": 1, "timesteps": []}', encoding="utf-8")
    with pytest.raises(BadInputError, match="damaged"):
        read_picture_null(path)


def test_steps_of_the_log_serve_as_its_null(tmp_path):
    folder = tmp_path / "rollouts"
    folder.mkdir()
    for step, kl in ((1, 0.01), (2, 0.01), (3, 0.01), (4, 0.4)):
        write_log(folder / f"{step}.parquet", kl=kl, rows=32, seed=step, step=step)
    assert check_logs([folder], null_steps=(1, 2)).health.verdict == "unhealthy"
    (folder / "4.parquet").unlink()
    assert check_logs([folder], null_steps=(1, 2)).health.verdict == "healthy"
    with pytest.raises(BadInputError, match="nothing is left"):
        check_logs([folder], null_steps=(1, 3))
