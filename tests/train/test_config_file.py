"""Defaults under a file under overrides; wrong names are answered with the right ones."""

from pathlib import Path

import pytest
import yaml

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.train import load_config
from rollcorr.train.config_file import recipe_of
from rollcorr.train.grpo.grpo_config import GrpoConfig

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "train").glob("*.yaml"))


def test_without_anything_the_defaults_stand():
    assert load_config() == GrpoConfig()
    assert load_config().algorithm.correction == RolloutCorrectionConfig()
    sampling = load_config().rollout.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, -1)


def test_the_later_word_wins(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("optim: {lr: 1e-5, betas: [0.8, 0.9]}\nsteps: 7\n", encoding="utf-8")
    config = load_config(file, ["steps=8", "steps=9", "optim.mini_batch_size=4"])
    assert (config.optim.lr, config.optim.betas, config.steps, config.optim.mini_batch_size) == (1e-5, (0.8, 0.9), 9, 4)


def test_the_overrides_of_the_quickstart():
    correction = load_config(
        None,
        [
            "algorithm.rollout_correction.bypass_mode=True",
            "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
            "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0",
        ],
    ).algorithm.correction
    assert correction == RolloutCorrectionConfig(
        bypass_mode=True, rollout_rs="seq_mean_k1", rollout_rs_threshold="0.5_2.0"
    )


@pytest.mark.parametrize("band", ["0.5_5", "0.5_2.0"])
def test_a_band_is_never_read_as_one_number(band):
    (criterion,) = load_config(
        None,
        [
            "algorithm.rollout_correction.rollout_rs=token_k1",
            f"algorithm.rollout_correction.rollout_rs_threshold={band}",
        ],
    ).algorithm.correction.criteria
    assert (criterion.lower, criterion.upper) == tuple(map(float, band.split("_")))


def test_a_preset_by_name_and_changed():
    name = "algorithm.rollout_correction=decoupled_token_is"
    changed = load_config(None, [name, "algorithm.rollout_correction.rollout_is_threshold=4"]).algorithm.correction
    assert load_config(None, [name]).algorithm.correction == RolloutCorrectionConfig.decoupled_token_is()
    assert changed == RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=4.0)


def test_null_is_no_correction_at_all():
    assert load_config(None, ["algorithm.rollout_correction=null"]).algorithm.correction is None


def test_an_older_generation_of_the_schema_is_understood():
    correction = load_config(
        None, ["algorithm.rollout_correction={rollout_is: true, rollout_is_threshold: 3.0, rollout_is_level: sequence}"]
    ).algorithm.correction
    assert (correction.rollout_is, correction.rollout_is_threshold) == ("sequence", 3.0)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optm.lr=1", "Did you mean 'warm_up.lr' or 'optim.lr'? unknown option 'optm.lr'; valid are recipe, "),
        ("lr=1", "Did you mean 'warm_up.lr' or 'optim.lr'? unknown option 'lr'; valid are recipe, "),
        ("model.pth=x", "Did you mean 'model.path'? unknown option 'model.pth'; valid are model.path, "),
        ("optim.momentum=1", "unknown option 'optim.momentum'; valid are optim.lr, optim.lr_warmup_steps"),
        ("optim=3", "optim is a block of options, got 3; set optim.<option> instead"),
        ("optim.lr=fast", "optim.lr: Value 'fast' of type 'str' could not be converted to Float"),
        ("steps=1.5", "steps: Value '1.5' of type 'float'"),
        ("steps", "override 'steps' is not of the form dotted.name=value"),
        ("steps=[1", "override 'steps=[1': not a YAML document"),
        ("task.name=chess", "task.name: Invalid value 'chess', expected one of ['arithmetic', 'scratchpad', 'gsm8k']"),
        ("task.name=gsm8k", "task.path belongs to task.name=gsm8k"),
        ("steps=0", "steps must be at least 1, got 0"),
        ("rollout.group_size=1", "rollout.group_size must be at least 2, got 1"),
        ("optim.lr=0", "optim.lr must be > 0, got 0"),
        ("model.path=null", "set either model.path or model.config"),
        ("rollout.sampling.temperature=0.7", "set rollout.sampling.logprobs=processed"),
        ("rollout.engine=abacus", "rollout.engine: Invalid value 'abacus', expected one of ['transformers'"),
        ("algorithm.rollout_correction=decoupled", "no preset is named 'decoupled'"),
        ("algorithm.rollout_correction.rollout_iss=token", "rollout_is"),
        (
            "algorithm.leave_rejected_out_of_baseline=true algorithm.rollout_correction=bypass_ppo_clip",
            "decoupled mode",
        ),
        ("algorithm.loss.loss_agg_mode=mean", "algorithm.loss.loss_agg_mode: Invalid value 'mean'"),
    ],
)
def test_a_mistake_is_answered_with_the_fix(override, message):
    with pytest.raises(ValueError) as caught:
        load_config(None, override.split(" "))
    assert message in str(caught.value)


@pytest.mark.parametrize("option", ["top_p=0.9", "top_k=20", "min_p=0.1"])
def test_a_truncation_needs_processed_log_probs_and_an_actor_that_knows_it(option):
    setting = f"rollout.sampling.{option}"
    with pytest.raises(ValueError, match=r"set rollout\.sampling\.logprobs=processed"):
        load_config(None, [setting])
    processed = [setting, "rollout.sampling.logprobs=processed"]
    assert load_config(None, processed).actor.sampling == "replay"
    with pytest.raises(ValueError, match=r"set actor\.sampling=replay"):
        load_config(None, [*processed, "actor.sampling=full"])
    assert load_config(None, [*processed, "actor.sampling=full", "actor.allow_incompatible=true"])


def test_engine_options_are_free_form_and_survive_the_saved_configuration(tmp_path):
    config = load_config(None, ["rollout.engine_options.batch=3", "rollout.engine_options.kind={a: [1, x]}"])
    assert config.rollout.engine_options == {"batch": 3, "kind": {"a": [1, "x"]}}
    (tmp_path / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    assert load_config(tmp_path / "config.yaml").rollout == config.rollout


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere.yaml' does not exist"):
        load_config(tmp_path / "nowhere.yaml")
    for text in ("- a list\n", "steps: [1\n"):
        (tmp_path / "bad.yaml").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"bad\.yaml: "):
            load_config(tmp_path / "bad.yaml")


@pytest.mark.parametrize("correction", ["null", "decoupled_k3_rs_token_tis", "{}"])
def test_the_saved_configuration_is_the_whole_configuration(tmp_path, correction):
    config = load_config(None, [f"algorithm.rollout_correction={correction}", "optim.betas=[0.5, 0.6]"])
    (tmp_path / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    again = load_config(tmp_path / "config.yaml")
    assert again.algorithm.correction == config.algorithm.correction
    assert yaml.safe_load(again.to_yaml()) == yaml.safe_load(config.to_yaml())


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_a_valid_configuration(path):
    without_files = ["task.path=null", "task.name=arithmetic"] if recipe_of(path) is None else []
    assert load_config(path, without_files).steps > 0
