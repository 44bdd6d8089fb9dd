"""What both ways of running vLLM share: their settings, and how a rollout comes of vLLM's answers."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

from torch import nn

from rollcorr.config import SamplingSpec
from rollcorr.engines.completions import Completion
from rollcorr.engines.transport.remote import Dtype, RemoteEngine, row_seed
from rollcorr.engines.vllm.answers import check_sampling, completion, sampling_parameters

__all__ = ["EXTENSION", "Dtype", "VllmBase", "row_seed"]

EXTENSION = "rollcorr.engines.vllm.weight_transfer.WeightReloader"
"""The worker extension that reloads weights."""


class VllmBase(RemoteEngine):
    """The engine without the way to reach vLLM, which subclasses give.

    vLLM scores prompts at temperature 1. At another one, every log-prob of the vocabulary is asked for, where that can
    be done: slow for a large one.

    Args:
        model: a causal language model of `transformers`: the policy, and the reference of the first probe.
        sampling: how to draw tokens. `logprobs` is "raw" or "processed"; processed ones come with kept sets when
            anything truncates, and then top_k must be on.
        max_new_tokens: longest response, at least 1.
        eos_token_id: ends a response and belongs to it; other end tokens of the checkpoint do not count.
        pad_token_id: fills rows.
        version: policy version of `model`.
        dtype: precision that vLLM computes in.
        sync_tolerance: largest difference between the two sides of the probe, nats; None for `NOISE_FLOOR`.
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
        *,
        sampling: SamplingSpec,
        max_new_tokens: int,
        eos_token_id: int,
        pad_token_id: int,
        version: int,
        dtype: Dtype,
        sync_tolerance: float | None,
        sampling_mask: bool,
    ) -> None:
        check_sampling(sampling)
        super().__init__(
            model,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            version=version,
            dtype=dtype,
            sync_tolerance=sync_tolerance,
        )
        self._parameters = sampling_parameters(
            sampling,
            max_new_tokens=max_new_tokens,
            eos_token_id=eos_token_id,
            vocabulary_size=self.vocabulary_size,
            sampling_mask=sampling_mask,
        )

    @abc.abstractmethod
    def _choices(self, prompts: list[list[int]], seeds: list[int]) -> list[Any]:
        """One answer a prompt, in the form of `/inference/v1/generate`."""

    def _complete(self, prompts: list[list[int]], seeds: list[int]) -> list[Completion]:
        choices = self._choices(prompts, seeds)
        return [completion(choice, row=row, sampling=self.sampling) for row, choice in enumerate(choices)]
