"""verl's own tests on this library, and on plain verl for comparison.

ROLLCORR_VERL_TESTS names the tests directory of one or more verl checkouts (separated as in PATH), for instance
/src/verl/tests. The generation is read from the test files. Needs an installed verl for its DataProto and ActorConfig.

Last run on 24 November 2026, all passed. Alone, patched and switched: verl-omni a1139ba with verl 0.9.1, 21 tests; verl
1dda039b9 (August 2026), 306 tests. Patched: verl 4424616d7 (October 2025) and 418f964ab (November 2025), 11 tests each.
"""

import importlib.util
import os
import re
import subprocess
import sys
import warnings
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import pytest

CHECKOUTS = [Path(path) for path in os.environ.get("ROLLCORR_VERL_TESTS", "").split(os.pathsep) if path]
OMNI = "trainer/diffusion/test_rollout_correction_on_cpu.py"
FILES = [f"test_rollout_{subject}{kind}.py" for subject in ("corr", "is") for kind in ("", "_integration")]

pytestmark = [
    pytest.mark.filterwarnings("default"),  # the counts are reported as a warning
    pytest.mark.skipif(
        not CHECKOUTS or importlib.util.find_spec("verl") is None,
        reason="this needs verl and its tests: `make test-frameworks SOURCES=DIR`, where DIR holds a checkout of verl",
    ),
]


def generation(checkout):
    if (checkout / OMNI).exists():
        return "verl-omni"
    sources = [path.read_text(encoding="utf-8") for name in FILES if (path := checkout / "trainer/ppo" / name).exists()]
    if any("mismatch_helper" in source for source in sources):
        return "2025-10"
    return "newest" if any(re.search(r"token_k[123]", source) for source in sources) else "2025-11"


def found_tests(checkout):
    """The newest generation's PPO tests, all of them; of an older one, those that do not need its verl.

    Of verl-omni, the tests of its rollout correction, the only ones that run without its engine, vLLM-Omni.
    """
    if generation(checkout) == "verl-omni":
        return [checkout / OMNI]
    if generation(checkout) == "newest":
        return [checkout / "trainer"]
    return [path for name in FILES if (path := checkout / "trainer/ppo" / name).exists()]


def outcomes(checkout, folder, *plugins, **variables):
    """Test → "passed", "failed", "skipped" or "error", of one run in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "ROLLCORR_VERL"} | variables
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])
    report = folder / f"{'-'.join(plugins) or 'unpatched'}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", f"--junitxml={report}"]
    is_omni = generation(checkout) == "verl-omni"
    plugins = ("verl_omni_shim" if is_omni else "verl_cluster", *plugins)
    command += [f"--rootdir={checkout}", *(f"-p{plugin}" for plugin in plugins), *map(str, found_tests(checkout))]
    folder = checkout.parent if is_omni else checkout  # verl-omni's tests read its configuration from there
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert report.exists(), done.stdout + done.stderr
    found = {}
    for case in ET.parse(report).iter("testcase"):
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        found[f"{case.get('classname')}::{case.get('name')}"] = "+".join(sorted(kinds)) or "passed"
    return found, done.stdout


@pytest.mark.parametrize("checkout", CHECKOUTS or [Path("none")], ids=str)
def test_verls_own_tests_end_on_this_library_as_they_end_on_verl_alone(checkout, tmp_path):
    kind = generation(checkout)
    variables = {"ROLLCORR_VERL_GENERATION": "newest" if kind == "verl-omni" else kind, "ROLLCORR_OMNI": str(checkout)}
    ours, output = outcomes(checkout, tmp_path, "verl_shim", **variables)
    assert Counter(ours.values())["passed"] > 10, output
    if kind in ("newest", "verl-omni"):
        theirs, _ = outcomes(checkout, tmp_path, **variables)
        different = {test: (theirs.get(test), ours.get(test)) for test in theirs | ours}
        different = {test: pair for test, pair in different.items() if pair[0] != pair[1]}
        assert not different, f"(alone, patched): {different}\n{output}"
        switched, _ = outcomes(checkout, tmp_path, **variables, ROLLCORR_VERL="1")
        assert switched == theirs
    else:  # the installed verl no longer has that generation, so all must pass
        assert set(ours.values()) == {"passed"}, output
        theirs = {}
    warnings.warn(
        f"{checkout}, {kind}: patched {dict(Counter(ours.values()))}, alone {dict(Counter(theirs.values()))}",
        stacklevel=1,
    )
