"""A fake AsyncGRPOTrainer with packed rows, and the program of one rank with a part of its completions."""

from collections import defaultdict
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from processes import PATIENCE

from rollcorr.integrations.trl import attach

LENGTHS = (3, 5, 2, 4)
CONFIG = {
    "bypass_mode": True,
    "loss_type": "reinforce",
    "rollout_is": "sequence",
    "rollout_is_threshold": 1.2,
    "rollout_rs": "token_k1",
    "rollout_rs_threshold": "0.7_1.4",
}


class Scorer(torch.nn.Module):
    """A policy whose parameters are its log-probs at the packed positions."""

    def __init__(self, log_prob):
        super().__init__()
        self.log_prob = torch.nn.Parameter(log_prob.clone())

    def forward(self):
        return SimpleNamespace(log_probs=self.log_prob[None], aux_loss=self.log_prob.sum())


class PackedTrainer:
    """The parts of an `AsyncGRPOTrainer` that the adapter uses. Its own loss is 7."""

    epsilon_low = epsilon_high = 0.2
    current_gradient_accumulation_steps, router_aux_loss_coef = 2, 0.5

    def __init__(self, model, ranks=1, *, aux=False):
        self.model, self.aux_loss_enabled, self.rollout_queue = model, aux, None
        self.accelerator = SimpleNamespace(is_main_process=True, num_processes=ranks)
        self.args = SimpleNamespace(report_to=["tensorboard"])
        self.state, self._metrics = SimpleNamespace(log_history=[]), {"train": defaultdict(list)}

    def compute_loss(self, model, inputs):
        model()
        return torch.tensor(7.0)

    def log(self, logs):
        self.logged = logs


def packed(rows):
    """The packed micro-batch of some completions, with two positions of padding, and the policy at its positions."""
    generator = torch.Generator().manual_seed(0)
    log_probs = -1 - torch.rand(sum(LENGTHS), generator=generator)
    rollout = log_probs + 0.3 * torch.randn(sum(LENGTHS), generator=generator)
    parts = [torch.arange(sum(LENGTHS)).split(LENGTHS)[row] for row in rows]
    index, padding = torch.cat(parts), torch.zeros(2)
    sequence = torch.cat([torch.full((len(part),), number) for number, part in enumerate(parts)])
    position = torch.arange(len(index)).flip(0)  # tokens and positions are in different orders
    inputs = {
        "token_index": torch.cat([position, padding.long() - 1])[None],
        "shift_labels": torch.arange(len(index))[None],
        "segment_id": torch.cat([sequence, padding.long()])[None],
        "old_log_probs": torch.cat([rollout[index], padding])[None],
        "advantages": torch.cat([index % 3 - 1.0, padding])[None],
    }
    return inputs, Scorer(log_probs[index].flip(0))


def loss_of(rows, ranks=1, config=CONFIG, **options):
    inputs, model = packed(rows)
    trainer = attach(PackedTrainer(model, ranks, **options), config)
    loss = trainer.compute_loss(model, inputs)
    trainer.log({})
    return loss, model, trainer


def save_loss(rank, path):
    limit = timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2, timeout=limit)
    loss, model, trainer = loss_of((0, 1, 2) if rank == 0 else (3,), ranks=2)
    loss.backward()
    torch.save((loss.detach(), model.log_prob.grad, trainer.logged), f"{path}/{rank}.pt")
    dist.destroy_process_group()
