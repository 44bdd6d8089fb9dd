"""Outside faults of the sampler: what it draws from, what it caches, and which weights it has."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from judge_engine import Rollout, engine_copy
from outside_lab import END, WIDTH, Bench, Scored, with_update
from torch import Tensor, nn

Fault = Callable[[Bench, Tensor], Scored]


def seen_ids(ids: Tensor, vocabulary: int) -> Tensor:
    """Return how often each id occurs in each row: (B, V)."""
    return torch.zeros(len(ids), vocabulary).scatter_add(1, ids, torch.ones(ids.shape))


def seen_tokens(prompts: Tensor, ids: Tensor, *, with_prompt: bool) -> Tensor:
    """Return True where a response token occurs earlier in the response, or in the prompt: (B, T)."""
    context = torch.cat([prompts, ids], dim=1) if with_prompt else ids
    first = prompts.shape[1] if with_prompt else 0
    return torch.stack([(context[:, : first + t] == ids[:, t : t + 1]).any(1) for t in range(ids.shape[1])], dim=1)


def drawn(bench: Bench, prompts: Tensor, change: Callable[[Tensor, Tensor], Tensor]) -> Scored:
    """Return a group that was drawn from changed logits and scored without the change; planted everywhere."""
    rollout = bench.sample(prompts, drawn_from=change)
    return Scored(prompts, rollout, bench.score(prompts, rollout.ids), torch.ones_like(rollout.mask))


def penalized(logits: Tensor, ids: Tensor, penalty: float) -> Tensor:
    """Divide positive logits of seen ids by the penalty and multiply negative ones."""
    lower = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen_ids(ids, logits.shape[1]) > 0, lower, logits)


def repetition_penalty(bench: Bench, prompts: Tensor) -> Scored:
    """The engine reads `repetition_penalty: 1.1` from the model's generation config."""
    group = drawn(bench, prompts, lambda logits, ids: penalized(logits, ids, 1.1))
    return group._replace(planted=seen_tokens(prompts, group.rollout.ids, with_prompt=True))


def presence_penalty(bench: Bench, prompts: Tensor) -> Scored:
    """The engine subtracts 0.6 from the logits of ids that the response contains."""

    def change(logits: Tensor, ids: Tensor) -> Tensor:
        present = seen_ids(ids[:, prompts.shape[1] :], logits.shape[1]) > 0
        return logits - 0.6 / bench.temperature * present

    group = drawn(bench, prompts, change)
    return group._replace(planted=seen_tokens(prompts, group.rollout.ids, with_prompt=False))


def raw_penalty(bench: Bench, prompts: Tensor) -> Scored:
    """The engine draws with repetition penalty 1.3 and reports log-probs from before it."""
    rollout = bench.sample(
        prompts, drawn_from=lambda logits, ids: penalized(logits, ids, 1.3), reported=lambda logits, _ids: logits
    )
    return Scored(prompts, rollout, bench.score(prompts, rollout.ids), torch.ones_like(rollout.mask))


BIASED = (261, 265, 267, 269, 276)
"""Five common ids: " a", " the", " to", " and", " was"."""


def logit_bias(bench: Bench, prompts: Tensor) -> Scored:
    """A logit bias of +3 on five ids is left in the engine's defaults."""
    bias = torch.zeros(512).index_fill(0, torch.tensor(BIASED), 3.0 / bench.temperature)
    group = drawn(bench, prompts, lambda logits, _ids: logits + bias)
    return group._replace(planted=torch.isin(group.rollout.ids, torch.tensor(BIASED)))


def bad_words(bench: Bench, prompts: Tensor) -> Scored:
    """Five common ids are banned in the engine."""
    group = drawn(bench, prompts, lambda logits, _ids: logits.index_fill(1, torch.tensor(BIASED), -torch.inf))
    mass = bench.logits(prompts, group.rollout.ids).softmax(-1)[..., list(BIASED)].sum(-1)
    return group._replace(planted=mass > 0.02)


def guided_start(bench: Bench, prompts: Tensor) -> Scored:
    """A grammar restricts the first three tokens to ids below 300."""
    begun = prompts.shape[1]

    def change(logits: Tensor, ids: Tensor) -> Tensor:
        restricted = ids.shape[1] < begun + 3
        return logits.index_fill(1, torch.arange(300, 512), -torch.inf) if restricted else logits

    group = drawn(bench, prompts, change)
    return group._replace(planted=(torch.arange(group.rollout.ids.shape[1]) < 3).expand_as(group.planted))


def min_new_tokens(bench: Bench, prompts: Tensor) -> Scored:
    """The engine bans the end of the response for 12 tokens."""
    end = torch.tensor([END])
    limit = prompts.shape[1] + 12
    group = drawn(
        bench, prompts, lambda logits, ids: logits.index_fill(1, end, -torch.inf) if ids.shape[1] < limit else logits
    )
    return group._replace(planted=(torch.arange(group.rollout.ids.shape[1]) < 12).expand_as(group.planted))


FORCED_POSITION, FORCED = 10, 432
"""A budget forces a comma as the eleventh token."""


def forced_token(bench: Bench, prompts: Tensor) -> Scored:
    """The engine forces a token at one position and reports 0 for it."""

    def change(logits: Tensor, ids: Tensor) -> Tensor:
        if ids.shape[1] != prompts.shape[1] + FORCED_POSITION:
            return logits
        return torch.full_like(logits, -torch.inf).index_fill(1, torch.tensor([FORCED]), 0.0)

    group = drawn(bench, prompts, change)
    return group._replace(
        planted=(torch.arange(group.rollout.ids.shape[1]) == FORCED_POSITION).expand_as(group.planted)
    )


def cache_in(round_values: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    """Return a hook that rounds the newest keys and values of a cache."""
    done = 0

    def hook(cache: Any) -> None:  # noqa: ANN401 - the cache of transformers
        nonlocal done
        total = cache.layers[0].keys.shape[2]
        for layer in cache.layers:
            for values in (layer.keys, layer.values):
                values[:, :, done:] = round_values(values[:, :, done:])
        done = total

    return hook


def fp8_kv_cache(bench: Bench, prompts: Tensor) -> Scored:
    """Keys and values are kept in float8 (e4m3)."""
    hook = cache_in(lambda values: values.to(torch.float8_e4m3fn).to(values.dtype))
    rollout = bench.sample(prompts, after_step=hook)
    return Scored(prompts, rollout, bench.score(prompts, rollout.ids), torch.ones_like(rollout.mask))


def sampled_by(bench: Bench, prompts: Tensor, model: nn.Module, trainer: nn.Module | None = None) -> Scored:
    """Return a group that `model` sampled (in bfloat16) and `trainer` scored; planted everywhere."""
    rollout = bench.sample(prompts, model=engine_copy(model, "bf16"))
    chosen = trainer or bench.trainer
    train = bench.score(prompts, rollout.ids, model=chosen)
    clean = bench.score(prompts, rollout.ids, model=engine_copy(chosen, "bf16")), train
    return Scored(prompts, rollout, train, torch.ones_like(rollout.mask), clean)


def joined(first: Rollout, second: Rollout, rows: Tensor) -> Rollout:
    """Return `second` in the chosen rows and `first` in the others."""
    width = max(first.ids.shape[1], second.ids.shape[1])
    wide = [Rollout(*(nn.functional.pad(x, (0, width - x.shape[1])) for x in rollout)) for rollout in (first, second)]
    return Rollout(*(torch.where(rows[:, None], new, old) for old, new in zip(*wide, strict=True)))


def stale_replica(bench: Bench, prompts: Tensor) -> Scored:
    """One of four replicas has the weights of an older step: a quarter of the rows."""
    old = engine_copy(with_update(bench.trainer, rank=8, size=0.1, seed=11), "bf16")
    rows = bench.some_rows(len(prompts), 0.25)
    rollout = joined(bench.sample(prompts), bench.sample(prompts, model=old), rows)
    return Scored(prompts, rollout, bench.score(prompts, rollout.ids), rows[:, None].expand_as(rollout.mask))


def in_flight_update(bench: Bench, prompts: Tensor) -> Scored:
    """The engine gets new weights while it decodes: tokens from the ninth on are of the next policy."""
    new = engine_copy(with_update(bench.trainer, rank=8, size=0.1, seed=12), "bf16")
    first = bench.sample(prompts, width=8)
    rest = bench.sample(torch.cat([prompts, first.ids], dim=1), model=new, width=WIDTH - 8)

    # Rows that ended within the first part stay as they are.
    alive = first.mask.all(1) & (first.ids[:, -1] != END) & (first.ids.shape[1] == 8)
    parts = [
        torch.cat([a, b.where(alive[:, None], torch.zeros_like(b))], dim=1) for a, b in zip(first, rest, strict=True)
    ]
    rollout = Rollout(*parts)
    late = (torch.arange(rollout.ids.shape[1]) >= first.ids.shape[1]).expand_as(rollout.mask)
    return Scored(prompts, rollout, bench.score(prompts, rollout.ids), late)


def head_not_synced(bench: Bench, prompts: Tensor) -> Scored:
    """The head shares its weight with the embedding; the sync updates the embedding only."""
    model = copy.deepcopy(bench.trainer)
    model.lm_head = copy.deepcopy(model.lm_head)
    noise = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(13))
    with torch.no_grad():
        model.lm_head.weight.add_(0.03 * noise * model.lm_head.weight.norm() / noise.norm())
    return sampled_by(bench, prompts, model)


def lora_doubled(bench: Bench, prompts: Tensor) -> Scored:
    """The engine applies the adapter with twice its scale."""
    return sampled_by(
        bench,
        prompts,
        with_update(bench.trainer, rank=4, size=0.1, seed=14, scale=2.0),
        with_update(bench.trainer, rank=4, size=0.1, seed=14),
    )


def lora_not_merged(bench: Bench, prompts: Tensor) -> Scored:
    """The engine samples from the base model, without the adapter."""
    return sampled_by(bench, prompts, bench.trainer, with_update(bench.trainer, rank=4, size=0.1, seed=15))


def int4_layer(bench: Bench, prompts: Tensor) -> Scored:
    """One of the five layers is quantized to 4 bits in the engine."""
    model = copy.deepcopy(bench.trainer)
    model.model.layers[2] = engine_copy(model.model.layers[2], "int4")
    return sampled_by(bench, prompts, model)


def prefix_collision(bench: Bench, prompts: Tensor) -> Scored:
    """A fifth of the rows hit the cached prefix of another prompt, all but its last two tokens."""
    rows = bench.some_rows(len(prompts), 0.2)
    other = torch.cat([prompts.roll(1, 0)[:, :-2], prompts[:, -2:]], dim=1)
    rollout = joined(bench.sample(prompts), bench.sample(other), rows)
    return Scored(prompts, rollout, bench.score(prompts, rollout.ids), rows[:, None].expand_as(rollout.mask))


def chunked_prefill(bench: Bench, prompts: Tensor) -> Scored:
    """The engine loses the first chunk of eight tokens of prompts that are longer than 16."""
    if prompts.shape[1] <= 16:
        return bench.correct(prompts)
    rollout = bench.sample(prompts[:, 8:])
    return Scored(prompts, rollout, bench.score(prompts, rollout.ids), torch.ones_like(rollout.mask))


SAMPLER_FAULTS: tuple[Fault, ...] = (
    repetition_penalty,
    presence_penalty,
    fp8_kv_cache,
    raw_penalty,
    logit_bias,
    bad_words,
    guided_start,
    min_new_tokens,
    forced_token,
    stale_replica,
    in_flight_update,
    head_not_synced,
    lora_doubled,
    lora_not_merged,
    int4_layer,
    prefix_collision,
    chunked_prefill,
)
"""The faults of this file."""
