"""Program of one rank of the distributed tests. Without groups every function computes the expected result."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rollcorr import Detail, LossConfig, PolicyLogProbs, RolloutCorrectionConfig, correct
from rollcorr.config import InertOptionWarning
from rollcorr.core import horizon
from rollcorr.core.mergeable_statistics import merge_statistics
from rollcorr.core.metric_registry import finalize
from rollcorr.correction.losses import loss_metrics, policy_loss
from rollcorr.correction.process_groups import gather_statistics, sum_gradients, sum_over
from rollcorr.correction.training_step import TrainingStep

SIZE = 4
SHARDS = {1: (0, 9), 2: (0, 2, 9), 4: (0, 3, 3, 7, 9)}  # uneven; of four ranks, one is empty
IMPLEMENTATIONS = {"contiguous": ("torch",), "zig-zag": ("torch", "reference"), "one": ("torch",)}
MICRO_BATCHES = (1, 2)
STANDARD = {"rollout_is": "token", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.01"}
CONFIGS: dict[str, dict[str, Any]] = {
    "standard": STANDARD,
    "metrics only": {},
    "sequence, normalised": {
        "rollout_is": "sequence",
        "rollout_is_batch_normalize": True,
        "rollout_rs": "seq_sum_k1,token_k1",
        "rollout_rs_threshold": "0.3_3.0,0.5_2.0",
    },
    "geometric, kept": {
        "rollout_is": "geometric",
        "rollout_is_threshold": "0.7_1.4",
        "rollout_is_batch_normalize": True,
        "batch_normalize_over": "kept",
        "rollout_rs": "seq_max_k2,seq_max_k3,seq_mean_k1",
        "rollout_rs_threshold": "0.9,0.9,0.6_1.7",
        "nonfinite": "reject_sequence",
    },
    "token IcePop, veto": {
        "rollout_is": "token",
        "rollout_is_threshold": "0.5_2.0",
        "rollout_rs": "token_k2,token_k3,seq_sum_k3",
        "rollout_rs_threshold": "1.0,1.0,6.0",
        "rollout_token_veto_threshold": 1e-3,
        "nonfinite": "neutral",
    },
}
DECOUPLED = {"rollout_is": "sequence", "rollout_rs": "seq_mean_k3,token_k1", "rollout_rs_threshold": "0.09,0.3_3.0"}
BYPASS = {"bypass_mode": True, "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.09"}
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "decoupled": (DECOUPLED, {}),
    "decoupled, weights": (DECOUPLED | {"normalizer": "weights"}, {"loss_agg_mode": "seq-mean-token-sum"}),
    "decoupled, rows": (DECOUPLED, {"loss_agg_mode": "seq-mean-token-mean", "kl_coef": 0.1, "entropy_coef": 0.01}),
    "bypass": (BYPASS, {"kl_coef": 0.1}),
    "bypass, rows": (BYPASS, {"loss_agg_mode": "seq-mean-token-mean"}),
    "bypass, REINFORCE": (BYPASS | {"loss_type": "reinforce", "rollout_is": "token"}, {}),
}


def config(fields: dict[str, Any]) -> RolloutCorrectionConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InertOptionWarning)
        return RolloutCorrectionConfig(**fields)


@dataclasses.dataclass(frozen=True)
class Data:
    """Nine sequences of up to twelve tokens; per-token tensors (B, T), or (N,) with cu_seqlens."""

    features: Tensor
    old: Tensor
    rollout: Tensor
    mask: Tensor
    advantages: Tensor
    position: Tensor
    cu_seqlens: Tensor | None = None
    first: int = 0

    def rows(self, start: int, end: int) -> Data:
        tensors = {f.name: getattr(self, f.name)[start:end] for f in dataclasses.fields(self)[:6]}
        return dataclasses.replace(self, **tensors, first=self.first + start)

    def tokens(self, chosen: Tensor, *, packed: bool) -> Data:
        """The chosen tokens: a bool (B, T) when packed, else columns."""
        tensors = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)[:6]}
        if not packed:
            return dataclasses.replace(self, **{name: x[:, chosen] for name, x in tensors.items()})
        counts = chosen.sum(1)
        cu_seqlens = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return dataclasses.replace(self, **{k: x[chosen] for k, x in tensors.items()}, cu_seqlens=cu_seqlens)


def make_data() -> Data:
    B, T = 9, 12
    generator = torch.Generator().manual_seed(3)
    old = -torch.rand(B, T, generator=generator, dtype=torch.float64) * 2 - 0.1
    scale = torch.linspace(0.02, 0.6, B, dtype=torch.float64).unsqueeze(-1)
    rollout = old + scale * torch.randn(B, T, generator=generator, dtype=torch.float64)
    mask = torch.rand(B, T, generator=generator) < 0.8
    mask[4] = False
    mask[7, 1:] = False
    old[1, 2], rollout[2, 5], rollout[8, 0] = -torch.inf, torch.nan, -9.0
    mask[1, 2] = mask[2, 5] = mask[8, 0] = True
    features = torch.randn(B, T, 5, generator=generator, dtype=torch.float64)
    advantages = torch.randn(B, 1, generator=generator, dtype=torch.float64).expand(B, T)
    return Data(features, old, rollout, mask, advantages, torch.arange(T).expand(B, T))


def shard(data: Data, size: int, rank: int) -> Data:
    return data.rows(SHARDS[size][rank], SHARDS[size][rank + 1])


def owners(lengths: Tensor, T: int, size: int, split: str) -> Tensor:
    """Return the rank of each token, (B, T): contiguous, zig-zag (as in ring attention), or all on the last rank."""
    position, lengths = torch.arange(T).expand(len(lengths), T), lengths.unsqueeze(-1).clamp(min=1)
    if split == "one":
        return torch.full_like(position, size - 1)
    if split == "contiguous":
        return (position * size // lengths).clamp(max=size - 1)
    chunk = (position * 2 * size // lengths).clamp(max=2 * size - 1)
    return torch.minimum(chunk, 2 * size - 1 - chunk)


def context_slice(data: Data, size: int, rank: int, split: str, *, packed: bool) -> Data:
    T = data.mask.shape[1]
    if not packed:
        return data.tokens(owners(torch.tensor([T]), T, size, split)[0] == rank, packed=False)
    held = inside(data)
    return data.tokens((owners(held.sum(1), T, size, split) == rank) & held, packed=True)


def inside(data: Data) -> Tensor:
    """The tokens that packing keeps, (B, T): of sequences of uneven length, one of them empty."""
    B, T = data.mask.shape
    return torch.arange(T) < (torch.arange(B) * 7 % (T + 1)).unsqueeze(-1)


def corrected(data: Data, fields: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return every output of a correction as plain values."""
    detail = Detail(sequence_offset=data.first, position_ids=data.position)
    result = correct(
        data.old, data.rollout, data.mask, config(fields), cu_seqlens=data.cu_seqlens, detail=detail, **options
    )
    normalizers = ("kept", "original", "weights")
    return {
        "weights": result.weights,
        "loss_mask": result.loss_mask,
        "sequence_kept": result.sequence_kept,
        "metrics": result.metrics(),
        "worst": result.worst(),
        "denominators": [dataclasses.astuple(result.denominators(n)) for n in normalizers],
    }


def with_chosen_horizon(data: Data, **options: Any) -> dict[str, Any]:
    """Return a correction whose λ comes from the batch, as if one effective sequence sufficed."""
    with mock.patch.object(horizon, "EFFECTIVE_SEQUENCES", 1):
        return corrected(data, {"rollout_is": "horizon", "rollout_is_horizon": "auto"}, **options)


class Policy(nn.Module):
    """Compute log π_θ and an entropy from the features of each token only, so that any rank can compute any slice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.unused = nn.Linear(2, 2).double()

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        log_prob = -nn.functional.softplus(self.layers(features).squeeze(-1))
        return log_prob, -log_prob


def optimizer_step(
    data: Data, mode: str, micro_batch: int, group: Any = None, context_group: Any = None, *, mini_batch: bool = False
) -> dict[str, Any]:
    """One optimizer step on this rank's data; padded, so that micro-batches are rows. `mini_batch` counts them anew."""
    fields, loss_fields = LOSSES[mode]
    settings, loss = config(fields), LossConfig(**loss_fields)
    model = Policy()
    with torch.no_grad():
        reference = model(data.features)[0] + 0.1
        policy_old = model(data.features)[0] - 0.05
    rollout = data.rollout.where(data.rollout.isfinite(), policy_old)
    rollout = policy_old + (rollout - data.old.nan_to_num(neginf=-3.0)).clamp(-1, 1)
    correction, bypass = None, None
    if settings.bypass_mode:
        groups = {"group": group, "context_group": context_group}
        bypass = TrainingStep(model, settings, loss=loss, **groups)
    else:
        correction = correct(policy_old, rollout, data.mask, settings, group=group, context_group=context_group)
        step = correction.mini_batch(slice(None)) if mini_batch else None
    outputs = []
    with bypass or nullcontext():
        for rows in torch.arange(len(data.mask)).split(micro_batch):
            log_prob, entropy = model(data.features[rows])
            policies = PolicyLogProbs(
                log_prob=log_prob,
                old_log_prob=None if bypass else policy_old[rows],
                rollout_log_prob=rollout[rows],
                ref_log_prob=reference[rows],
            )
            if bypass:
                outputs.append(bypass.policy_loss(policies, data.advantages[rows], data.mask[rows], entropy=entropy))
                bypass.backward(outputs[-1])
                continue
            # A part of the correction brings the configuration, the groups and the denominators of the step.
            part = (step if mini_batch else correction)[rows]
            outputs.append(
                policy_loss(
                    policies, data.advantages[rows], data.mask[rows], loss=loss, correction=part, entropy=entropy
                )
            )
            outputs[-1].loss.backward()
        if bypass:
            outcome = bypass.finish()
    if not bypass:
        for one in (context_group, group):
            sum_gradients(model.parameters(), one)
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    value = torch.stack([output.loss.detach() for output in outputs]).sum()
    own = gather_statistics(merge_statistics([output.statistics for output in outputs]), context_group)
    corrections = [output.correction.statistics for output in outputs if output.correction and bypass]
    measured = gather_statistics(merge_statistics(corrections), group) if bypass else correction.statistics
    return {
        "gradients": gradients,
        "parameters": flat_parameters(model),
        "loss": outcome.loss if bypass else sum_over(sum_over(value, context_group), group),
        "metrics": loss_metrics(gather_statistics(own, group)),
        "correction": finalize(measured.read()),
    }


TINY = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
TRAINER_MICRO_BATCHES = (1, 3)
HAS_TRAINER = find_spec("transformers") is not None  # an extra, which `make test-oldest` leaves out


def flat_parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def trained(group: Any = None, micro_batch: int = 8) -> dict[str, Any]:
    """One step of the reference trainer on 8 responses, in each mode.

    Mini-batches of 7 and 1, and of 3, 3 and 2, so that ranks have uneven numbers of rows and micro-batches, or none.
    """
    from rollcorr.engines.base import GenerationSettings
    from rollcorr.engines.transformers import TransformersEngine
    from rollcorr.train import load_config
    from rollcorr.train.grpo import grpo_trainer as grpo
    from rollcorr.train.grpo import make_task
    from rollcorr.train.grpo.policy import make_tiny_policy
    from rollcorr.train.grpo.tasks import Reward

    def reward(response_ids: list[int], answer: Any, tokenizer: Any, *, bonus_length: Any) -> Reward:
        low = sum(token < 128 for token in response_ids)
        return Reward(low / max(len(response_ids), 1), correct=low > 2)

    grpo.hard_gated_reward = reward
    band = "rollout_rs: token_k1, rollout_rs_threshold: 0.9999_1.0001"
    results = {}
    for mode, correction, mini_batch in (
        ("decoupled", f"{{rollout_is: token, {band}}}", 7),
        ("bypass", f"{{bypass_mode: true, {band}}}", 3),
        ("nothing kept", "{bypass_mode: true, rollout_rs: token_k1, rollout_rs_threshold: 5.0_6.0}", 3),
    ):
        policy = make_tiny_policy(seed=0, **TINY)
        options = (
            "run_dir=unused", "model.path=null", f"model.config={TINY}", "rollout.prompts_per_step=2",
            "rollout.group_size=4", "rollout.max_new_tokens=6", f"optim.mini_batch_size={mini_batch}",
            f"optim.micro_batch_size={micro_batch}", f"algorithm.rollout_correction={correction}",
        )  # fmt: skip
        settings = load_config(None, list(options))
        engine = TransformersEngine(
            policy.model,
            GenerationSettings(
                sampling=settings.rollout.sampling,
                max_new_tokens=settings.rollout.max_new_tokens,
                eos_token_id=policy.eos_token_id,
                pad_token_id=policy.pad_token_id,
            ),
        )
        trainer = grpo.GrpoTrainer(settings, policy, engine, make_task(settings.task), group=group)
        if mode != "nothing kept":  # Adam divides by the gradient's size and would blow up rounding errors.
            trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
        before = flat_parameters(trainer.model)
        result = trainer.step(1)
        results[mode] = {
            "before": before,
            "parameters": flat_parameters(trainer.model),
            "metrics": {k: v for k, v in result.metrics.items() if not k.startswith("perf/")},
            "log_prob": result.log_prob,
        }
    return results


def overlap(group: Any) -> str:
    data = make_data()
    try:
        correct(data.old, data.rollout, data.mask, "disabled", group=group, context_group=group)
    except ValueError as error:
        return str(error)
    return ""


def horizon_fields(per_turn: bool = False) -> dict[str, Any]:
    return {"rollout_is": "horizon", "rollout_is_horizon": 0.7, "rollout_is_horizon_per_turn": per_turn}


def refused(part: Data, group: Any) -> str:
    """Return the error of weights with a horizon on a slice; empty without one."""
    try:
        corrected(part, horizon_fields(), context_group=group)
    except ValueError as error:
        return str(error)
    return ""


def swapped(part: Data, group: Any) -> str:
    """Return the error of a loss on a slice whose correction had swapped policies."""
    correction = correct(part.rollout, part.old, part.mask, "decoupled_token_is", context_group=group)
    policies = PolicyLogProbs(log_prob=part.old + 0.1, old_log_prob=part.old, rollout_log_prob=part.rollout)
    try:
        policy_loss(policies, part.advantages, part.mask, correction=correction)
    except ValueError as error:
        return str(error)
    return ""


def scenarios(rank: int, pairs: list[Any], columns: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Everything that ranks do, under the name that the tests look for."""
    data, world = make_data(), dist.group.WORLD
    groups = {2: (pairs[rank // 2], rank % 2), 4: (world, rank)}
    for size, (group, place) in groups.items():
        yield ("chosen horizon", size), with_chosen_horizon(shard(data, size, place), group=group)
        for name, fields in CONFIGS.items():
            yield ("data", size, name), corrected(shard(data, size, place), fields, group=group)
            for split in IMPLEMENTATIONS:
                for packed in (False, True):
                    for impl in IMPLEMENTATIONS[split]:
                        part = context_slice(data, size, place, split, packed=packed)
                        key = ("context", size, name, split, packed, impl)
                        yield key, corrected(part, fields, context_group=group, impl=impl)
        for mode in LOSSES:
            for micro_batch in MICRO_BATCHES:
                key = ("step", size, mode, micro_batch)
                yield key, optimizer_step(shard(data, size, place), mode, micro_batch, group)
            part = context_slice(data, size, place, "zig-zag", packed=False)
            yield ("context step", size, mode), optimizer_step(part, mode, 2, context_group=group)
        part = context_slice(data, size, place, "zig-zag", packed=False)
        yield ("context swapped", size), swapped(part, group)
        yield ("zig-zag horizon", size), refused(part, group)
        for packed in (False, True):
            part = context_slice(data, size, place, "contiguous", packed=packed)
            for per_turn in (False, True):
                yield (
                    ("context horizon", size, packed, per_turn),
                    corrected(part, horizon_fields(per_turn), context_group=group),
                )
        for micro_batch in TRAINER_MICRO_BATCHES if HAS_TRAINER else ():
            yield ("trainer", size, micro_batch), trained(group, micro_batch)
    both = {"group": columns[rank % 2], "context_group": pairs[rank // 2]}
    part = context_slice(shard(data, 2, rank // 2), 2, rank % 2, "zig-zag", packed=False)
    for name, fields in CONFIGS.items():
        yield ("both", name), corrected(part, fields, **both)
    for mode in LOSSES:
        yield ("both step", mode), optimizer_step(part, mode, 2, **both)
        if not LOSSES[mode][0].get("bypass_mode"):
            yield ("mini-batch step", mode), optimizer_step(part, mode, 2, **both, mini_batch=True)
    yield "overlap", overlap(world)


def run(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/init", rank=rank, world_size=SIZE)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    torch.save(dict(scenarios(rank, pairs, columns)), f"{path}/{rank}.pt")
    dist.destroy_process_group()
