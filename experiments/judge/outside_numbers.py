"""Outside faults between the two sides: right log-probs are changed, replaced or moved."""

from __future__ import annotations

import math

import torch
from judge_engine import Rollout, engine_copy
from judge_tasks import PAD
from outside_lab import END, Bench, Scored
from outside_sampler import Fault
from torch import Tensor


def reported_as(bench: Bench, prompts: Tensor, rollout: Rollout, log_prob: Tensor, planted: Tensor) -> Scored:
    """Return a correct group whose sampler's log-probs arrive as `log_prob`."""
    train = bench.score(prompts, rollout.ids)
    clean = rollout.log_prob, train
    return Scored(prompts, rollout._replace(log_prob=log_prob), train, planted.expand_as(rollout.mask), clean)


def clamped_at_4(bench: Bench, prompts: Tensor) -> Scored:
    """The sampler's log-probs are clamped at −4."""
    rollout = bench.sample(prompts)
    return reported_as(bench, prompts, rollout, rollout.log_prob.clamp(min=-4.0), rollout.log_prob < -4.0)


def clamped_at_1e3(bench: Bench, prompts: Tensor) -> Scored:
    """The sampler's log-probs are clamped at log 1e-3."""
    rollout, floor = bench.sample(prompts), math.log(1e-3)
    return reported_as(bench, prompts, rollout, rollout.log_prob.clamp(min=floor), rollout.log_prob < floor)


def top_values(bench: Bench, prompts: Tensor, rollout: Rollout, k: int) -> Tensor:
    """Return the log-prob of the k-th most likely id at each response token, by the correct engine: (B, T)."""
    logits = bench.logits(prompts, rollout.ids, model=bench.engine)
    return logits.log_softmax(-1).topk(k, dim=-1).values[..., -1]


def top_1(bench: Bench, prompts: Tensor) -> Scored:
    """The client logs the largest of the returned log-probs, not that of the sampled token."""
    rollout = bench.sample(prompts)
    values = top_values(bench, prompts, rollout, 1)
    others = (values - rollout.log_prob).abs() > 0.05
    return reported_as(bench, prompts, rollout, values, others)


def kth_of_top_k(bench: Bench, prompts: Tensor) -> Scored:
    """The client logs the last of two returned log-probs."""
    rollout = bench.sample(prompts)
    return reported_as(bench, prompts, rollout, top_values(bench, prompts, rollout, 2), torch.ones(1, 1).bool())


def rounded(bench: Bench, prompts: Tensor) -> Scored:
    """The client rounds log-probs to one decimal."""
    rollout = bench.sample(prompts)
    return reported_as(bench, prompts, rollout, (rollout.log_prob * 10).round() / 10, torch.ones(1, 1).bool())


def stop_string(bench: Bench, prompts: Tensor) -> Scored:
    """In 40 % of the rows a stop string of two tokens was trimmed: later log-probs are two tokens late."""
    rollout = bench.sample(prompts, eos=-1)
    late = bench.some_rows(len(prompts), 0.4)[:, None] & (torch.arange(rollout.ids.shape[1]) >= 12)
    moved = torch.where(late, rollout.log_prob.roll(2, 1), rollout.log_prob)
    return reported_as(bench, prompts, rollout, moved, late)


def first_token_raw(bench: Bench, prompts: Tensor) -> Scored:
    """The prefill returns the first token's log-prob at temperature 2, the decoder the others correctly."""
    rollout = bench.sample(prompts)
    first = (bench.logits(prompts, rollout.ids, model=bench.engine)[:, 0] / 2).log_softmax(-1)
    log_prob = rollout.log_prob.clone()
    log_prob[:, 0] = first.gather(1, rollout.ids[:, :1])[:, 0]
    return reported_as(bench, prompts, rollout, log_prob, torch.arange(rollout.ids.shape[1]) == 0)


def speculative_draft(bench: Bench, prompts: Tensor) -> Scored:
    """For 60 % of the tokens the log-prob is that of the draft model, which proposed them."""
    rollout = bench.sample(prompts)
    draft = bench.score(prompts, rollout.ids, model=engine_copy(bench.trainer, "int4"))
    proposed = torch.rand(rollout.ids.shape, generator=bench.generator) < 0.6
    return reported_as(bench, prompts, rollout, torch.where(proposed, draft, rollout.log_prob), proposed)


def token_after_end(bench: Bench, prompts: Tensor) -> Scored:
    """The mask includes the pad token after the end, for which the client logs the log-prob of the end."""
    rollout = bench.sample(prompts)
    ended = (rollout.ids == END) & rollout.mask
    after = torch.nn.functional.pad(ended, (1, 0))
    log_prob = torch.nn.functional.pad(rollout.log_prob, (0, 1))
    log_prob = torch.where(after, log_prob.roll(1, 1), log_prob)
    ids = torch.nn.functional.pad(rollout.ids, (0, 1), value=PAD)
    wide = Rollout(ids, log_prob, torch.nn.functional.pad(rollout.mask, (0, 1)) | after)

    # No correct log has these tokens: all of their mismatch is an excess.
    train = bench.score(prompts, ids)
    clean = torch.where(after, train, log_prob), train
    return Scored(prompts, wide, train, after, clean)


NUMBER_FAULTS: tuple[Fault, ...] = (
    clamped_at_4,
    clamped_at_1e3,
    top_1,
    kth_of_top_k,
    rounded,
    stop_string,
    first_token_raw,
    speculative_draft,
    token_after_end,
)
"""The faults of this file."""
