"""Rollouts of an active null without a run: sample and score with the same weights, or score twice.

A model's weights are loaded once. The engine copies them, as in a run, and samples responses. Then two log-probs
of each token are compared; `SIDES` lists the pairs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rollcorr.config import SamplingSpec
from rollcorr.engines.base import Rollout
from rollcorr.train.grpo.actor import Actor
from rollcorr.train.grpo.engine_choice import CLASSES, make_engine
from rollcorr.train.grpo.grpo_config import GrpoConfig, RolloutConfig
from rollcorr.train.grpo.policy import Policy, read_model, read_policy
from rollcorr.train.model_files import model_directory
from rollcorr.train.steps import derived_seed

if TYPE_CHECKING:
    from rollcorr.rollout_log import RolloutBatch

# Which two log-probs an active null compares.
SIDES: Mapping[str, str] = {
    "run": "what the engine reports while it samples, against the trainer's score: what a run shows",
    "engine": "what the engine reports while it samples, against its own score in one pass: prefill against decode",
    "trainer": "the trainer's score, against its score of the same tokens in other batches: the trainer alone",
}

DTYPES = ("bfloat16", "float16", "float32")

# Responses that are sampled at once.
BLOCK = 64

# Maximum number of logits in memory: half a gigabyte in float32.
LOGITS = 1 << 27


def engine_null_rollouts(
    prompts: Sequence[Sequence[int] | str],
    *,
    engine: str,
    model: str,
    engine_options: Mapping[str, Any],
    sampling: SamplingSpec,
    sides: str = "run",
    rows: int = 256,
    max_new_tokens: int = 256,
    dtype: str = "bfloat16",
    train_dtype: str = "float32",
    seed: int = 0,
    on_rows: Callable[[int, int], None] = lambda rows, total: None,
) -> Iterator[RolloutBatch]:
    """Sample and score block by block; yield batches of a rollout log whose two sides have the same weights.

    Args:
        prompts: token ids, or texts for the model's own tokenizer.
        engine: a name of `CLASSES`.
        model: directory of a `transformers` model, or an id of the hub.
        engine_options: as `rollout.engine_options` of a run.
        sampling: temperature and truncation. The engine reports processed log-probs where these change anything.
        sides: a name of `SIDES`.
        rows: number of responses; prompts are repeated if there are fewer.
        max_new_tokens: the longest response.
        dtype: precision of the engine's copy, where the engine has this option.
        train_dtype: precision of the trainer.
        seed: seeds the draws.
        on_rows: callback after each block with its rows and the total of rows.

    Raises:
        FileNotFoundError: the model does not exist, or it has no tokenizer and the prompts are texts.
        ValueError: there is no prompt, or a setting or an option is invalid.
        ImportError: the engine's package is missing; names the extra.
        EngineError: the engine did not start, or failed.
    """
    from rollcorr.engines import measure_null  # it needs Arrow

    for name, value, known in (
        ("engine", engine, CLASSES),
        ("sides", sides, SIDES),
        ("dtype", dtype, DTYPES),
        ("train-dtype", train_dtype, DTYPES),
    ):
        if value not in known:
            raise ValueError(f"--{name} {value!r} is none of {', '.join(known)}")
    for name, number in {"rows": rows, "max-new-tokens": max_new_tokens}.items():
        if number < 1:
            raise ValueError(f"--{name} must be at least 1, got {number}")

    # Raw log-probs would not describe the sampled distribution.
    if sampling.temperature != 1 or sampling.truncates:
        sampling = dataclasses.replace(sampling, logprobs="processed")
    policy = _load(model, with_tokenizer=any(isinstance(prompt, str) for prompt in prompts))
    ids = [policy.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    if not ids or not all(ids):
        raise ValueError("every prompt needs at least one token, and there must be one prompt; give others")
    wanted = [ids[row % len(ids)] for row in range(rows)]

    run = GrpoConfig(
        rollout=RolloutConfig(
            engine=engine,  # type: ignore[arg-type] # checked above
            engine_options=dict(engine_options),
            max_new_tokens=max_new_tokens,
            dtype=dtype,  # type: ignore[arg-type]
            sampling=sampling,
        )
    )
    trainer = policy.model.eval()
    with closing(make_engine(run, policy)) as sampler:
        trainer.to(getattr(torch, train_dtype))

        # Rows whose logits fit in memory, one at least.
        logits_per_row = int(trainer.config.vocab_size) * (max_new_tokens + max(map(len, wanted)))
        size = max(1, min(BLOCK, LOGITS // logits_per_row))
        block = size if engine == "transformers" else BLOCK
        for first in range(0, rows, block):
            asked = wanted[first : first + block]
            yield measure_null(
                sampler,
                asked,
                seed=derived_seed(seed, "null"),
                first_row=first,
                score=None if sides == "engine" else lambda rollout: _score(trainer, rollout, size),
                again=(lambda rollout: _score(trainer, rollout, -(-size // 2))) if sides == "trainer" else None,
                model=model,
            )
            on_rows(len(asked), rows)


def _score(model: nn.Module, rollout: Rollout, rows_at_once: int) -> Tensor:
    """Compute log π of the responses like a training step, under the sampled distribution, (B, T) nats."""
    # The engine's recorded truncation is more accurate than a truncation recomputed from different logits.
    if rollout.kept is not None:
        spec = rollout.sampling.for_actor("replay")
    else:
        spec = rollout.sampling.for_actor("recompute" if rollout.log_kept_mass is None else "kept_mass")
    return Actor.of(rollout, spec).log_prob(model, rollout, rows_at_once=rows_at_once).float()


def _load(path: str, *, with_tokenizer: bool) -> Policy:
    """Return the model in float32, with its tokenizer or the special ids of its configuration."""
    try:
        directory = model_directory(path)
        if with_tokenizer:
            return read_policy(directory)
        model = read_model(directory)
    except FileNotFoundError as error:
        raise FileNotFoundError(str(error).replace("model.path", "--model")) from error

    # Prompts of token ids need only the tokenizer's special ids.
    eos = model.config.eos_token_id
    eos = eos[0] if isinstance(eos, (list, tuple)) else eos
    return Policy(model, SimpleNamespace(eos_token_id=eos or 0, pad_token_id=model.config.pad_token_id))


def read_prompts(path: Path) -> list[list[int] | str]:
    """Return the prompts of a file: each line of a .txt, or `prompt_ids` (else `prompt`) of the rows of a rollout log.

    Raises:
        ValueError: the file contains no prompt.
        RolloutLogError: the log cannot be read.
        OSError: the file cannot be read.
    """
    if path.suffix == ".txt":
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not lines:
            raise ValueError(f"--prompts {path}: no line with a prompt")
        return list(lines)

    from rollcorr.rollout_log import read_rollout_log

    found: list[list[int] | str] = []
    for batch in read_rollout_log(path, columns=["prompt_ids", "prompt"]):
        column = next((name for name in ("prompt_ids", "prompt") if batch.has(name)), None)
        if column is not None:
            found += [prompt for prompt in batch.objects(column) if prompt]
    if not found:
        raise ValueError(f"--prompts {path}: no prompt_ids and no prompt; give a log that has one, or a .txt of lines")
    return found
