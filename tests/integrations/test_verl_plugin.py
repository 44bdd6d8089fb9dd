"""The entry point that verl imports in each of its processes. test_verl_ray.py runs it in verl and Ray themselves."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import run_python

from rollcorr.integrations import verl, verl_plugin, verl_variables

NAME = "rollcorr.integrations.verl_plugin"


@pytest.fixture
def installs(monkeypatch):
    """Count the calls of `install` without installing."""
    calls = []
    monkeypatch.setattr(verl, "install", lambda: calls.append(1))
    for variable in (verl_variables.SWITCH, verl_variables.MODULES, verl_variables.RAY_HOOK_BEFORE):
        monkeypatch.delenv(variable, raising=False)
    return calls


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, 0),
        ({"ROLLCORR_VERL": ""}, 0),
        ({"ROLLCORR_VERL": "0", "VERL_USE_EXTERNAL_MODULES": NAME}, 0),
        ({"ROLLCORR_VERL": "1"}, 1),
        ({"ROLLCORR_VERL": "On"}, 1),
        ({"VERL_USE_EXTERNAL_MODULES": "other.module"}, 0),
        ({"VERL_USE_EXTERNAL_MODULES": f"other.module, {NAME}"}, 1),
    ],
)
def test_verl_is_switched_only_when_the_environment_asks(installs, monkeypatch, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    importlib.reload(verl_plugin)  # as verl imports it
    assert len(installs) == expected


@pytest.mark.parametrize("value", ["2", "install"])
def test_a_switch_that_is_neither_on_nor_off_ends_the_process(monkeypatch, value):
    monkeypatch.setenv("ROLLCORR_VERL", value)
    with pytest.raises(SystemExit, match=f"ROLLCORR_VERL must be 1 .*got '{value}'"):
        verl_plugin.start()


def test_a_verl_that_cannot_be_switched_ends_the_process_because_verl_hides_the_error(installs, monkeypatch):
    def refuse():
        raise ImportError("this verl is not one that install() knows")

    monkeypatch.setattr(verl, "install", refuse)
    monkeypatch.setenv("ROLLCORR_VERL", "1")
    with pytest.raises(SystemExit, match=r"not one that install\(\) knows"):
        verl_plugin.start()


def test_ray_workers_get_the_switch_beside_what_they_had(installs, monkeypatch):
    assert verl_plugin.with_plugin(None) == {"env_vars": {"ROLLCORR_VERL": "1", "VERL_USE_EXTERNAL_MODULES": NAME}}
    given = {"working_dir": None, "env_vars": {"NCCL_DEBUG": "WARN", "VERL_USE_EXTERNAL_MODULES": "own.engine"}}
    extended = verl_plugin.with_plugin(given)
    assert extended["working_dir"] is None
    assert extended["env_vars"] == {
        "NCCL_DEBUG": "WARN",
        "VERL_USE_EXTERNAL_MODULES": f"own.engine,{NAME}",
        "ROLLCORR_VERL": "1",
    }
    assert verl_plugin.with_plugin(extended) == extended
    assert len(given["env_vars"]) == 2

    # A module named only in the driver's environment reaches the workers, since our value would hide it.
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "own.engine")
    assert verl_plugin.with_plugin({})["env_vars"]["VERL_USE_EXTERNAL_MODULES"] == f"own.engine,{NAME}"


def test_a_hook_that_ray_had_before_is_called_first(installs, monkeypatch):
    monkeypatch.setenv(verl_variables.RAY_HOOK_BEFORE, "builtins.dict")
    assert set(verl_plugin.with_plugin({"pip": []})) == {"pip", "env_vars"}


def test_a_user_who_does_not_ask_imports_nothing_but_the_plugin():
    """The package declares the entry point, so every `import verl` imports it: no torch, and none of our adapters."""
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'[project.entry-points."verl.plugins"]\nrollcorr = "{NAME}"' in pyproject
    program = f"import json, sys, {NAME}; print(json.dumps(sorted(sys.modules)))"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ROLLCORR", "VERL"))}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    imported = {name for name in json.loads(done.stdout) if name.split(".")[0] in ("rollcorr", "torch", "numpy")}
    assert imported == {"rollcorr", "rollcorr.integrations", "rollcorr.integrations.verl_variables", NAME}


@pytest.mark.parametrize("first", ["rollcorr.integrations.verl", NAME])
def test_the_switch_acts_whatever_is_imported_first(tmp_path, first):
    """A worker that unpickles something of ours before verl is there ended: the plugin met a package half imported."""
    package = tmp_path / "verl" / "trainer" / "ppo"
    package.mkdir(parents=True)
    (tmp_path / "verl" / "trainer" / "__init__.py").touch()
    helper = "def apply_bypass_mode(batch, rollout_corr_config=None, policy_loss_config=None): ...\n"
    for path, text in {
        "../../__init__.py": f"import importlib\n\nimportlib.import_module({NAME!r})\n",
        "__init__.py": "",
        "rollout_corr_helper.py": helper,
        "core_algos.py": "POLICY_LOSS_REGISTRY = {}\n",
        "utils.py": "def need_critic(config): ...\n",
    }.items():
        (package / path).write_text(text, encoding="utf-8")
    program = (
        f"import {first}, verl; from verl.trainer.ppo.rollout_corr_helper import apply_bypass_mode; "
        "print(apply_bypass_mode.__module__)"
    )
    paths = os.pathsep.join([str(tmp_path), *(path for path in sys.path if path)])
    environment = {**os.environ, "ROLLCORR_VERL": "1", "PYTHONPATH": paths}
    done = run_python(program, env=environment)
    assert done.stdout.split() == ["rollcorr.integrations.verl.bypass"], done.stderr
    assert done.stderr.count("replaces in verl") == 1
