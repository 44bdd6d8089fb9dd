"""Two updates of a small pretrained policy in verl's own engine. Runs with `make test-verl`.

verl has no platform, engine or server for a CPU: verl_cpu_platform.py registers a platform, a bfloat16 copy of the
policy samples in the place of a server, and verl's FSDP engine, losses and functions do the rest.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REASON = "verl with its engines is not installed: `make test-verl` installs it; verl's registry alone needs none"
pytest.importorskip("verl.workers.engine_workers", reason=REASON, exc_type=ImportError)

HERE = Path(__file__).parent
PLATFORM = HERE.parents[1] / "examples" / "scale"  # the folder of verl_cpu_platform.py
VARIABLES = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
VARIABLES |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # read, and not used: the processes meet in a file
VARIABLES |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}
VARIABLES |= {"VERL_USE_EXTERNAL_MODULES": "verl_cpu_platform,rollcorr.integrations.verl_plugin"}


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    environment = os.environ | VARIABLES
    environment["PYTHONPATH"] = os.pathsep.join([str(PLATFORM), os.environ["PYTHONPATH"]])
    command = [sys.executable, str(HERE / "verl_cpu_step.py"), str(HERE.parent / "data" / "stories260K")]
    command.append(str(tmp_path_factory.mktemp("rendezvous")))
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("STEPS ")]
    assert found, done.stdout + done.stderr
    return json.loads(found[0].removeprefix("STEPS "))


@pytest.mark.parametrize("mode", ["decoupled", "bypass"])
def test_an_update_in_verls_engine_has_the_loss_that_the_correction_defines(steps, mode):
    step = steps[mode]
    assert 0 < step["kept"] < step["tokens"] == 45
    assert step["loss"] == pytest.approx(step["expected"], rel=1e-5)
    assert step["grad_norm"] > 0
    assert step["moved"] > 1e-4  # Adam's first steps are as large as its learning rate, 1e-3


def test_the_functions_of_that_update_are_ours(steps):
    assert {name.split(".")[0] for name in steps["functions"]} == {"rollcorr"}
