"""Program of one rank in bypass mode under a real wrapper; without a group, the expected result."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from rollcorr import LossConfig, PolicyLogProbs, RolloutCorrectionConfig
from rollcorr.config import InertOptionWarning
from rollcorr.correction.losses import policy_loss
from rollcorr.correction.training_step import TrainingStep

SIZE = 3
SHARDS = {1: (0, 9), 2: (0, 3, 9), 3: (0, 5, 5, 9)}  # uneven; of three ranks, one is empty
WRAPPERS = ("plain", "DDP", "DDP, no_sync idiom", "FSDP2", "FSDP2, sync at the end")
SPLITS: dict[str, Any] = {"whole": 1, "two": 2, "four": 4, "uneven": [1]}
TERMS = {"none": {}, "KL": {"kl_coef": 0.3}, "entropy": {"entropy_coef": 0.2}}
TERMS["both"] = TERMS["KL"] | TERMS["entropy"]
BAND = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.8_1.25"}
WHOLE = {"rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "0.8_1.25,0.04"}
LOSSES: dict[str, dict[str, Any]] = {
    "ppo_clip": BAND,
    "reinforce": WHOLE | {"loss_type": "reinforce", "rollout_is": "token", "normalizer": "weights"},
}


def cases(size: int) -> list[tuple[str, str, str, str]]:
    """Wrapper, split, terms, loss. One process has no exchange to test, and an idiom is one of several micro-batches.

    The two losses take turns, so that every pair of wrapper, split, terms and loss is met.
    """
    found = []
    for wrapper, (i, how), (j, terms) in itertools.product(WRAPPERS, enumerate(SPLITS), enumerate(TERMS)):
        if size == 1 and (wrapper not in ("DDP", "FSDP2") or how != "two"):
            continue
        if "," in wrapper and how in ("whole", "four"):
            continue
        found.append((wrapper, how, terms, list(LOSSES)[(i + j + size) % 2]))
    return found


def config(loss_type: str) -> RolloutCorrectionConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InertOptionWarning)
        return RolloutCorrectionConfig(bypass_mode=True, **LOSSES[loss_type])


class Policy(nn.Module):
    """Log π_θ and an entropy of each token; some rows pass an expert, and without such a row it has no gradient.

    Args:
        always: call the expert on empty input, which FSDP2 requires of every rank.
        recompute: checkpoint the first layer.
    """

    def __init__(self, *, always: bool = False, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.expert, self.last = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.unused, self.frozen = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
        self.always, self.recompute = always, recompute
        self.double()

    def forward(self, features: Tensor, tokens: Tensor, special: Tensor) -> tuple[Tensor, Tensor]:
        hidden = checkpoint(self.first, features, use_reentrant=False) if self.recompute else self.first(features)
        hidden = hidden.tanh()
        if self.always or special.any():
            hidden = hidden.index_add(0, special.nonzero()[:, 0], self.expert(hidden[special]))
        log_probs = self.last(hidden).log_softmax(-1)
        return log_probs.gather(-1, tokens[..., None]).sum(-1), -(log_probs.exp() * log_probs).sum(-1)


def make_data() -> dict[str, Tensor]:
    B, T = 9, 6
    generator = torch.Generator().manual_seed(3)
    kw: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    features, tokens = torch.randn(B, T, 5, **kw), torch.randint(4, (B, T), generator=generator)
    special = torch.arange(B) > 5
    with torch.no_grad():
        log_prob, _ = Policy()(features, tokens, special)
    mask = torch.rand(B, T, generator=generator) < 0.8
    mask[3] = False
    return {
        "features": features,
        "tokens": tokens,
        "special": special,
        "rollout": log_prob + 0.3 * torch.randn(B, T, **kw),
        "reference": log_prob + 0.3 * torch.randn(B, T, **kw),
        "advantages": torch.randn(B, T, **kw),
        "mask": mask,
    }


def policies_of(model: nn.Module, part: dict[str, Tensor]) -> tuple[PolicyLogProbs, Tensor]:
    log_prob, entropy = model(part["features"], part["tokens"], part["special"])
    return PolicyLogProbs(log_prob=log_prob, rollout_log_prob=part["rollout"], ref_log_prob=part["reference"]), entropy


def alone(terms: str, loss_type: str) -> tuple[dict[str, Tensor | None], float]:
    """Return the gradient of all rows in one process and one call, by parameter; and sampled / kept tokens."""
    model, data = Policy(), make_data()
    policies, entropy = policies_of(model, data)
    output = policy_loss(
        policies, data["advantages"], data["mask"], config=config(loss_type), loss=LossConfig(**TERMS[terms]),
        entropy=entropy, whole_step=True,
    )  # fmt: skip
    assert 0 < output.loss_mask.sum() < data["mask"].sum()
    output.loss.backward()
    return gradients(model), data["mask"].sum().item() / output.loss_mask.sum().item()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """By name in the bare model; DTensors put together."""
    found: dict[str, Tensor | None] = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if hasattr(gradient, "full_tensor"):
            gradient = gradient.full_tensor()
        found[name.removeprefix("module.")] = None if gradient is None else gradient.clone()
    return found


def wrapped(wrapper: str, group: Any, mesh: DeviceMesh, *, recompute: bool = False) -> nn.Module:
    """The model in its wrapper, with an optimizer that knows FSDP2's sharded parameters."""
    model = _wrapped(Policy(always=wrapper.startswith("FSDP2"), recompute=recompute), wrapper, group, mesh)
    model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model


def _wrapped(model: Policy, wrapper: str, group: Any, mesh: DeviceMesh) -> nn.Module:
    if wrapper.startswith("FSDP2"):
        fully_shard(model.first, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if wrapper.startswith("DDP"):
        return DistributedDataParallel(model, process_group=group)
    return model


def split(rows: int, how: Any) -> list[Tensor]:
    """Micro-batches of uneven length; some are empty if there are few rows."""
    return list(torch.arange(rows).tensor_split(how))


def step_of(
    model: nn.Module,
    wrapper: str,
    micro_batches: list[Tensor],
    data: dict[str, Tensor],
    terms: str,
    loss_type: str,
    **groups: Any,
) -> tuple[dict[str, Tensor | None], float]:
    """One optimizer step of this rank's data: its gradients and the factor."""
    model.optimizer.zero_grad()
    with TrainingStep(model, config(loss_type), loss=LossConfig(**TERMS[terms]), **groups) as step:
        for i, rows in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            if not len(rows) and not wrapper.startswith("FSDP2"):
                continue  # such a rank, or micro-batch, skips the pass; FSDP2 needs every rank in every pass
            idiom = nullcontext()
            if wrapper == "DDP, no_sync idiom" and not last:
                idiom = model.no_sync()
            if wrapper == "FSDP2, sync at the end":
                model.set_requires_gradient_sync(last)
            with idiom:
                part = {name: values[rows] for name, values in data.items()}
                policies, entropy = policies_of(model, part)
                step.backward(step.policy_loss(policies, part["advantages"], part["mask"], entropy=entropy))
        outcome = step.finish()
    return gradients(model), (outcome.total / outcome.kept).item()


def other_loss(model: nn.Module, data: dict[str, Tensor]) -> Tensor:
    """A loss unknown to the step. It is a sum, so the ranks' losses add up to the loss of all rows."""
    return policies_of(model, data)[1].sum()


def with_other_loss(model: nn.Module, data: dict[str, Tensor], group: Any) -> dict[str, Tensor | None]:
    """Return the gradients of a step in whose block an unrelated loss runs its own backward pass."""
    with TrainingStep(model, config("ppo_clip"), group=group) as step:
        policies, _ = policies_of(model, data)
        step.backward(step.policy_loss(policies, data["advantages"], data["mask"]))
        other_loss(model, data).backward()
        step.finish()
    return gradients(model)


def scenarios(size: int, rank: int, group: Any, mesh: DeviceMesh) -> Iterator[tuple[Any, Any]]:
    data = make_data()
    own = {name: values[slice(*SHARDS[size][rank : rank + 2])] for name, values in data.items()}
    models = {wrapper: wrapped(wrapper, group, mesh) for wrapper in WRAPPERS}
    for case in cases(size):
        wrapper, how, terms, loss_type = case
        if isinstance(models[wrapper], FSDPModule):
            with torch.no_grad():  # leaves the root's parameters gathered
                policies_of(models[wrapper], own)
        batches = split(len(own["mask"]), SPLITS[how])
        yield (size, *case), step_of(models[wrapper], wrapper, batches, own, terms, loss_type, group=group)
    yield (size, "afterwards"), synced(models["DDP"], own)


def synced(model: nn.Module, own: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """DDP's own backward pass, once the steps are over: a mean over ranks."""
    model.zero_grad()
    every = sum(p.sum() for p in model.parameters() if p.requires_grad)  # DDP wants each of them in each pass
    (policies_of(model, own)[0].log_prob.sum() + 0.0 * every).backward()
    return gradients(model)


def pair_scenarios(rank: int, group: Any, mesh: DeviceMesh, replicated: DeviceMesh) -> Iterator[tuple[Any, Any]]:
    """Scenarios for which two ranks suffice."""
    data = make_data()
    own = {name: values[slice(*SHARDS[2][rank : rank + 2])] for name, values in data.items()}
    rows = split(len(own["mask"]), 2)
    summed = wrapped("FSDP2", group, mesh)
    for module in (summed, summed.first):
        module.set_gradient_divide_factor(1.0)
    yield "FSDP2 sums", step_of(summed, "FSDP2", rows, own, "both", "ppo_clip", group=group)
    yield "HSDP", step_of(wrapped("FSDP2", group, replicated), "FSDP2", rows, own, "both", "ppo_clip", group=group)
    columns = {name: values if values.dim() == 1 else values[:, rank::2] for name, values in data.items()}
    for wrapper in ("plain", "DDP", "FSDP2"):
        model = wrapped(wrapper, group, mesh)
        yield (
            ("context", wrapper),
            step_of(model, wrapper, split(9, 2), columns, "both", "reinforce", context_group=group),
        )
        yield ("other loss", wrapper), with_other_loss(wrapped(wrapper, group, mesh), own, group)
    for wrapper in ("DDP", "FSDP2"):
        model = wrapped(wrapper, group, mesh, recompute=True)
        yield ("recomputed", wrapper), step_of(model, wrapper, rows, own, "both", "ppo_clip", group=group)
        try:
            step_of(wrapped(wrapper, group, mesh), wrapper, rows, own, "none", "ppo_clip")
        except ValueError as error:
            yield ("no group", wrapper), str(error)


def run(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/init", rank=rank, world_size=SIZE)
    meshes = {size: DeviceMesh("cpu", list(range(size)), mesh_dim_names=("data",)) for size in (1, 2, 3)}
    replicated = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("replicate", "shard"))
    results: dict[Any, Any] = {}
    for size, mesh in meshes.items():
        if rank < size:
            results |= dict(scenarios(size, rank, mesh.get_group(), mesh))
            if size == 2:
                results |= dict(pair_scenarios(rank, mesh.get_group(), mesh, replicated))
    torch.save(results, f"{path}/{rank}.pt")
    dist.destroy_process_group()
