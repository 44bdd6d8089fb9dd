"""What both ways of running vLLM share: what it is asked for, and how its answers become completions."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

from torch import nn

from rollcorr.engines.completions import Completion
from rollcorr.engines.generation_settings import GenerationSettings
from rollcorr.engines.remote_engine import RemoteEngine, RemoteOptions
from rollcorr.engines.vllm.answers import check_sampling, completion, sampling_parameters


class VllmBase(RemoteEngine):
    """The engine without the way to reach vLLM, which subclasses give.

    vLLM scores prompts at temperature 1. At another temperature every log-prob of the vocabulary is needed, which only
    vLLM offline returns: slow for a large vocabulary.

    Args:
        model: a causal language model of `transformers`: the policy, and the reference of the first probe.
        settings: how to sample. `logprobs` is "raw" or "processed"; processed ones come with kept sets if anything
            truncates, and then `top_k` must be on. Only `eos_token_id` ends a response, not the checkpoint's own end
            tokens.
        options: precision and tolerance.
        version: policy version of `model`.
        sampling_mask: vLLM returns kept sets itself.

    Raises:
        TypeError: a number is of the wrong type.
        ValueError: a setting is out of range or unsupported.
    """

    engine: ClassVar[str] = "vllm"
    title: ClassVar[str] = "vLLM"

    def __init__(
        self,
        model: nn.Module,
        settings: GenerationSettings,
        options: RemoteOptions,
        *,
        version: int,
        sampling_mask: bool,
    ) -> None:
        check_sampling(settings.sampling)
        super().__init__(model, settings, options, version=version)
        self._parameters = sampling_parameters(
            settings, vocabulary_size=self.vocabulary_size, sampling_mask=sampling_mask
        )

    @abc.abstractmethod
    def _choices(self, prompts: list[list[int]], seeds: list[int]) -> list[Any]:
        """One answer per prompt, in the form of `/inference/v1/generate`."""

    def _complete(self, prompts: list[list[int]], seeds: list[int]) -> list[Completion]:
        choices = self._choices(prompts, seeds)
        return [
            completion(choice, row=row, sampling=self.sampling, initial=self._initial_version)
            for row, choice in enumerate(choices)
        ]
