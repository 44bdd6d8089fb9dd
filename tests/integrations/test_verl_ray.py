"""verl's entry point in processes that Ray starts. Runs with `make test-verl`.

Each way to switch starts a Ray cluster of one processor; its worker looks up the same names as verl's actors.
"""

import json
import subprocess
import sys

import pytest
from processes import environment_of_package

REASON = "verl or Ray is not installed: `make test-verl` installs them; test_verl_plugin.py tests the parts without"
pytest.importorskip("verl", reason=REASON, exc_type=ImportError)
pytest.importorskip("ray", reason=REASON, exc_type=ImportError)

PROGRAM = """
import json, sys, ray
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from rollcorr.integrations.verl import install

if sys.argv[1] == "install":
    install()
ray.init(num_cpus=1, include_dashboard=False, runtime_env=get_ppo_ray_runtime_env())

@ray.remote
class Actor:
    def functions(self):
        from verl.trainer.ppo import core_algos, rollout_corr_helper, utils

        found = [core_algos.get_policy_loss_fn(name) for name in ("vanilla", "bypass_mode", "gspo")]
        found += [rollout_corr_helper.compute_rollout_correction_and_add_to_batch, core_algos.agg_loss]
        wired = hasattr(utils.need_critic, "wires_bypass_mode")
        return [function.__module__ for function in found] + [wired]

# verl's worker groups give each worker variables of its own.
actor = Actor.options(runtime_env={"env_vars": {"WORLD_SIZE": "1"}}).remote()
print("FOUND", json.dumps(ray.get(actor.functions.remote())))
"""
LOSSES, CORRECTION = "rollcorr.integrations.verl.losses", "rollcorr.integrations.verl.correction"
CORE = "verl.trainer.ppo"
OURS = [LOSSES, LOSSES, f"{CORE}.core_algos", CORRECTION, LOSSES, True]
VERLS = [f"{CORE}.core_algos"] * 3 + [f"{CORE}.rollout_corr_helper", f"{CORE}.core_algos", False]


@pytest.mark.parametrize(
    ("call", "variables", "expected"),
    [("nothing", {}, VERLS), ("nothing", {"ROLLCORR_VERL": "1"}, OURS), ("install", {}, OURS)],
    ids=["not asked for", "by the environment", "by install"],
)
def test_a_ray_worker_resolves_to_our_functions_when_asked(call, variables, expected, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    environment = environment_of_package()
    environment = {name: value for name, value in environment.items() if not name.startswith(("ROLLCORR_V", "VERL_"))}
    command = [sys.executable, str(program), call]
    done = subprocess.run(command, env=environment | variables, capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert found, done.stdout + done.stderr
    assert json.loads(found[0].removeprefix("FOUND ")) == expected
    assert ("rollcorr" in done.stderr and "replaces in verl" in done.stderr) == (expected is OURS)
