"""Every standalone script of examples/ runs quickly and prints its result."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import run_python

ROOT = Path(__file__).parents[1]

SHOWN = {
    "quickstart.py": [
        "tensor([[1.1052, 0.9048, 1.0000, 0.9048],",
        "[False, False, False, False]",
        "rollout_rs_masked_fraction     0.4286",
    ],
    "packed.py": ["tokens 16 instead of 32", "log_ppl_diff         packed -0.026919, padded -0.026919"],
    "rejection.py": [
        "sequences kept: [True, False, False, False]",
        "all reject 0.7500 of the tokens, more than one 0.3125",
        "token_k1     rejects 0.1250 of the tokens, 0.0000 alone",
        "seq_mean_k3  rejects 0.7500 of the tokens, 0.4375 alone",
        "veto         rejects 0.2500 of the sequences",
    ],
    "own_training_loop.py": ["step 40: reward 1.00", "within limits: 192 of 192 tokens kept"],
    "merge_micro_batches.py": ["rollout_is_max               whole 2.000000  merged 2.000000  averaged 1.506010"],
    "three_policies_loss.py": ["74% of the tokens kept, gradient norm 6.5556", "policy_kl -0.0200"],
    "replay_buffer.py": ["sequence weights: mean reward 0.063", "no weights: 0.025, exact 0.062", "staleness 3: 50%"],
    "behavior_cloning.py": ["difference from the gradient of cross-entropy: 0.0000", "policy [0.711, 0.186, 0.104]"],
    "filtered_data.py": ["exact 2.40", "with log μ: 4.05", "with log μ − log Z: 2.44", "10% never pass"],
    "write_and_check_a_log.py": [
        "not judged: ",
        "64 sequences in",
        "exit code 3",
        "KL is too far from 0",
        "exit code 1",
    ],
    "diffusion_batch.py": ["bypass: 6 of 16 steps kept", "exact_kl_mean   0.495", "effective sample size 0.558"],
    "convert_old_config.py": [
        "seq_is_rs.yaml: schema 2025-11",
        "rollout_rs: 'sequence' → rollout_rs: seq_sum_k1",
        "rejection only: token_k1 2.0, weights in the loss: False",
    ],
}
NEEDS_PYARROW = {"write_and_check_a_log.py"}


def run(script, *arguments):
    result = run_python(ROOT / "examples" / script, *arguments, strict=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("script", SHOWN)
def test_an_example_prints_what_it_is_there_to_show(script, tmp_path):
    if script in NEEDS_PYARROW:
        pytest.importorskip("pyarrow", reason="needs rollcorr[log]")
    output = run(script, tmp_path)
    for line in SHOWN[script]:
        assert line in output


def test_bypass_over_micro_batches_gives_the_gradient_of_one_batch():
    output = run("three_policies_loss.py")
    decoupled, bypass = (line.split()[-1] for line in output.splitlines() if line.startswith("  loss"))
    assert decoupled == bypass
    split, whole = (line.split()[-1] for line in output.splitlines()[-2:])
    assert split == whole


def test_every_example_is_run():
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(SHOWN)


def test_fsdp2_loop_has_the_gradient_of_one_process():
    """The script asserts 1e-6; two gloo ranks have 6 and 10 rows."""
    script = str(ROOT / "examples" / "scale" / "fsdp2_loop.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(launch, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
    assert "2 ranks, rejected 0.5923 of the tokens (one process 0.5923)" in result.stdout
