"""Programs of one rank of the TRL tests: correct its own sequences of a batch, or train in TRL's own trainer."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from trl_stand_in import StandInTrainer, recorded_batch

from rollcorr import Monitor
from rollcorr.integrations.trl import attach

SHARDS = ((0, 3), (3, 8))
CONFIG = {
    "rollout_is": "token",
    "rollout_is_batch_normalize": True,
    "rollout_rs": "token_k1",
    "rollout_rs_threshold": "0.7_1.5",
}


def corrected(first: int, last: int) -> dict[str, Any]:
    """The weights, mask, count and log of some sequences."""
    batch = {name: value[first:last] if value.dim() else value for name, value in recorded_batch().items()}
    trainer = attach(StandInTrainer(batch, "dapo"), CONFIG)
    result = trainer._generate_and_score_completions([])
    trainer.log({})
    kept = ("importance_sampling_ratio", "tool_mask", "num_items_in_batch")
    return {name: result[name] for name in kept} | {"log": trainer.logged[0]}


def corrected_after_a_missing_rank(rank: int, path: str) -> dict[str, Any]:
    """Two batches of one step each: the second rank has no log-probs in the first of them."""
    whole = recorded_batch()
    incomplete = {name: value for name, value in whole.items() if rank == 0 or name != "sampling_per_token_logps"}
    heard: list[str] = []
    with Monitor(
        f"{path}/run", group=dist.group.WORLD, on_alarm=lambda finding: heard.append(finding.title)
    ) as monitor:
        trainer = attach(StandInTrainer(incomplete, "dapo"), "tis", monitor=monitor)
        first = trainer._generate_and_score_completions([])
        monitor.step()
        trainer.batch = whole
        second = trainer._generate_and_score_completions([])
        metrics = monitor.step()
    unchanged = all(value is incomplete[name] for name, value in first.items()) and first.keys() == incomplete.keys()
    tokens = metrics["rollout_corr/token_count"]
    return {"unchanged": unchanged, "corrected": "tool_mask" in second, "alarms": heard, "tokens": tokens}


class ExchangingTrainer(StandInTrainer):
    """Its loss exchanges its metrics, and fails on the second rank."""

    fails_at: str  # a tensor of the batch

    def compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        if dist.get_rank() == 1 and self.fails_at in inputs:
            raise RuntimeError("of the second rank")
        loss = super().compute_loss(model, inputs)
        parts = self.accelerator.gather(loss.detach())
        self._metrics["train"]["mine"].append(self.accelerator.reduce(parts.sum()).item())
        return loss


def checked(fails_at: str) -> dict[str, Any]:
    """How the check of a loss that fails on one rank ends, and whether the batch is corrected afterwards."""

    def exchange(tensor: torch.Tensor, *_: object) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(2)]
        dist.all_gather(parts, tensor)
        return torch.stack(parts)

    trainer = attach(ExchangingTrainer(loss_type="dapo"), "tis")
    trainer.fails_at = fails_at
    trainer.accelerator.gather = trainer.accelerator.reduce = exchange
    trainer.accelerator.is_main_process = dist.get_rank() == 0
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rollcorr").addHandler(handler)
    error = ""
    try:
        trainer._generate_and_score_completions([])
    except ValueError as raised:
        error = str(raised)
    logging.getLogger("rollcorr").removeHandler(handler)
    return {"error": error, "records": records, "checked": trainer._loss_was_checked}


def run(rank: int, path: str) -> None:
    """Write the result of this rank. A rank that waits a minute for its peer fails."""
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{path}/meeting", rank=rank, world_size=2, timeout=limit)
    result = {
        "shards": corrected(*SHARDS[rank]),
        "missing": corrected_after_a_missing_rank(rank, path),
        "refused": checked("tool_mask"),
        "unknown": checked("advantages"),
    }
    torch.save(result, f"{path}/{rank}.pt")
    dist.destroy_process_group()


def start(program: Callable[..., None], path: Path, world: int, *, join: bool = True) -> Any:
    """Start program(rank, path, world) in this many processes, with the variables of torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = (program, str(path), world, port)
    return mp.start_processes(launched, arguments, nprocs=world, join=join, start_method="spawn")


def launched(rank: int, program: Callable[..., None], path: str, world: int, port: int) -> None:
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    program(rank, path, world)
    if dist.is_initialized():
        dist.destroy_process_group()


def train(rank: int, path: str, _world: int) -> None:
    """Three steps of TRL's own trainer; in the second batch one rank's `rollout_func` reports no log-probs."""
    from trl_cases import completions, grpo_trainer

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logging.getLogger("rollcorr").addHandler(handler)

    def rollout(given: list[str], trainer: Any) -> dict[str, Any]:
        step = trainer.state.global_step
        ids, log_probs = completions(step)
        prompt_ids = [trainer.processing_class(text)["input_ids"] for text in given]
        missing = rank == 1 and step == 1
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None if missing else log_probs}

    trainer = grpo_trainer(
        f"{path}/{rank}", trainer_options={"rollout_func": rollout}, ddp_backend="gloo", ddp_timeout=60, max_steps=3
    )
    attach(trainer, "tis").train()
    measured = ["rollout_corr/kl" in entry for entry in trainer.state.log_history if "loss" in entry]
    errors = [record for record in records if record.startswith("ERROR")]
    torch.save({"steps": trainer.state.global_step, "measured": measured, "errors": errors}, f"{path}/{rank}.pt")


REPLAYED = {
    "rollout_is": "token",
    "rollout_is_threshold": 1.5,
    "rollout_rs": "token_k1",
    "rollout_rs_threshold": "0.6_1.6",
}
REPLAYED_LOSSES = ("grpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")  # bnpo is defined per micro-batch


def replay(rank: int, path: str, world: int) -> None:
    """Three steps with each loss on recorded completions, of which this rank samples its share."""
    from torch.nn.utils import parameters_to_vector
    from trl_cases import ROWS, completions, grpo_trainer, replayed

    weights = {}
    for loss_type in REPLAYED_LOSSES:
        options = {"optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant", "max_steps": 3}
        backend = {"ddp_backend": "gloo", "ddp_timeout": 60} if world > 1 else {}
        options |= {"loss_type": loss_type, "per_device_train_batch_size": ROWS // world, **backend}
        trainer = replayed(grpo_trainer(f"{path}/trl {world} {rank}", **options), None, None)

        def generate(prompts: Any, *_: Any, trainer: Any = trainer, **__: Any) -> Any:
            ids, log_probs = completions(trainer.state.global_step)
            rows = slice(rank * len(prompts), (rank + 1) * len(prompts))
            return prompts, ids[rows], [[[value] for value in row] for row in log_probs[rows]], None

        trainer.vllm_generation.generate = generate
        before = parameters_to_vector(trainer.model.parameters()).detach().clone()
        group = dist.group.WORLD if world > 1 else None
        with Monitor(f"{path}/{loss_type} {world}", group=group) as monitor:
            attach(trainer, REPLAYED, monitor=monitor).train()
        after = parameters_to_vector(trainer.model.parameters()).detach()
        weights[loss_type] = {"before": before, "after": after.clone()}
    torch.save(weights, f"{path}/{world} {rank}.pt")


def shard(rank: int, path: str, _world: int) -> None:
    """Three steps under FSDP2 with an engine, then without what makes accelerate shard on a CPU.

    accelerate 1.15 takes FSDP for accelerators only (`AcceleratorState.__init__`): two CPU ranks count as MULTI_CPU
    and get DDP. So the test calls the ranks MULTI_GPU.
    """
    from accelerate import state
    from torch.distributed.tensor import DTensor
    from trl_cases import EOS, LENGTH, PAD, grpo_trainer

    from rollcorr import SamplingSpec
    from rollcorr.engines import GenerationSettings, TransformersEngine

    shards = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "cpu_ram_efficient_loading": False}
    shards["transformer_layer_cls_to_wrap"] = ["LlamaDecoderLayer"]
    options = {"per_device_train_batch_size": 4, "max_steps": 3, "ddp_backend": "gloo", "ddp_timeout": 60}
    options |= {"fsdp": True, "fsdp_config": shards}
    result: dict[str, Any] = {"without": str(grpo_trainer(f"{path}/plain", **options).accelerator.distributed_type)}

    plain = state.PartialState.__init__

    def called_gpu(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        if self.distributed_type == state.DistributedType.MULTI_CPU:
            self.distributed_type = state.DistributedType.MULTI_GPU

    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.PartialState.__init__ = called_gpu
    trainer = grpo_trainer(f"{path}/{rank}", **options)
    sampling = SamplingSpec(temperature=trainer.temperature, logprobs="processed")
    settings = GenerationSettings(sampling=sampling, max_new_tokens=LENGTH, eos_token_id=EOS, pad_token_id=PAD)
    engine = TransformersEngine(trainer.model, settings)
    attach(trainer, "tis", engine=engine).train()

    result["sharded"] = all(isinstance(weight, DTensor) for weight in trainer.model.parameters())
    result["versions"] = (trainer.state.global_step, engine.weight_version)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    result["k3"] = [entry["rollout_corr/k3_kl"] for entry in logs]
    result["grad_norm"] = [float(entry["grad_norm"]) for entry in logs]
    torch.save(result, f"{path}/{rank}.pt")
