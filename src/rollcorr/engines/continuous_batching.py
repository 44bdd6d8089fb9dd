"""Continuous batching of `transformers`: a response that ends makes room for the next one at once.

It pays on a GPU where lengths differ much. On a CPU it is slower than `generate`, and unless `num_blocks` bounds its
cache it takes nine tenths of the free memory. It returns processed log-probs only: no raw ones, no kept sets.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollcorr.config import SamplingSpec
from rollcorr.engines.base import EngineAnswerError, EngineUnavailableError
from rollcorr.engines.completions import Completion
from rollcorr.engines.generation_settings import refuse_settings

if TYPE_CHECKING:
    from transformers import GenerationConfig

# Settings that continuous batching leaves out with a warning at most.
DROPPED = ("min_p", "repetition_penalty", "min_new_tokens")


def check_continuous_batching(sampling: SamplingSpec) -> None:
    """Check that continuous batching draws as `sampling` says, and reports the log-probs that it names.

    Raises:
        ImportError: this release of transformers has no log-probs from continuous batching.
        ValueError: continuous batching would leave a setting out, or the log-probs are raw.
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
    refuse_settings(sampling, DROPPED, "continuous batching, which would leave it out")


def generate_continuously(
    model: Any,  # noqa: ANN401 (a transformers model)
    prompts: Sequence[Sequence[int]],
    generation_config: GenerationConfig,
    *,
    options: Mapping[str, Any],
    seed: int,
) -> list[Completion]:
    """Sample one response per prompt, in their order. It seeds torch's global generator.

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

    # Answers come in the order in which responses ended; their names give the rows.
    completions = []
    for row, prompt in enumerate(prompts):
        answer = answers.get(f"req_{row}")
        if answer is None or answer.error is not None or list(answer.prompt_ids) != list(prompt):
            reason = "is missing or of another prompt" if answer is None or answer.error is None else answer.error
            raise EngineAnswerError(f"the answer of continuous batching to row {row}: {reason}")
        completions.append(Completion(token_ids=answer.generated_tokens, log_probs=answer.logprobs))
    return completions
