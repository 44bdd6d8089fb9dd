"""Models by directory or by hub id. The hub is its cache on the disk: no test reaches a network."""

import os
import sys

import pytest
from processes import run_python

from rollcorr.train.grpo.policy import load_policy, make_tiny_policy, save_policy
from rollcorr.train.model_files import demo_model_directory, model_directory

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A hub cache with one model, `tiny/policy`, as its branch main."""
    home = tmp_path_factory.mktemp("hub")
    model = home / "hub" / "models--tiny--policy"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    save_policy(
        make_tiny_policy(hidden_size=16, intermediate_size=32, num_hidden_layers=1), model / "snapshots" / COMMIT
    )
    return home


def run(code, home):
    """Return the output of a new process: the hub's library reads its variables once, at import."""
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    return run_python(code, env=environment)


def test_a_hub_id_loads_the_model_from_the_hub_s_cache(hub):
    code = (
        "from rollcorr.train.grpo import load_policy\n"
        f"for name in ('tiny/policy', 'tiny/policy@main', 'tiny/policy@{COMMIT}'):\n"
        "    print(load_policy(name).model.config.hidden_size)"
    )
    done = run(code, hub)
    assert done.stdout.split() == ["16", "16", "16"], done.stderr


def test_an_id_that_the_hub_does_not_give_is_one_sentence(hub):
    done = run(
        "from rollcorr.cli import app; app(['train', 'model.path=tiny/other', 'steps=1', 'run_dir=unused'])", hub
    )
    assert "model.path 'tiny/other' is no directory here, and the hub did not give" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 2


def test_a_directory_is_taken_before_the_hub(tmp_path, monkeypatch):
    (tmp_path / "tiny" / "policy").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert str(model_directory("tiny/policy")) == "tiny/policy"


@pytest.mark.parametrize("path", ["/nowhere", "./tiny/other", "../other", "a/b/c", "other"])
def test_a_path_that_is_no_hub_id_is_never_asked_for(path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        model_directory(path)


def test_the_models_of_the_demos_are_found_beside_the_package():
    for name in ("demo", "shapes"):
        assert list(demo_model_directory(name).rglob("*.safetensors"))


def test_without_the_models_of_the_demos_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rollcorr_demo_models", None)
    with pytest.raises(
        FileNotFoundError, match=r"the demos, and these are not installed: pip install rollcorr-demo-models"
    ):
        load_policy("demo")
