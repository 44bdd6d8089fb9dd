"""The five tasks of the judge: prompts, reward, small decoder, and the numerics of the sampler.

The tasks differ in model, vocabulary, response length, learning rate and precision of the sampler, as the runs of five
users do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from small_decoder import SmallDecoder
from torch import Tensor, nn

PAD, BOS, EOS, MARK, FIRST_DIGIT = 0, 1, 2, 3, 4
STORIES = Path(__file__).resolve().parents[2] / "tests" / "data" / "stories260K"


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a user would have in mind before writing a loop."""

    name: str
    build: Callable[[], nn.Module]
    """The decoder with random weights, or a pretrained one."""
    prompts: Callable[[int, int, torch.Generator], Tensor]
    """(rows, seed of the task, generator) → (rows, P) ids, all of one length."""
    reward: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(prompts, response ids, mask) → (rows,)."""
    answers: Callable[[Tensor, int, torch.Generator], Tensor] | None
    """(prompts, seed, generator) → (rows, R) ids for the supervised start; None starts from pretrained weights."""
    engine: str
    """Numerics of the sampler, see `engine_copy`."""
    width: int
    """Longest response."""
    rows: int = 128
    group: int = 8
    steps: int = 24
    temperature: float = 1.0
    faulty_temperature: float
    """The sampler's temperature in the fault of that name, or the task's own where the trainer forgets to divide."""
    learning_rate: float
    mini_batches: int = 1
    start_steps: int = 160
    start_rate: float = 3e-3


def llama(*, vocabulary: int, width: int, layers: int, dropout: float = 0.1) -> nn.Module:
    """Return a Llama with random weights; its dropout is in the attention and acts in training mode only."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    config = LlamaConfig(vocab_size=vocabulary, num_attention_heads=4, attention_dropout=dropout, **sizes)
    return LlamaForCausalLM(config)


def gpt2(*, vocabulary: int, width: int, layers: int) -> nn.Module:
    """Return a GPT-2 with random weights; dropout 0.1 everywhere is its default."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_embd=width,
        n_layer=layers,
        n_head=4,
        n_positions=64,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return GPT2LMHeadModel(config)


def stories() -> nn.Module:
    """Return the pretrained stories260K with dropout in the attention, which acts in training mode only."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(STORIES, local_files_only=True, attention_dropout=0.1)
    return model.float()


def digits(count: int) -> Callable[[int, int, torch.Generator], Tensor]:
    """Return prompts `BOS d … d MARK` of `count` random digits."""

    def prompts(rows: int, _seed: int, generator: torch.Generator) -> Tensor:
        drawn = torch.randint(FIRST_DIGIT, FIRST_DIGIT + 10, (rows, count), generator=generator)
        return torch.cat([torch.full((rows, 1), BOS), drawn, torch.full((rows, 1), MARK)], dim=1)

    return prompts


def copied(prompts: Tensor, _seed: int, _generator: torch.Generator) -> Tensor:
    """Return the digits of the prompt, then EOS."""
    return torch.cat([prompts[:, 1:-1], torch.full((len(prompts), 1), EOS)], dim=1)


def reversed_digits(prompts: Tensor, _seed: int, _generator: torch.Generator) -> Tensor:
    """Return the digits of the prompt from last to first, then EOS."""
    return torch.cat([prompts[:, 1:-1].flip(1), torch.full((len(prompts), 1), EOS)], dim=1)


def sums(prompts: Tensor, _seed: int, _generator: torch.Generator) -> Tensor:
    """Return both numbers from their last digit on, their sum in the same order, and EOS: 17 tokens."""
    first, second = (prompts[:, 1:-1] - FIRST_DIGIT).split(4, dim=1)
    powers = 10 ** torch.arange(3, -1, -1)
    total = (first * powers).sum(1) + (second * powers).sum(1)
    result = torch.stack([total // 10**place % 10 for place in range(5)], dim=1)
    mark, end = torch.full((len(prompts), 1), MARK), torch.full((len(prompts), 1), EOS)
    parts = [first.flip(1) + FIRST_DIGIT, mark, second.flip(1) + FIRST_DIGIT, mark, result + FIRST_DIGIT, end]
    return torch.cat(parts, dim=1)


def matches(answers: Callable[[Tensor, int, torch.Generator], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the reward "share of the answer's tokens that the response has in their place"."""

    def reward(prompts: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        right = answers(prompts, 0, torch.Generator())
        width = min(right.shape[1], ids.shape[1])
        return ((ids == PAD) == 0)[:, :width].logical_and(ids[:, :width] == right[:, :width]).float().mean(1)

    return reward


def chains(prompts: Tensor, seed: int, generator: torch.Generator, *, length: int = 40, kinds: int = 64) -> Tensor:
    """Continue each prompt for 40 tokens in the language of `seed`: every id has four successors, EOS is one in 50."""
    # The language: four successors of each id.
    seeded = [torch.Generator().manual_seed(seed * 997 + i) for i in range(kinds)]
    table = torch.stack([torch.randperm(kinds - MARK, generator=one)[:4] for one in seeded])
    shares, last, ids = torch.tensor([0.5, 0.25, 0.15, 0.1]), prompts[:, -1], []
    for _ in range(length):
        last = table[last, torch.multinomial(shares.expand(len(last), 4), 1, generator=generator)[:, 0]] + MARK
        last = last.where(torch.rand(len(last), generator=generator) > 0.02, EOS)
        ids.append(last)
    return torch.stack(ids, dim=1)


def chain_prompts(rows: int, seed: int, generator: torch.Generator) -> Tensor:
    """Return `BOS` and three tokens of the language of `seed`."""
    first = torch.randint(MARK, 64, (rows, 1), generator=generator)
    begun = torch.cat([torch.full((rows, 1), BOS), first, chains(first, seed, generator, length=2)], dim=1)
    return begun.where(begun != EOS, MARK)


def favored(_prompts: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Return the share of tokens with an odd id."""
    return ((ids % 2 == 1) & mask).sum(1) / mask.sum(1)


def story_prompts(rows: int, _seed: int, generator: torch.Generator) -> Tensor:
    """Return `BOS Once upon a time` or one of two other openings, and a random common word."""
    openings = torch.tensor([[1, 403, 407, 261, 378], [1, 317, 327, 338, 312], [1, 291, 391, 261, 360]])
    word = torch.randint(259, 400, (rows, 1), generator=generator)
    return torch.cat([openings[torch.randint(0, 3, (rows,), generator=generator)], word], dim=1)


def distinct(_prompts: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Return the number of different ids divided by the response's length: repetition costs."""
    counts = [row[kept].unique().numel() / max(int(kept.sum()), 1) for row, kept in zip(ids, mask, strict=True)]
    return torch.tensor(counts)


TASKS = {
    task.name: task
    for task in (
        Task(
            name="copy",
            build=lambda: llama(vocabulary=14, width=48, layers=2),
            prompts=digits(8),
            answers=copied,
            reward=matches(copied),
            engine="bf16",
            width=12,
            steps=20,
            faulty_temperature=0.6,
            learning_rate=1e-3,
            start_steps=60,
        ),
        Task(
            name="reverse",
            build=lambda: llama(vocabulary=14, width=64, layers=2),
            prompts=digits(10),
            answers=reversed_digits,
            reward=matches(reversed_digits),
            engine="bf16",
            width=11,
            temperature=0.7,
            faulty_temperature=0.7,
            learning_rate=5e-4,
            start_steps=110,
        ),
        Task(
            name="arithmetic",
            build=lambda: gpt2(vocabulary=14, width=64, layers=3),
            prompts=digits(8),
            answers=sums,
            reward=matches(sums),
            engine="int8",
            width=18,
            group=16,
            temperature=0.8,
            faulty_temperature=0.8,
            learning_rate=1e-3,
            start_steps=140,
        ),
        Task(
            name="ngram",
            build=lambda: SmallDecoder(vocabulary=64, width=64, layers=2, heads=2, positions=64),
            prompts=chain_prompts,
            answers=chains,
            reward=favored,
            engine="fp16",
            width=40,
            rows=64,
            faulty_temperature=0.7,
            learning_rate=3e-4,
            mini_batches=2,
        ),
        Task(
            name="stories",
            build=stories,
            prompts=story_prompts,
            answers=None,
            reward=distinct,
            engine="bf16_fp32_head",
            width=40,
            rows=64,
            steps=20,
            temperature=0.8,
            faulty_temperature=0.8,
            learning_rate=2e-4,
        ),
    )
}
"""The tasks by name."""
