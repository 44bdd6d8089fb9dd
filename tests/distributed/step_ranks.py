"""Program of one of two ranks, in loops that once had an incorrect gradient; without a group, the expected result."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import diffusion_ranks
import torch
import torch.distributed as dist
import wrapper_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from rollcorr import LossConfig, PolicyLogProbs, RolloutCorrectionConfig, TrainingStep, correct, policy_loss
from rollcorr.diffusion import apply_rollout_correction_to_diffusion_batch, diffusion_loss

SIZE = 2
SHARDS = (0, 7, 9)
MICRO_BATCHES = 4
HAS_ACCELERATE = find_spec("accelerate") is not None
HAS_FSDP2 = hasattr(torch.cpu.Stream, "record_event")  # on a CPU, FSDP2 needs torch 2.7 or newer
WRAPPERS = ("plain", "DDP", *(["FSDP2"] if HAS_FSDP2 else []), *(["accelerate"] if HAS_ACCELERATE else []))
PLAIN, REGULARIZED = LossConfig(), LossConfig(kl_coef=0.3, entropy_coef=0.2)
BAND = wrapper_ranks.BAND
CONFIGS = {
    "decoupled": RolloutCorrectionConfig(rollout_is="token", **BAND),
    "bypass": RolloutCorrectionConfig(bypass_mode=True, **BAND),
    "reinforce": RolloutCorrectionConfig(bypass_mode=True, loss_type="reinforce", rollout_is="token", **BAND),
}


def make_data() -> dict[str, Tensor]:
    """Nine rows with the log-probs of π_old, from which π_θ has moved a little."""
    data = wrapper_ranks.make_data()
    noise = torch.randn(data["rollout"].shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    with torch.no_grad():
        log_prob, _ = wrapper_ranks.Policy()(data["features"], data["tokens"], data["special"])
    return data | {"old": log_prob + 0.05 * noise}


def own_rows(data: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    return {name: values[slice(*SHARDS[rank : rank + 2])] for name, values in data.items()}


def corrected(data: dict[str, Tensor], **options: Any) -> Any:
    return correct(data["old"], data["rollout"], data["mask"], CONFIGS["decoupled"], **options)


def arguments(model: nn.Module, data: dict[str, Tensor], mode: str) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    log_prob, entropy = model(data["features"], data["tokens"], data["special"])
    policies = PolicyLogProbs(
        log_prob=log_prob,
        old_log_prob=data["old"] if mode == "decoupled" else None,
        rollout_log_prob=data["rollout"],
        ref_log_prob=data["reference"],
    )
    return (policies, data["advantages"], data["mask"]), {"entropy": entropy}


def alone(mode: str, loss: LossConfig) -> dict[str, Tensor | None]:
    """The gradient of all rows in one process and one call."""
    model, data = wrapper_ranks.Policy(), make_data()
    given, options = arguments(model, data, mode)
    correction = corrected(data) if mode == "decoupled" else None
    policy_loss(
        *given, config=CONFIGS[mode], loss=loss, correction=correction, whole_step=True, **options
    ).loss.backward()
    return wrapper_ranks.gradients(model)


def wrapped(wrapper: str, mesh: DeviceMesh) -> tuple[nn.Module, Any]:
    """The model in its wrapper, and the Accelerator that has wrapped it."""
    if wrapper == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
        model = accelerator.prepare(wrapper_ranks.Policy(always=True))
        assert isinstance(model, DistributedDataParallel)
        return model, accelerator
    return wrapper_ranks._wrapped(wrapper_ranks.Policy(always=True), wrapper, mesh.get_group(), mesh), None


def step_of(
    model: nn.Module, accelerator: Any, data: dict[str, Tensor], mode: str, loss: LossConfig, *, known: bool = False
) -> dict[str, Tensor | None]:
    """Run one optimizer step on this rank's rows, in four micro-batches; the ranks have different row counts."""
    world = dist.group.WORLD
    correction = None
    if mode == "decoupled":
        correction = corrected(data, group=world if known else None)
    config = correction if known else CONFIGS[mode]
    model.zero_grad()
    with TrainingStep(model, config, loss=loss, group=world, accumulation=accelerator) as step:
        for rows in torch.arange(len(data["mask"])).tensor_split(MICRO_BATCHES):
            part = {name: values[rows] for name, values in data.items()}
            with nullcontext() if accelerator is None else accelerator.accumulate(model):
                given, options = arguments(model, part, mode)
                own = None if correction is None else correction[rows]
                step.backward(step.policy_loss(*given, correction=own, **options))
        step.finish()
    return wrapper_ranks.gradients(model)


def functional(model: nn.Module, data: dict[str, Tensor], **options: Any) -> tuple[dict[str, Tensor | None], list[str]]:
    """Row (a): DDP averages the gradients of losses that were divided by this rank's counts; and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.zero_grad()
            correction = corrected(data, **options)
            given, entropy = arguments(model, data, "decoupled")
            every = sum(p.sum() for p in model.parameters() if p.requires_grad)  # DDP wants each of them in each pass
            (policy_loss(*given, correction=correction, **entropy).loss + 0.0 * every).backward()
    own = [w for w in caught if "ranks, and the loss" in str(w.message)]
    assert all(w.filename == __file__ for w in own)
    return wrapper_ranks.gradients(model), [str(w.message) for w in own]


def diffusion(model: nn.Module, accelerator: Any, mode: str, rank: int | None) -> Tensor:
    """The same for denoising steps, one at a time; None: everything in one process and one call."""
    config, batch = diffusion_ranks.actor(mode, "kept"), diffusion_ranks.make_batch()
    own = batch if rank is None else own_rows(batch, rank)
    group = None if rank is None else dist.group.WORLD
    if not config.bypass_mode:
        apply_rollout_correction_to_diffusion_batch(own, config, schedule=diffusion_ranks.SCHEDULE)
    if rank is None:
        diffusion_loss(config, model(own), own, whole_step=True).loss.backward()
    else:
        with TrainingStep(model, config, group=group, accumulation=accelerator) as step:
            for rows in torch.arange(len(own["std"])).tensor_split(MICRO_BATCHES):
                part = {key: values[rows] for key, values in own.items()}
                step.backward(step.diffusion_loss(model(part), part))
            step.finish()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def scenarios(rank: int, mesh: DeviceMesh) -> Iterator[tuple[Any, Any]]:
    own = own_rows(make_data(), rank)
    for wrapper in WRAPPERS:
        model, accelerator = wrapped(wrapper, mesh)
        for mode in CONFIGS:
            for loss in (PLAIN, REGULARIZED):
                yield (wrapper, mode, loss), step_of(model, accelerator, own, mode, loss)
        yield (wrapper, "known"), step_of(model, accelerator, own, "decoupled", REGULARIZED, known=True)

    # Variants of rows (a) and (c), which report a missing call.
    yield "functional, local", functional(wrapped("DDP", mesh)[0], own, group="local")
    yield "functional, group", functional(wrapped("DDP", mesh)[0], own, group=dist.group.WORLD)
    yield "functional", functional(wrapped("DDP", mesh)[0], own)
    given, _ = arguments(wrapper_ranks.Policy(), own, "bypass")
    whole = policy_loss(*given, config=CONFIGS["bypass"], whole_step=True, group=dist.group.WORLD)
    yield "bypass over the group", dist_sum(whole.loss)
    try:
        policy_loss(*given, config=CONFIGS["bypass"])
    except ValueError as error:
        yield "micro-batches in bypass mode", str(error)

    for mode in ("decoupled", "bypass"):
        model = DistributedDataParallel(diffusion_ranks.Mean())
        yield ("diffusion", mode), diffusion(model, None, mode, rank)


def dist_sum(value: Tensor) -> float:
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item()


def run(rank: int, path: str, port: int) -> None:
    torch.set_num_threads(1)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": SIZE, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()})  # accelerate reads them
    dist.init_process_group("gloo", init_method=f"file://{path}/init", rank=rank, world_size=SIZE)
    mesh = DeviceMesh("cpu", list(range(SIZE)), mesh_dim_names=("data",))
    torch.save(dict(scenarios(rank, mesh)), f"{path}/{rank}.pt")
    dist.destroy_process_group()
