"""Outside faults of the trainer: the context that it scores, and the arithmetic of its log-probs."""

from __future__ import annotations

import copy
from typing import Any

import torch
from judge_engine import Rollout
from judge_tasks import PAD
from outside_lab import END, PROMPT_LENGTHS, Bench, Scored
from outside_sampler import Fault
from torch import Tensor, nn


def scored(bench: Bench, prompts: Tensor, train: Tensor, rollout: Rollout, planted: Tensor) -> Scored:
    """Return a group whose sampler is right."""
    return Scored(prompts, rollout, train, planted.expand_as(rollout.mask))


def positions(rollout: Rollout) -> Tensor:
    """Return 0 … T − 1."""
    return torch.arange(rollout.ids.shape[1])


EVERYWHERE = torch.ones(1, 1, dtype=torch.bool)


def system_prompt_lost(bench: Bench, prompts: Tensor) -> Scored:
    """The trainer scores 30 % of the rows without the system prompt in front."""
    system = bench.draw_prompts(12, 1).expand(len(prompts), -1)
    whole = torch.cat([system, prompts[:, 1:]], dim=1)
    rollout = bench.sample(whole)
    rows = bench.some_rows(len(prompts), 0.3)[:, None]
    right, wrong = bench.score(whole, rollout.ids), bench.score(prompts, rollout.ids)
    return Scored(whole, rollout, torch.where(rows, wrong, right), rows.expand_as(rollout.mask))


def pads_attended(bench: Bench, prompts: Tensor) -> Scored:
    """In a quarter of the rows the trainer attends to the padding in front of shorter prompts."""
    rollout = bench.sample(prompts)
    missing = max(PROMPT_LENGTHS) - prompts.shape[1]
    padded = torch.cat([torch.full((len(prompts), missing), PAD), prompts], dim=1)
    rows = bench.some_rows(len(prompts), 0.25)[:, None] & (missing > 0)
    right, wrong = bench.score(prompts, rollout.ids), bench.score(padded, rollout.ids)
    return scored(bench, prompts, torch.where(rows, wrong, right), rollout, rows)


def eos_as_pad(bench: Bench, prompts: Tensor) -> Scored:
    """The trainer's labels have another id in place of the end: the pad, or "!" with seed 1."""
    rollout = bench.sample(prompts)
    log_prob = bench.logits(prompts, rollout.ids).log_softmax(-1)
    labels = rollout.ids.masked_fill(rollout.ids == END, (PAD, 443)[bench.seed % 2])
    train = log_prob.gather(-1, labels[..., None])[..., 0]
    return scored(bench, prompts, train, rollout, rollout.ids == END)


def logits_not_shifted(bench: Bench, prompts: Tensor) -> Scored:
    """The trainer takes the logits after a token for the token itself."""
    rollout = bench.sample(prompts)
    tokens = torch.cat([prompts, rollout.ids], dim=1)
    logits = bench.trainer(input_ids=tokens).logits[:, prompts.shape[1] :] / bench.temperature
    train = logits.log_softmax(-1).gather(-1, rollout.ids[..., None])[..., 0]
    return scored(bench, prompts, train, rollout, EVERYWHERE)


def bf16_log_softmax(bench: Bench, prompts: Tensor) -> Scored:
    """The trainer computes the log-softmax in bfloat16."""
    rollout = bench.sample(prompts)
    log_prob = bench.logits(prompts, rollout.ids).bfloat16().log_softmax(-1)
    train = log_prob.gather(-1, rollout.ids[..., None])[..., 0].float()
    return scored(bench, prompts, train, rollout, EVERYWHERE)


def prompt_truncated(bench: Bench, prompts: Tensor) -> Scored:
    """The trainer keeps the last 12 tokens of a prompt."""
    rollout = bench.sample(prompts)
    train = bench.score(prompts[:, -12:], rollout.ids)
    return scored(bench, prompts, train, rollout, EVERYWHERE & (prompts.shape[1] > 12))


def turns(bench: Bench, prompts: Tensor, *, count: int, width: int = 8, tool: int = 6) -> tuple[Rollout, Tensor]:
    """Sample `count` turns of `width` tokens with a tool's answer between them.

    Returns:
        The response, masked on the tool's tokens, and the turn of each token: (T,), from 1 on, 0 on the tool's.
    """
    context, parts, numbers = prompts, [], []
    for turn in range(1, count + 1):
        part = bench.sample(context, width=width, eos=-1)
        parts.append(part)
        numbers += [turn] * width
        context = torch.cat([context, part.ids], dim=1)
        if turn < count:
            answer = torch.randint(259, 512, (len(prompts), tool), generator=bench.generator)
            parts.append(Rollout(answer, torch.zeros(answer.shape), torch.zeros(answer.shape, dtype=torch.bool)))
            numbers += [0] * tool
            context = torch.cat([context, answer], dim=1)
    joined = Rollout(*(torch.cat([part[i] for part in parts], dim=1) for i in range(3)))
    return joined, torch.tensor(numbers)


def tool_tokens(bench: Bench, prompts: Tensor) -> Scored:
    """The mask includes the tool's tokens, which the engine scored when it read them."""
    rollout, turn = turns(bench, prompts, count=3)
    tools = (turn == 0).expand_as(rollout.mask)
    read = bench.score(prompts, rollout.ids, model=bench.engine)
    rollout = Rollout(rollout.ids, torch.where(tools, read, rollout.log_prob), torch.ones_like(rollout.mask))

    # A correct log contains no tool's token, so their whole mismatch is an excess.
    train = bench.score(prompts, rollout.ids)
    clean = torch.where(tools, train, rollout.log_prob), train
    return Scored(prompts, rollout, train, tools, clean)


def reasoning_stripped(bench: Bench, prompts: Tensor) -> Scored:
    """The trainer's chat template leaves the first five tokens of every earlier turn out of the context."""
    rollout, turn = turns(bench, prompts, count=3)
    train = bench.score(prompts, rollout.ids)
    for number in (2, 3):
        begin = int((turn == number).nonzero()[0])
        first_of_turn = torch.arange(begin) % 14 < 5
        kept = rollout.ids[:, :begin][:, ~first_of_turn]
        own = turn == number
        train[:, own] = bench.score(torch.cat([prompts, kept], dim=1), rollout.ids[:, own])
    return scored(bench, prompts, train, rollout, turn >= 2)


def tool_answer_cut(bench: Bench, prompts: Tensor, *, turn_of_onset: int, count: int = 6) -> Scored:
    """The trainer sees half of the tool's answer before turn k: every turn from k on has another context."""
    rollout, turn = turns(bench, prompts, count=count)
    begin = int((turn == turn_of_onset).nonzero()[0])
    kept = torch.ones(rollout.ids.shape[1], dtype=torch.bool)
    kept[begin - 3 : begin] = False
    train = bench.score(prompts, rollout.ids)
    train[:, begin:] = bench.score(
        torch.cat([prompts, rollout.ids[:, :begin][:, kept[:begin]]], 1), rollout.ids[:, begin:]
    )
    return scored(bench, prompts, train, rollout, turn >= turn_of_onset)


def retokenized(bench: Bench, prompts: Tensor) -> Scored:
    """The trainer tokenizes the text again: four tokens of a row become other tokens of the same length."""
    rollout = bench.sample(prompts, eos=-1)
    where = torch.rand(rollout.ids.shape, generator=bench.generator).argsort(1) < 4
    # A second tokenization leaves rare pieces, often single letters: they lie above 410.
    others = torch.randint(411, 470, rollout.ids.shape, generator=bench.generator)
    ids = torch.where(where, others, rollout.ids)
    return scored(bench, prompts, bench.score(prompts, ids), rollout, where)


def edited(bench: Bench, **changes: Any) -> nn.Module:  # noqa: ANN401 - values of a configuration
    """Return the trainer's model built anew with changes of its configuration."""
    config = copy.deepcopy(bench.trainer.config)
    for name, value in changes.items():
        setattr(config, name, value)
    model = type(bench.trainer)(config).eval().requires_grad_(False)
    model.load_state_dict(bench.trainer.state_dict())
    return model


def rope_base(bench: Bench, prompts: Tensor) -> Scored:
    """The trainer's rotary base is 20,000 instead of 10,000."""
    rollout = bench.sample(prompts)
    model = edited(bench, rope_parameters={"rope_type": "default", "rope_theta": 20_000.0})
    return scored(bench, prompts, bench.score(prompts, rollout.ids, model=model), rollout, EVERYWHERE)


def with_mask(bench: Bench, prompts: Tensor, ids: Tensor, hidden: Tensor) -> Tensor:
    """Return log π with some of the context hidden: `hidden` (P + T, P + T) is True where a query must not look."""
    tokens = torch.cat([prompts, ids], dim=1)
    total = tokens.shape[1]
    visible = torch.ones(total, total, dtype=torch.bool).tril() & ~hidden
    bias = torch.zeros(total, total).masked_fill(~visible, torch.finfo(torch.float32).min)
    logits = bench.trainer(input_ids=tokens, attention_mask=bias.expand(len(tokens), 1, -1, -1)).logits
    logits = logits[:, prompts.shape[1] - 1 : -1] / bench.temperature
    return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def sliding_window(bench: Bench, prompts: Tensor) -> Scored:
    """The trainer's attention looks back 16 tokens only."""
    rollout = bench.sample(prompts)
    total = prompts.shape[1] + rollout.ids.shape[1]
    distance = torch.arange(total)[:, None] - torch.arange(total)
    train = with_mask(bench, prompts, rollout.ids, distance >= 16)
    return scored(bench, prompts, train, rollout, positions(rollout) + prompts.shape[1] > 16)


def context_parallel(bench: Bench, prompts: Tensor) -> Scored:
    """A ring of the trainer's context parallelism drops a block: from token 12 on, the first six are not seen."""
    rollout = bench.sample(prompts)
    begun, total = prompts.shape[1], prompts.shape[1] + rollout.ids.shape[1]
    index = torch.arange(total)
    lost = (index[None, :] >= begun) & (index[None, :] < begun + 6) & (index[:, None] >= begun + 11)
    train = with_mask(bench, prompts, rollout.ids, lost)
    return scored(bench, prompts, train, rollout, positions(rollout) >= 12)


def position_gap(bench: Bench, prompts: Tensor) -> Scored:
    """The trainer pads prompts on the right and counts positions over the padding."""
    rollout = bench.sample(prompts)
    gap = max(PROMPT_LENGTHS) - prompts.shape[1]
    index = torch.arange(prompts.shape[1] + rollout.ids.shape[1])
    index = index + gap * (index >= prompts.shape[1])
    logits = bench.trainer(
        input_ids=torch.cat([prompts, rollout.ids], dim=1), position_ids=index.expand(len(prompts), -1)
    ).logits[:, prompts.shape[1] - 1 : -1]
    train = (logits / bench.temperature).log_softmax(-1).gather(-1, rollout.ids[..., None])[..., 0]
    return scored(bench, prompts, train, rollout, EVERYWHERE & (gap > 0))


def packed_attention(bench: Bench, prompts: Tensor) -> Scored:
    """The trainer packs two rows without separating them: every second row sees the one before."""
    rollout = bench.sample(prompts)
    train = bench.score(prompts, rollout.ids)
    second = torch.arange(len(prompts)) % 2 == 1
    for row in second.nonzero()[:, 0].tolist():
        before = rollout.ids[row - 1][rollout.mask[row - 1]]
        packed = torch.cat([prompts[row - 1], before, prompts[row]])[None]
        train[row] = bench.score(packed, rollout.ids[row : row + 1])[0]
    return scored(bench, prompts, train, rollout, second[:, None])


def vocabulary_padding(bench: Bench, prompts: Tensor) -> Scored:
    """The trainer's head is padded to 576 rows, which have random weights and stay in the softmax."""
    rollout = bench.sample(prompts)
    logits = bench.logits(prompts, rollout.ids)
    hidden = bench.trainer.model(input_ids=torch.cat([prompts, rollout.ids], dim=1)).last_hidden_state
    size = bench.trainer.lm_head.weight.std()
    rows = size * torch.randn(hidden.shape[-1], 64, generator=torch.Generator().manual_seed(31))
    extra = hidden[:, prompts.shape[1] - 1 : -1] @ rows / bench.temperature
    padded = torch.cat([logits, extra], dim=-1)
    train = padded.log_softmax(-1).gather(-1, rollout.ids[..., None])[..., 0]
    return scored(bench, prompts, train, rollout, EVERYWHERE)


def soft_cap(bench: Bench, prompts: Tensor) -> Scored:
    """The trainer applies a soft cap of 30 to the logits, the engine does not."""
    rollout = bench.sample(prompts)
    logits = 30 * torch.tanh(bench.logits(prompts, rollout.ids) * bench.temperature / 30) / bench.temperature
    train = logits.log_softmax(-1).gather(-1, rollout.ids[..., None])[..., 0]
    return scored(bench, prompts, train, rollout, EVERYWHERE)


def sequence_parallel(bench: Bench, prompts: Tensor) -> Scored:
    """The trainer scores the last token of each block of eight with the label of the token after it."""
    rollout = bench.sample(prompts)
    log_prob = bench.logits(prompts, rollout.ids).log_softmax(-1)
    edge = positions(rollout) % 8 == 7
    labels = torch.where(edge, rollout.ids.roll(-1, 1), rollout.ids)
    return scored(bench, prompts, log_prob.gather(-1, labels[..., None])[..., 0], rollout, edge)


def vocabulary_shard(bench: Bench, prompts: Tensor) -> Scored:
    """One of four shards of the trainer's head has logits of 0.8 times their value: the ids from 384 on."""
    rollout = bench.sample(prompts)
    scale = torch.ones(512).index_fill(0, torch.arange(384, 512), 0.8)
    train = (bench.logits(prompts, rollout.ids) * scale).log_softmax(-1).gather(-1, rollout.ids[..., None])[..., 0]
    return scored(bench, prompts, train, rollout, rollout.ids >= 384)


SPECIAL = (426, 432, 443, 450)
"""Four ids whose rows of the head were added later: . , ! ?"""


def special_ids(bench: Bench, prompts: Tensor) -> Scored:
    """The head's rows of four ids were never loaded into the trainer: their logits are too small by 3."""
    rollout = bench.sample(prompts)
    shift = torch.zeros(512).index_fill(0, torch.tensor(SPECIAL), -3.0)
    train = (bench.logits(prompts, rollout.ids) + shift).log_softmax(-1).gather(-1, rollout.ids[..., None])[..., 0]
    return scored(bench, prompts, train, rollout, torch.isin(rollout.ids, torch.tensor(SPECIAL)))


TRAINER_FAULTS: tuple[Fault, ...] = (
    system_prompt_lost,
    pads_attended,
    eos_as_pad,
    logits_not_shifted,
    bf16_log_softmax,
    prompt_truncated,
    tool_tokens,
    retokenized,
    reasoning_stripped,
    rope_base,
    soft_cap,
    sliding_window,
    position_gap,
    packed_attention,
    vocabulary_padding,
    context_parallel,
    sequence_parallel,
    vocabulary_shard,
    special_ids,
)
"""The faults of this file."""
