"""Grade other frameworks' corrections (peers.py), and write results.json, from which the page is made.

    make conformance                 frameworks of the index, installed into build/conformance without dependencies
    make conformance SOURCES=DIR     and the checkouts in DIR: slime, ROLL, prime-rl, RL (NeMo-RL), unsloth-zoo

Frameworks that are not graded now keep their last entry. Before a function is graded, its call must return the numbers
of an example: the framework's own test where it has one that calls the function.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import peers
import torch

from rollcorr.conformance import grade_function

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results.json")


class Peer(NamedTuple):
    """A framework.

    Attributes:
        framework: its name, as the page has it.
        make: returns its correction, for the folder that holds its package.
        source: requirement of pip, or the folder of a checkout.
        web: address of its repository, with {version} where the link needs it.
        file: the file that has the function.
        function: the definition that the page links to.
        how: how it is called.
        example: (log π, log μ, options, output, expected) of one row.
        origin: where the example is from.
    """

    framework: str
    make: Callable[[Path], Callable[..., dict[str, Any]]]
    source: str
    web: str
    file: str
    function: str
    how: str
    example: tuple[list[float], list[float], dict[str, Any], str, list[float]] = (
        [-1.0, -1.5, -0.5],
        [-1.5, -1.0, -1.5],
        {"ceiling": 2.0},
        "weights",
        [math.exp(0.5), math.exp(-0.5), 2.0],
    )
    origin: str = "by hand"


AS_IT_IS = "Called as it is."
GRADIENT = "A loss: token weights are its negative, scaled gradients at π_θ = π_old, advantage 1."
PEERS = (
    Peer(
        "verl",
        peers.verl,
        "verl==0.9.1",
        "https://github.com/verl-project/verl/blob/v{version}",
        "verl/trainer/ppo/rollout_corr_helper.py",
        "compute_rollout_correction_and_rejection_mask",
        "Called as it is; a dictionary replaces `DataProto`, the container of the weights.",
        ([-2.0, -2.0], [-1.0, -2.5], {"token_band": (0.5, 2.0)}, "weights", [math.exp(-1.0), math.exp(0.5)]),
        "`test_mask_mode` of tests/trainer/ppo/test_rollout_corr.py",
    ),
    Peer(
        "TRL",
        peers.trl,
        "trl==1.16.0",
        "https://github.com/huggingface/trl/blob/v{version}",
        "trl/trainer/grpo_trainer.py",
        "_generate_and_score_completions",
        "The block of the method that computes `vllm_importance_sampling_ratio`, with the tensors as local names. "
        "TRL's logged statistics are elsewhere in the method, and not graded.",
    ),
    Peer(
        "OpenRLHF",
        peers.openrlhf,
        "openrlhf==0.11.2",
        "https://github.com/OpenRLHF/OpenRLHF/blob/v{version}",
        "openrlhf/models/loss.py",
        "PolicyLoss",
        GRADIENT,
    ),
    Peer(
        "ms-swift",
        peers.ms_swift,
        "ms-swift==4.6.0",
        "https://github.com/modelscope/ms-swift/blob/v{version}",
        "swift/rlhf_trainers/grpo_trainer.py",
        "_apply_rollout_importance_sampling",
        "Methods of `GRPOTrainer`, bound to an object that has their three options.",
        (
            [-2.0] * 4,
            [-2.0 - math.log(x) for x in (0.5, 1.5, 3.0, 5.0)],
            {"ceiling": 2.0},
            "weights",
            [0.5, 1.5, 2.0, 2.0],
        ),
        "`test_token_truncate_basic` of tests/train/test_vllm_importance_sampling_basic.py, which calls a copy",
    ),
    Peer(
        "SkyRL",
        peers.skyrl,
        "skyrl==0.3.0",
        "https://github.com/NovaSky-AI/SkyRL/blob/v{version}",
        "skyrl/backends/skyrl_train/utils/off_policy_correction_utils.py",
        "compute_off_policy_correction",
        AS_IT_IS,
        origin="`test_compute_tis_ratio_token_level` of tests/train/algorithms/test_off_policy_correction.py",
    ),
    Peer(
        "AReaL",
        peers.areal,
        "areal==1.0.4",
        "https://github.com/inclusionAI/AReaL/blob/v{version}",
        "areal/utils/functional/functional.py",
        "apply_rejection_sampling",
        AS_IT_IS,
        ([0.0, -1.0, 0.0], [0.0, 0.0, 0.0], {"token_band": (0.5, 2.0)}, "loss_mask", [1.0, 0.0, 1.0]),
        "`test_ratio_lower_bound_filters_low_ratio` of tests/test_rejection_sampling.py",
    ),
    Peer(
        "slime",
        peers.slime,
        "slime",
        "https://github.com/THUDM/slime/blob/{version}",
        "slime/backends/megatron_utils/loss.py",
        "vanilla_tis_function",
        "Called with a loss of 1 per token; `icepop_function` for a band.",
    ),
    Peer(
        "slime mis.py",
        peers.slime_mis,
        "slime",
        "https://github.com/THUDM/slime/blob/{version}",
        "examples/train_infer_mismatch_helper/mis.py",
        "compute_mis_weights",
        AS_IT_IS,
    ),
    Peer(
        "ROLL",
        peers.roll,
        "ROLL",
        "https://github.com/alibaba/ROLL/blob/{version}",
        "roll/utils/train_infer_corrections.py",
        "compute_train_infer_correction",
        AS_IT_IS,
    ),
    Peer(
        "prime-rl",
        peers.prime_rl,
        "prime-rl",
        "https://github.com/PrimeIntellect-ai/prime-rl/blob/{version}",
        "src/prime_rl/trainer/rl/loss.py",
        "default_loss_fn",
        f"{GRADIENT} Its thresholds are infinite and its KL term is 0.",
        ([-1.0, -1.5, -0.5], [-1.5, -1.0, -1.5], {}, "weights", [math.exp(0.5), math.exp(-0.5), math.e]),
    ),
    Peer(
        "NeMo-RL",
        peers.nemo_rl,
        "RL",
        "https://github.com/NVIDIA-NeMo/RL/blob/{version}",
        "nemo_rl/algorithms/loss/loss_functions.py",
        "ClippedPGLossFn",
        f"{GRADIENT} Its base class becomes `object`.",
        ([-1.0] * 3, [-0.5, -3.5, -0.8], {"token_band": (0.5, 5.0)}, "weights", [math.exp(-0.5), 0.0, math.exp(-0.2)]),
        "`test_clipped_pg_loss_icepop_importance_sampling` of tests/unit/algorithms/test_loss_functions.py",
    ),
    Peer(
        "Unsloth",
        peers.unsloth,
        "unsloth-zoo",
        "https://github.com/unslothai/unsloth-zoo/blob/{version}",
        "unsloth_zoo/rl_replacements.py",
        "grpo_compute_loss",
        f"{GRADIENT} Called with `use_vllm` and `loss_type` bnpo, not compiled.",
    ),
)


def install(requirement: str) -> Path:
    """Install a package without its dependencies, once, and return the folder that holds it."""
    folder = ROOT / "build" / "conformance" / requirement
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), requirement]
        subprocess.run(command, check=True)
    return folder


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout, twelve characters."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def line_of(file: Path, name: str) -> int:
    """Return the line of a definition."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return next(node.lineno for node in nodes if getattr(node, "name", "") == name)


def check_example(peer: Peer, function: Callable[..., dict[str, Any]]) -> None:
    """Compare one call with the example.

    Raises:
        ValueError: the numbers differ, so the call is wrong and nothing can be graded.
    """
    train, rollout, options, name, expected = peer.example
    tensors = [torch.tensor([row]) for row in (train, rollout)]
    found = function(*tensors, torch.ones(1, len(train), dtype=torch.bool), **options)[name].double()[0].tolist()
    if not all(math.isclose(x, y, rel_tol=1e-5) for x, y in zip(found, expected, strict=True)):
        raise ValueError(f"{peer.framework}: the call returned {found}, and the example has {expected}")


def grade(peer: Peer, root: Path, version: str) -> dict[str, Any]:
    """Return the entry of results.json."""
    function = peer.make(root)
    check_example(peer, function)
    grades = [{"verdict": x.verdict, "reason": x.reason, "text": str(x)} for x in grade_function(function)]
    file = root / peer.file
    counts = {verdict: sum(x["verdict"] == verdict for x in grades) for verdict in ("pass", "fail", "not applicable")}
    print(f"{peer.framework} {version}: {', '.join(f'{n} {verdict}' for verdict, n in counts.items())}")
    return {
        "framework": peer.framework,
        "version": version,
        "function": peer.function,
        "link": f"{peer.web.format(version=version)}/{peer.file}#L{line_of(file, peer.function)}",
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "how": peer.how,
        "origin": peer.origin,
        "call": inspect.getsource(function),
        "grades": grades,
    }


def main() -> int:
    """Grade what can be had, and print one line each; exit 1 if a framework could not be graded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="?", type=Path, help="folder with checkouts")
    sources = parser.parse_args().sources
    entries = {entry["framework"]: entry for entry in json.loads(RESULTS.read_text(encoding="utf-8"))}

    code = 0
    for peer in PEERS:
        of_index = "==" in peer.source
        checkout = sources / peer.source if sources else None
        if not of_index and (checkout is None or not checkout.is_dir()):
            print(f"{peer.framework}: not graded now, give SOURCES with a checkout in {peer.source}/")
            continue
        try:
            root = install(peer.source) if of_index else checkout
            version = peer.source.partition("==")[2] if of_index else commit_of(root)
            entries[peer.framework] = grade(peer, root, version)
        except (ImportError, OSError, ValueError, subprocess.CalledProcessError) as error:
            print(f"{peer.framework}: could not be graded: {error}")
            code = 1

    order = [peer.framework for peer in PEERS if peer.framework in entries]
    text = json.dumps([entries[name] for name in order], ensure_ascii=False, indent=1)
    RESULTS.write_text(text + "\n", encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
