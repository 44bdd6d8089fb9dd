"""Time the correction against verl 0.9.1 and a copy of the same bytes, interleaved in one process.

    python benchmarks/correction.py                     # 1,024 × 8,192 tokens on the CPU
    python benchmarks/correction.py --rows 128 --dense  # 1 M tokens, all of them valid
    python benchmarks/correction.py --device cuda --rows 4096
    python benchmarks/correction.py --save              # also writes benchmarks/results/

verl is installed from its wheel, without what it does not need here, into benchmarks/.venv/verl, which borrows this
environment's torch; the timing itself runs there. Ratios are of minima: what each takes when nobody disturbs it. "The
copy" moves 14 bytes a token, 7 in and 7 out, between buffers that exist already: what weights and a mask cost at least.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from peers import provenance, run_beside

if TYPE_CHECKING:
    import torch

HERE = Path(__file__).parent
PEER_REQUIREMENTS = ["verl==0.9.1", "tensordict==0.10.0"]
PEER_PLAIN = ["codetiming", "hydra-core", "ray", "pandas", "cloudpickle", "orjson", "importlib_metadata", "pyvers"]
VERL, COPY = "verl 0.9.1", "copy of 14 bytes a token"


def main() -> None:
    """Run the timing in an environment that holds verl."""
    arguments = parse()
    run_beside(__file__, "verl", PEER_REQUIREMENTS, PEER_PLAIN)
    report(arguments)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024, help="sequences, B (default 1024)")
    parser.add_argument("--length", type=int, default=8192, help="padded length, T (default 8192)")
    parser.add_argument("--dense", action="store_true", help="every token valid (default: lengths of T / 8 to T)")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds (default 5)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads (default: all cores)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--save", action="store_true", help="write the result to benchmarks/results/")
    return parser.parse_args()


def report(arguments: argparse.Namespace) -> None:
    """Time each contender in turn, short ones ten times a round, and print minima and medians."""
    import torch

    torch.set_num_threads(arguments.threads)
    contenders = build(arguments)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(arguments.repeats + 1):  # the first round warms up
        for name, run in contenders.items():
            for _ in range(10 if times[name] and times[name][-1] < 0.1 else 1):
                start = time.perf_counter()
                run()
                if arguments.device != "cpu":
                    torch.cuda.synchronize()
                times[name].append(time.perf_counter() - start)
            if round_number == 0:
                times[name] = times[name][-1:]
    tokens = arguments.rows * arguments.length
    least = {name: min(values) for name, values in times.items()}
    print(f"{tokens:,} tokens, {arguments.device}, {arguments.threads} threads, torch {torch.__version__}")
    print(f"{'ms':44s} {'min':>9s} {'median':>9s} {'× verl':>9s} {'× copy':>7s}")
    for name, values in times.items():
        line = f"{name:44s} {least[name] * 1e3:9.2f} {statistics.median(values) * 1e3:9.2f}"
        print(f"{line} {least[VERL] / least[name]:9.1f} {least[name] / least[COPY]:7.2f}")
    if arguments.save:
        save(arguments, times)


def make_batch(arguments: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs of well-matched policies, and a mask of responses of different length."""
    import torch

    generator = torch.Generator().manual_seed(0)
    shape = (arguments.rows, arguments.length)
    rollout = -2 * torch.rand(shape, generator=generator)
    train = rollout + 0.02 * torch.randn(shape, generator=generator)
    shortest = arguments.length if arguments.dense else arguments.length // 8
    lengths = torch.randint(shortest, arguments.length + 1, shape[:1], generator=generator)
    mask = torch.arange(arguments.length) < lengths[:, None]
    train, rollout, mask = (tensor.to(arguments.device) for tensor in (train, rollout, mask))
    return train, rollout, mask


def build(arguments: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """The contenders: token weights, one sequence criterion; every metric on the host unless it says otherwise."""
    import torch

    warnings.simplefilter("ignore")
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask as verl_helper

    from rollcorr import RolloutCorrectionConfig, correct
    from rollcorr.core.layout import pack
    from rollcorr.core.metrics import CRITERIA

    batch = train, rollout, mask = make_batch(arguments)
    fields = {"rollout_is": "token", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
    config = RolloutCorrectionConfig(**fields)
    thresholds = ",".join("0.5_2.0" if name.endswith("k1") else "1.0" for name in CRITERIA)
    every = RolloutCorrectionConfig(rollout_is="token", rollout_rs=",".join(CRITERIA), rollout_rs_threshold=thresholds)
    out = torch.ones_like(train), torch.ones_like(mask)
    whole = torch.ones_like(mask[:, : max(1, arguments.length * 9 // 16)])
    (packed, cu), (packed_rollout, _) = (
        pack(train[:, : whole.shape[1]], whole),
        pack(rollout[:, : whole.shape[1]], whole),
    )
    packed_batch = packed, packed_rollout, torch.ones_like(packed, dtype=torch.bool)
    packed_out = torch.ones_like(packed), torch.ones_like(packed, dtype=torch.bool)
    source = torch.ones(7 * train.numel(), dtype=torch.uint8, device=arguments.device)
    target = torch.ones_like(source)
    return {
        VERL: lambda: verl_helper(*batch, rollout_is_threshold=2.0, **fields),
        "rollcorr, out= reused, metrics not read": lambda: correct(*batch, config, out=out),
        "rollcorr, out= reused": lambda: correct(*batch, config, out=out).metrics(),
        "rollcorr, fresh outputs": lambda: correct(*batch, config).metrics(),
        "rollcorr, all eleven criteria, out= reused": lambda: correct(*batch, every, out=out).metrics(),
        "rollcorr, packed (9/16 of the tokens), out=": lambda: correct(
            *packed_batch, config, cu_seqlens=cu, out=packed_out
        ).metrics(),
        "rollcorr, metrics only": lambda: correct(*batch, "disabled").metrics(),
        "rollcorr, quantiles and the worst too, out=": lambda: correct(*batch, config, out=out, detail=True).metrics(),
        "rollcorr, torch alone (impl='blocked')": lambda: correct(*batch, config, impl="blocked").metrics(),
        COPY: lambda: target.copy_(source),
    }


def save(arguments: argparse.Namespace, times: dict[str, list[float]]) -> None:
    """Write the figures with what is needed to repeat them."""
    result = provenance(__file__, arguments.device, arguments.threads) | {
        "tokens": arguments.rows * arguments.length,
        "seconds": times,
    }
    batch = f"{arguments.rows}x{arguments.length}{'_dense' * arguments.dense}"
    path = HERE / "results" / f"correction_{arguments.device}_{batch}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print("wrote", path.relative_to(HERE.parent))


if __name__ == "__main__":
    main()
