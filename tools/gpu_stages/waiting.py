"""Stage 2: does a step wait for the device, can a graph capture it, and how many launches are in it?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gpu_stages import Plan
from gpu_stages.batches import Batch, make_batch
from gpu_stages.recorder import Rows

if TYPE_CHECKING:
    from counting import Counts

REPLAYS = 100


def run(plan: Plan, rows: Rows) -> None:
    """Every mode, with whatever "auto" takes."""
    batch = make_batch(1 << (14 if plan.quick else 20), "padded", plan.device)
    for name, step in steps(batch).items():
        step()
        rows.attempt(f"waits, {name}", lambda step=step: _waits(plan, step))
        rows.attempt(f"launches, {name}", lambda step=step: {"launches": _launches(plan, step)})
        rows.attempt(f"graph, {name}", lambda step=step: _captured(plan, step))


def steps(batch: Batch) -> dict[str, Callable[[], torch.Tensor]]:
    """One step of each mode, forward and backward; each returns a tensor that must come out the same."""
    from rollcorr import LossConfig, PolicyLogProbs, RolloutCorrectionConfig, correct, policy_loss

    train, rollout, mask = batch.train, batch.rollout, batch.mask
    advantages = torch.ones_like(train)
    found: dict[str, Callable[[], torch.Tensor]] = {}

    def corrected(**options: object) -> torch.Tensor:
        correction = correct(train, rollout, mask, rollout_rs="seq_mean_k3", rollout_rs_threshold=0.01, **options)
        return correction.loss_mask if correction.weights is None else correction.weights

    for level in (None, "token", "sequence", "geometric"):
        found[f"correct, {level or 'no'} weights"] = lambda level=level: corrected(rollout_is=level)

    def decoupled() -> torch.Tensor:
        log_prob = train.clone().requires_grad_()
        correction = correct(train, rollout, mask, "decoupled_token_is")
        policies = PolicyLogProbs(log_prob=log_prob, old_log_prob=train, rollout_log_prob=rollout)
        policy_loss(policies, advantages, mask, correction=correction, loss=LossConfig()).loss.backward()
        return log_prob.grad

    def bypass(config: RolloutCorrectionConfig) -> torch.Tensor:
        log_prob = train.clone().requires_grad_()
        policies = PolicyLogProbs(log_prob=log_prob, rollout_log_prob=rollout)
        policy_loss(policies, advantages, mask, config=config, whole_step=True).loss.backward()
        return log_prob.grad

    found["policy loss, decoupled"] = decoupled
    for loss_type in ("ppo_clip", "reinforce"):
        config = RolloutCorrectionConfig(
            rollout_is="token", bypass_mode=True, loss_type=loss_type, apply_is=loss_type == "reinforce"
        )
        found[f"policy loss, bypass, {loss_type}"] = lambda config=config: bypass(config)
    return found


@contextmanager
def no_waits() -> Iterator[None]:
    """Any wait for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _waits(plan: Plan, step: Callable[[], torch.Tensor]) -> dict[str, object]:
    if plan.device == "cpu":
        # What lies in host memory is read without a wait, so this count is no judgment here.
        return {"waits": _counted(step).waits, "by": "dispatched operations"}
    torch.cuda.synchronize()
    with no_waits():
        step()
    return {"waits": 0, "by": "torch.cuda.set_sync_debug_mode('error')"}


def _launches(plan: Plan, step: Callable[[], torch.Tensor]) -> int:
    if plan.device == "cpu":
        return int(_counted(step).operations)
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        step()
        torch.cuda.synchronize()
    launches = {"cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx"}
    return sum(1 for event in trace.events() if event.name in launches)


def _captured(plan: Plan, step: Callable[[], torch.Tensor]) -> dict[str, object]:
    """Capture a step into a graph and replay it: the same result each time."""
    expected = step().clone()
    if plan.device == "cpu":
        same = all(torch.equal(step(), expected) for _ in range(3))
        return {"right": same, "not_run": "graphs are of GPUs; the step was repeated 3 times instead"}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    differing = 0
    for _ in range(REPLAYS):
        result.zero_()
        graph.replay()
        differing += not torch.equal(result, expected)
    return {"right": differing == 0, "replays": REPLAYS, "differing": differing}


def _counted(step: Callable[[], torch.Tensor]) -> Counts:
    """Operations that torch was asked for; what a compiled library does is not seen."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
    from counting import Counts

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with Counts() as counts:
            step()
    finally:
        torch.set_num_threads(threads)
    return counts
