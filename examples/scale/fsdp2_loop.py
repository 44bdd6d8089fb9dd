"""A training loop of your own with FSDP2 (`fully_shard`): `correct(group=)` on ranks with different numbers of rows.

torchrun --nproc-per-node 2 examples/scale/fsdp2_loop.py

Prints the gradient's largest relative difference from that of one process on the whole batch.
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rollcorr import PolicyLogProbs, correct
from rollcorr.correction import TrainingStep

CONFIG = {"rollout_is": "token", "rollout_is_batch_normalize": True, "rollout_rs": "seq_mean_k3"}
CONFIG |= {"rollout_rs_threshold": 0.02}
SHARES = [0.375, 0.625]  # of the rows, on the first and the second rank


def make_model():
    """Return a policy over 32 tokens: the same on every rank, since it is seeded."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Embedding(32, 64), torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 32)
    )


def log_prob_of(model, tokens):
    """Return log π of each token after the one before it, (B, T)."""
    logits = model(tokens[:, :-1]).log_softmax(dim=-1)
    return logits.gather(-1, tokens[:, 1:, None]).squeeze(-1)


def gradient(model, batch, group):
    """Run one step up to the optimizer: correct, score, backward. Returns the whole gradient of each parameter."""
    tokens, rollout_log_prob, response_mask, advantages = batch
    with torch.no_grad():
        old_log_prob = log_prob_of(model, tokens)
    correction = correct(old_log_prob, rollout_log_prob, response_mask, CONFIG, group=group)
    with TrainingStep(model, correction, group=group) as step:
        log_prob = log_prob_of(model, tokens)
        policies = PolicyLogProbs(log_prob=log_prob, old_log_prob=old_log_prob, rollout_log_prob=rollout_log_prob)
        step.backward(step.policy_loss(policies, advantages, response_mask, correction=correction))
        step.finish()
    found = [
        weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad for weight in model.parameters()
    ]
    kept = correction.metrics(prefix="")["rollout_rs_masked_fraction"]
    return torch.cat([x.flatten() for x in found]), kept


def main():
    """Compare two ranks with one process."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    # Every rank draws the whole batch and keeps its rows. The rollout policy is the model with noise.
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 32, (16, 25), generator=generator)
    response_mask = torch.arange(24) < torch.randint(4, 25, (16, 1), generator=generator)
    advantages = torch.randn(16, 1, generator=generator).expand(16, 24)
    noise = 0.3 * torch.rand(16, 1, generator=generator) * torch.randn(16, 24, generator=generator)
    with torch.no_grad():
        rollout_log_prob = (log_prob_of(make_model(), tokens) + noise).clamp(max=0.0)
    batch = (tokens, rollout_log_prob, response_mask, advantages)

    shares = SHARES if world == 2 else [1 / world] * world
    first, last = round(16 * sum(shares[:rank])), round(16 * sum(shares[: rank + 1]))
    model = make_model()
    for layer in (model[1], model[3]):
        fully_shard(layer)
    sharded, rejected = gradient(fully_shard(model), tuple(x[first:last] for x in batch), dist.group.WORLD)
    alone, of_one = gradient(make_model(), batch, "local")

    difference = ((sharded - alone).abs().max() / alone.abs().max()).item()
    if rank == 0:
        print(f"{world} ranks, rejected {rejected:.4f} of the tokens (one process {of_one:.4f})")
        print(f"largest difference of the gradient, relative: {difference:.1e}")
    assert difference < 1e-6
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
