"""verl's own tests for rollout correction, run on this library.

ROLLCORR_VERL_TESTS names the tests directory of one or more verl checkouts (separated as in PATH), for instance
/src/verl/tests. The generation is read from the test files. Needs an installed verl for its DataProto and ActorConfig.
"""

import importlib.util
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

CHECKOUTS = [Path(path) for path in os.environ.get("ROLLCORR_VERL_TESTS", "").split(os.pathsep) if path]
FILES = [f"test_rollout_{subject}{kind}.py" for subject in ("corr", "is") for kind in ("", "_integration")]
FILES.append("test_loss_aggregation_on_cpu.py")

pytestmark = [
    pytest.mark.filterwarnings("default"),  # the count of each file is reported as a warning
    pytest.mark.skipif(
        not CHECKOUTS or importlib.util.find_spec("verl") is None,
        reason="this needs verl and its tests: `make test-verl VERL_TESTS=/path/to/verl/tests`",
    ),
]


def generation(source):
    if "mismatch_helper" in source:
        return "2025-10"
    return "newest" if re.search(r"token_k[123]|token-sum", source) else "2025-11"


def found_tests():
    files = [path / "trainer" / "ppo" / name for path in CHECKOUTS for name in FILES]
    return [path for path in files if path.exists()] or [Path("none")]


@pytest.mark.parametrize("path", found_tests(), ids=str)
def test_verls_own_tests_pass_on_this_library(path):
    assert path.exists(), f"no rollout-correction tests under {', '.join(map(str, CHECKOUTS))}"
    here = Path(__file__).parent
    environment = os.environ | {
        "ROLLCORR_VERL_GENERATION": generation(path.read_text(encoding="utf-8")),
        "PYTHONPATH": os.pathsep.join([str(here), os.environ["PYTHONPATH"]]),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "verl_shim", "-p", "no:cacheprovider", "-W", "ignore"]
    command += [f"--rootdir={path.parent}", str(path)]
    done = subprocess.run(command, env=environment, cwd=path.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = re.search(r"\d+ passed.*", done.stdout)
    assert summary, done.stdout
    warnings.warn(f"{path}: {summary[0]}", stacklevel=1)
