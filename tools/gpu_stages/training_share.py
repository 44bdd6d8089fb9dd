"""Stage 5: what share of a training step the correction takes, and whether the demo trains on this device."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpu_stages import Plan
from gpu_stages.recorder import Rows
from gpu_stages.timing import measured

ROOT = Path(__file__).resolve().parents[2]


class Shape(NamedTuple):
    """A decoder-only model, and a batch for it."""

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    rows: int
    length: int


HALF_A_BILLION = Shape(24, 896, 14, 4864, 151_936, 16, 1024)
"""Layers, widths and vocabulary of Qwen2.5-0.5B, with random weights."""

SMALL = Shape(2, 32, 2, 64, 256, 2, 32)


class Layer(nn.Module):
    """Causal attention and a gated feed-forward network, each after a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norms = nn.ModuleList(nn.RMSNorm(shape.width) for _ in range(2))
        self.into = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.up = nn.Linear(shape.width, 2 * shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d) to the same."""
        B, T, d = x.shape
        parts = self.into(self.norms[0](x)).view(B, T, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(B, T, d))
        gate, value = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * value)


class Model(nn.Module):
    """Embedding, layers, and a head that is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.Sequential(*(Layer(shape) for _ in range(shape.layers)))
        self.norm = nn.RMSNorm(shape.width)

    def forward(self, ids: Tensor) -> Tensor:
        """Hidden states, (B, T, d)."""
        return self.norm(self.layers(self.embedding(ids)))


def run(plan: Plan, rows: Rows) -> None:
    """A step with its old log-probs, correction, loss, backward and optimizer; then the demo."""
    rows.attempt("share of a step", lambda: _share(plan))
    rows.attempt("the demo, 5 steps", lambda: _demo(plan))


def _share(plan: Plan) -> dict[str, object]:
    from rollcorr import Correction, PolicyLogProbs, correct, linear_log_prob, policy_loss

    shape = SMALL if plan.quick else HALF_A_BILLION
    dtype = torch.float32 if plan.device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    model = Model(shape).to(plan.device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    ids = torch.randint(shape.vocabulary, (shape.rows, shape.length + 1), device=plan.device)
    mask = torch.ones(shape.rows, shape.length, dtype=torch.bool, device=plan.device)
    advantages = torch.randn(shape.rows, shape.length, device=plan.device)

    def log_probs() -> Tensor:
        return linear_log_prob(model(ids[:, :-1]), model.embedding.weight, ids[:, 1:]).log_prob

    with torch.no_grad():
        old = log_probs()
    rollout = old + 0.02 * torch.randn_like(old)

    def correction() -> Correction:
        return correct(old, rollout, mask, "decoupled_token_is")

    def corrected_and_measured() -> object:
        return correction().metrics()

    def step() -> None:
        with torch.no_grad():
            log_probs()
        policies = PolicyLogProbs(log_prob=log_probs(), old_log_prob=old, rollout_log_prob=rollout)
        policy_loss(policies, advantages, mask, correction=correction()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds = 0.2 if plan.quick else 4.0
    whole = measured(step, plan.device, seconds=seconds)
    part = measured(corrected_and_measured, plan.device, seconds=seconds / 4)
    return {
        "parameters": sum(x.numel() for x in model.parameters()),
        "tokens": mask.numel(),
        "step_seconds": whole["median"],
        "correction_seconds": part["median"],
        "share": float(part["median"]) / float(whole["median"]),  # type: ignore[arg-type]
    }


def _demo(plan: Plan) -> dict[str, object]:
    from gpu_stages import carried

    carried.offer()
    steps = 1 if plan.quick else 5
    with tempfile.TemporaryDirectory() as folder:
        options = [f"run_dir={folder}/demo", f"device={plan.device}", f"steps={steps}", "log.evaluate=16"]
        options += (
            ["rollout.prompts_per_step=4", "rollout.group_size=4", "optim.mini_batch_size=16"] if plan.quick else []
        )
        command = [sys.executable, "-m", "rollcorr", "train", str(ROOT / "examples" / "train" / "demo.yaml"), *options]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=90, cwd=folder)
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return {"right": done.returncode == 0, "steps": steps, "exit_code": done.returncode, "last_lines": said[-3:]}
