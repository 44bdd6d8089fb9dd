"""Time the correction against verl 0.9.1 and a copy of the same bytes, interleaved in one process.

    python benchmarks/correction.py                       # 1 M and 8 M tokens on the CPU, padded and packed
    python benchmarks/correction.py --rows 128 --repeats 30
    python benchmarks/correction.py --device cuda --rows 512 4096
    python benchmarks/correction.py --save                # also writes benchmarks/results/

verl is installed from its wheel, without what it does not need here, into benchmarks/.venv/verl, which borrows this
environment's torch; the timing itself runs there. Every round runs every contender on every batch once (short ones ten
times), and ratios are of minima: what each takes when nobody disturbs it. "The copy" moves 14 bytes a token, 7 in and 7
out, between buffers that exist already: what weights and a mask cost at least.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from peers import HERE, Run, interleaved, provenance, run_beside, summary

if TYPE_CHECKING:
    import torch

    from rollcorr import RolloutCorrectionConfig

PEER_REQUIREMENTS = ["verl==0.9.1", "tensordict==0.10.0"]
PEER_PLAIN = ["codetiming", "hydra-core", "ray", "pandas", "cloudpickle", "orjson", "importlib_metadata", "pyvers"]
VERL, COPY = "verl 0.9.1", "copy"
LENGTH = 8192

Contenders = dict[str, Callable[[], object]]


def main() -> None:
    """Run the timing in an environment that holds verl."""
    arguments = parse()
    run_beside(__file__, "verl", PEER_REQUIREMENTS, PEER_PLAIN)
    report(arguments)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 1024], help="sequences (default 128 1024)")
    parser.add_argument("--repeats", type=int, default=8, help="timed rounds (default 8)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads (default: all cores)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--save", action="store_true", help="write the result to benchmarks/results/")
    return parser.parse_args()


def report(arguments: argparse.Namespace) -> None:
    """Count, then time, and print both."""
    import torch

    here = provenance(__file__, arguments.device, arguments.threads) | {"load": round(os.getloadavg()[0], 1)}
    counts = count(arguments)
    print(f"{'asked of torch, on one thread':44s} {'operations':>10s} {'waits':>6s} {'bytes a token':>14s}")
    for name, row in counts.items():
        print(f"{name:44s} {row['operations']:10d} {row['waits']:6d} {row['bytes_per_token']:14.0f}")
    torch.set_num_threads(arguments.threads)
    batches = {
        f"{rows * LENGTH:,} tokens, {layout}": contenders(arguments, rows, layout)
        for rows in arguments.rows
        for layout in ("padded", "dense", "packed")
    }
    flat = {(title, name): run for title, of in batches.items() for name, run in of.items()}
    synchronize = torch.cuda.synchronize if arguments.device != "cpu" else None
    runs = interleaved(flat, arguments.repeats, synchronize=synchronize)
    times = {title: {name: runs[title, name] for name in of} for title, of in batches.items()}
    for title, of in times.items():
        least = {name: min(run.wall for run in runs) for name, runs in of.items()}
        print(f"\n{title}, {arguments.device}, {arguments.threads} threads, torch {torch.__version__}")
        print(f"{'ms':44s} {'min':>9s} {'median':>9s} {'CPU':>9s} {'× verl':>9s} {'× copy':>7s}")
        for name, runs in of.items():
            median, busy = statistics.median(run.wall for run in runs), min(run.cpu for run in runs)
            line = f"{name:44s} {least[name] * 1e3:9.2f} {median * 1e3:9.2f} {busy * 1e3:9.2f}"
            print(f"{line} {least[VERL] / least[name]:9.1f} {least[name] / least[COPY]:7.2f}")
    if arguments.save:
        save(arguments.device, here, times, counts)


class Case(NamedTuple):
    """One batch: what verl gets, what rollcorr gets, and buffers for its outputs."""

    padded: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    own: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    cu_seqlens: torch.Tensor | None
    out: tuple[torch.Tensor, torch.Tensor]


def case(rows: int, length: int, layout: str, device: str) -> Case:
    """Log-probs of well-matched policies: responses of T/8 to T tokens, padded or packed, or all of T ("dense").

    verl takes padded tensors, so it gets those also where rollcorr takes the same tokens packed.
    """
    import torch

    from rollcorr.core.layout import pack

    generator = torch.Generator().manual_seed(0)
    rollout = -2 * torch.rand((rows, length), generator=generator)
    train = rollout + 0.02 * torch.randn((rows, length), generator=generator)
    lengths = torch.randint(length // 8, length + 1, (rows,), generator=generator)
    mask = torch.arange(length) < (torch.full_like(lengths, length) if layout == "dense" else lengths)[:, None]
    padded = train.to(device), rollout.to(device), mask.to(device)
    own, cu_seqlens = padded, None
    if layout == "packed":
        (packed, cu_seqlens), (packed_rollout, _) = pack(train, mask), pack(rollout, mask)
        own = packed.to(device), packed_rollout.to(device), torch.ones_like(packed, dtype=torch.bool, device=device)
        cu_seqlens = cu_seqlens.to(device)
    return Case(padded, own, cu_seqlens, (torch.ones_like(own[0]), torch.ones_like(own[2])))


def contenders(arguments: argparse.Namespace, rows: int, layout: str, length: int = LENGTH) -> Contenders:
    """Token weights and one sequence criterion, every metric on the host, unless a name says otherwise."""
    import torch

    warnings.simplefilter("ignore")
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask as verl_helper

    from rollcorr import RolloutCorrectionConfig, correct
    from rollcorr.core.metric_registry import CRITERIA

    batch = case(rows, length, layout, arguments.device)
    fields = {"rollout_is": "token", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
    config = RolloutCorrectionConfig(**fields)
    thresholds = ",".join("0.5_2.0" if name.endswith("k1") else "1.0" for name in CRITERIA)
    every = RolloutCorrectionConfig(rollout_is="token", rollout_rs=",".join(CRITERIA), rollout_rs_threshold=thresholds)
    out, tokens = batch.out, batch.own[0].numel()
    source = torch.ones(7 * tokens, dtype=torch.uint8, device=arguments.device)
    target = torch.ones_like(source)

    def corrected(config: object, **options: object) -> object:
        return correct(*batch.own, config, cu_seqlens=batch.cu_seqlens, **options)

    fast = "triton" if arguments.device == "cuda" else "cpu"
    return {
        VERL: lambda: verl_helper(*batch.padded, rollout_is_threshold=2.0, **fields),
        COPY: lambda: target.copy_(source),
        f"{fast}, out=, metrics not read": lambda: corrected(config, out=out, impl=fast),
        f"{fast}, out=": lambda: corrected(config, out=out, impl=fast).metrics(),
        f"{fast}, fresh outputs": lambda: corrected(config, impl=fast).metrics(),
        f"{fast}, metrics only": lambda: corrected("disabled", impl=fast).metrics(),
        f"{fast}, eleven criteria, out=": lambda: corrected(every, out=out, impl=fast).metrics(),
        f"{fast}, histograms and the worst, out=": lambda: corrected(config, out=out, impl=fast, detail=True).metrics(),
        "torch, out=": lambda: corrected(config, out=out, impl="torch").metrics(),
        "torch, fresh outputs": lambda: corrected(config, impl="torch").metrics(),
        "torch, eleven criteria, out=": lambda: corrected(every, out=out, impl="torch").metrics(),
        "torch.compile, fresh outputs": compiled(batch, config),
    }


def compiled(batch: Case, config: RolloutCorrectionConfig) -> Callable[[], object]:
    """The torch path as one graph of torch.compile, every metric on the host. On the CPU it needs a C++ compiler."""
    import torch

    from rollcorr import correct
    from rollcorr.core.mergeable_statistics import Statistics

    def corrected(*tensors: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        correction = correct(*tensors, config, cu_seqlens=batch.cu_seqlens, impl="torch")
        return correction.weights, correction.loss_mask, correction.statistics.pack()

    few = None if batch.cu_seqlens is None else batch.cu_seqlens[:1]
    names = correct(*(x[:0] for x in batch.own), config, cu_seqlens=few, impl="torch").statistics.names
    run = torch.compile(corrected, fullgraph=True, dynamic=False)
    return lambda: Statistics.from_vector(names, run(*batch.own)[2]).metrics()


def count(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """What each asks of torch for 64 sequences of 2,048 tokens."""
    import torch
    from counting import Counts

    torch.set_num_threads(1)
    rows, length = 64, 2048
    found = {}
    for name, run in contenders(arguments, rows, "dense", length).items():
        if name.startswith("torch.compile"):
            continue  # torch sees one graph there, and no operations
        run()
        with Counts() as counts:
            run()
        moved = counts.bytes_moved / (rows * length)
        found[name] = {"operations": counts.operations, "waits": counts.waits, "bytes_per_token": moved}
    return found


def save(
    device: str, here: dict[str, object], times: dict[str, dict[str, list[Run]]], counts: dict[str, dict[str, float]]
) -> None:
    """Write the figures with what is needed to repeat them. docs/background/performance.md is made from them."""
    result = here | {
        "counts": counts,
        "seconds": {title: {name: summary(runs) for name, runs in of.items()} for title, of in times.items()},
    }
    path = HERE / "results" / f"correction_{device}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print("wrote", path.relative_to(HERE.parent), "- now run python tools/generate_docs.py")


if __name__ == "__main__":
    main()
