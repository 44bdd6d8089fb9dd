"""Continuous batching of `transformers`: a response that ends makes room for the next at once.

It serves on a GPU where lengths differ much. On a CPU it is slower than `generate`, and unless `num_blocks` bounds its
cache it takes nine tenths of the memory that is free. It returns processed log-probs alone: no raw ones, no kept sets.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollcorr.config import SamplingSpec
from rollcorr.engines.base import EngineAnswerError, EngineUnavailableError
from rollcorr.engines.completions import Completion

if TYPE_CHECKING:
    from transformers import GenerationConfig

DROPPED = {"min_p": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
"""What continuous batching leaves out with no more than a warning, and the value that needs it not."""


def check_continuous_batching(sampling: SamplingSpec) -> None:
    """Check that continuous batching draws as `sampling` says, and reports what it says.

    Raises:
        ImportError: this release of transformers has none.
        ValueError: a setting that it leaves out, or raw log-probs.
    """
    import transformers

    if not hasattr(transformers, "ContinuousBatchingConfig"):
        raise ImportError(
            f"transformers {transformers.__version__} has no log-probs from continuous batching: "
            "pip install 'transformers>=5.23', or leave continuous_batching out"
        )
    if sampling.logprobs != "processed":
        raise ValueError(
            f"logprobs={sampling.logprobs!r}: continuous batching returns processed log-probs alone; set "
            "logprobs='processed', or leave continuous_batching out"
        )
    for name, off in DROPPED.items():
        if getattr(sampling, name) != off:
            raise ValueError(
                f"{name}={getattr(sampling, name)}: continuous batching would leave it out; set {name}={off:g}, or "
                "leave continuous_batching out"
            )


def generate_continuously(
    model: Any,  # noqa: ANN401 (a transformers model)
    prompts: Sequence[Sequence[int]],
    generation_config: GenerationConfig,
    *,
    options: Mapping[str, Any],
    seed: int,
) -> list[Completion]:
    """One response a prompt, in their order. It seeds torch's global generator.

    Args:
        model: samples.
        prompts: token ids, none empty.
        generation_config: how to draw.
        options: fields of transformers' `ContinuousBatchingConfig`: `num_blocks`, `page_size`, `max_batch_tokens`, ….
        seed: seeds the draws; with the same options, equal seeds give equal tokens.

    Raises:
        EngineUnavailableError: its thread died.
        EngineAnswerError: a request ended with an error.
    """
    from transformers import ContinuousBatchingConfig

    answers = model.generate_batch(
        [list(prompt) for prompt in prompts],
        generation_config=copy.deepcopy(generation_config),
        continuous_batching_config=ContinuousBatchingConfig(return_logprobs=True, seed=seed, **options),
    )
    if len(answers) != len(prompts):
        raise EngineUnavailableError(
            f"continuous batching answered {len(answers)} of {len(prompts)} prompts, then its thread died; none is used"
        )
    completions = []
    for row, prompt in enumerate(prompts):
        answer = answers.get(f"req_{row}")
        if answer is None or answer.error is not None or list(answer.prompt_ids) != list(prompt):
            reason = "is missing or of another prompt" if answer is None or answer.error is None else answer.error
            raise EngineAnswerError(f"the answer of continuous batching to row {row}: {reason}")
        completions.append(Completion(token_ids=answer.generated_tokens, log_probs=answer.logprobs))
    return completions
