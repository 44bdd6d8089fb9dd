"""Stage 4: log-probs without logits, forward and backward, against full logits and four peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gpu_stages import Plan
from gpu_stages.carried import allow_peers
from gpu_stages.recorder import Rows
from gpu_stages.timing import measured


class Problem(NamedTuple):
    """Hidden states (N, d), a head (V, d), and the sampled ids (N,)."""

    hidden: Tensor
    weight: Tensor
    ids: Tensor


def run(plan: Plan, rows: Rows) -> None:
    """N = 8,192 tokens, d = 4,096, two vocabularies, bfloat16."""
    tokens, width, vocabularies = (64, 64, (512,)) if plan.quick else (8192, 4096, (32_768, 151_936))
    dtype = torch.float32 if plan.device == "cpu" else torch.bfloat16
    for vocabulary in vocabularies:
        generator = torch.Generator(device=plan.device).manual_seed(0)
        options = {"generator": generator, "device": plan.device}
        hidden = torch.randn(tokens, width, **options).to(dtype).requires_grad_()
        weight = (torch.randn(vocabulary, width, **options) / width**0.5).to(dtype).requires_grad_()
        problem = Problem(hidden, weight, torch.randint(vocabulary, (tokens,), **options))
        for name, prepare in contenders(plan).items():
            shape = {"vocabulary": vocabulary, "tokens": tokens, "width": width, "contender": name}
            rows.attempt(
                f"V = {vocabulary:,}, {name}",
                lambda prepare=prepare, problem=problem, shape=shape: shape | _timed(plan, problem, prepare(problem)),
                required=name.startswith("rollcorr"),
            )


def contenders(plan: Plan) -> dict[str, Callable[[Problem], Callable[[], object]]]:
    """What is timed, by name. "four products" are the matrix products alone."""
    found: dict[str, Callable[[Problem], Callable[[], object]]] = {
        "four products": _products,
        "rollcorr, torch": lambda problem: _rollcorr(problem, "torch"),
    }
    if plan.device == "cuda":
        found["rollcorr, triton"] = lambda problem: _rollcorr(problem, "triton")
    return found | {
        "full logits": _full,
        "TRL 1.16.0": _trl,
        "Liger 0.8.5": _liger,
        "CCE 25.1.1": _cce,
        "verl 0.9.1": _verl,
    }


def _timed(plan: Plan, problem: Problem, call: Callable[[], object]) -> dict[str, object]:
    if plan.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    found = measured(call, plan.device, seconds=0.1 if plan.quick else 0.6, least=3)
    if plan.device == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    problem.hidden.grad = problem.weight.grad = None
    return found


def _forward_and_back(problem: Problem, log_prob: Callable[[], Tensor]) -> Callable[[], object]:
    def call() -> None:
        problem.hidden.grad = problem.weight.grad = None
        log_prob().float().sum().backward()

    return call


def _products(problem: Problem) -> Callable[[], object]:
    """Logits, logits again, the gradient in the hidden states and that in the head, 4,096 entries at a time."""
    hidden, weight, _ = (x.detach() for x in problem)

    def call() -> None:
        total = torch.zeros_like(hidden)
        for head in weight.split(4096):
            torch.mm(hidden, head.t())
            logits = torch.mm(hidden, head.t())
            total.addmm_(logits, head)
            torch.mm(logits.t(), hidden)

    return call


def _rollcorr(problem: Problem, impl: str) -> Callable[[], object]:
    from rollcorr import linear_log_prob

    return _forward_and_back(problem, lambda: linear_log_prob(*problem, impl=impl).log_prob)


def _full(problem: Problem) -> Callable[[], object]:
    hidden, weight, ids = problem
    return _forward_and_back(
        problem, lambda: (hidden @ weight.t()).float().log_softmax(-1).gather(1, ids[:, None]).squeeze(1)
    )


def _trl(problem: Problem) -> Callable[[], object]:
    allow_peers()
    from trl.kernels import ChunkedLogProbFunction

    hidden, weight, ids = problem
    return _forward_and_back(
        problem, lambda: ChunkedLogProbFunction.apply(hidden, weight, None, ids, 1.0, 4096, None, 1.0, ())[0]
    )


def _liger(problem: Problem) -> Callable[[], object]:
    allow_peers()
    from liger_kernel.chunked_loss.fused_linear_ppo import _ChunkedSelectiveLogProbFunction

    hidden, weight, ids = problem
    return _forward_and_back(
        problem, lambda: _ChunkedSelectiveLogProbFunction.apply(hidden, weight, ids, None, 1.0, 4096)
    )


def _cce(problem: Problem) -> Callable[[], object]:
    allow_peers()
    from cut_cross_entropy import linear_cross_entropy

    return _forward_and_back(problem, lambda: -linear_cross_entropy(*problem, reduction="none"))


def _verl(problem: Problem) -> Callable[[], object]:
    allow_peers()
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    return _forward_and_back(problem, lambda: linear_cross_entropy(*problem)[0])
