"""What both ways of running vLLM share: how a rollout comes of its answers, and that its weights are verified.

A weight update goes through a checkpoint in a folder that vLLM reads. Each is followed by a probe: a fixed batch that
vLLM and the policy score, at temperature 1, over the whole vocabulary. Unless they agree to the noise floor, the engine
answers nothing more until an update has succeeded whole.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rollcorr.checks import check_choice, check_integer, check_number
from rollcorr.config import SamplingSpec
from rollcorr.engines.base import EngineAnswerError, EngineError, Rollout, WeightSyncError, check_weight_sync
from rollcorr.engines.checkpoint_folder import read_policy, read_weights, write_checkpoint
from rollcorr.engines.completions import rollout_from_completions
from rollcorr.engines.probe import make_probe, score_probe, vocabulary_size
from rollcorr.engines.scoring import TokenBatch, pad_prompts
from rollcorr.engines.vllm_answers import check_sampling, completion, sampling_parameters

Dtype = Literal["bfloat16", "float16", "float32"]
NOISE_FLOOR: Mapping[str, float] = {"bfloat16": 0.5, "float16": 0.1, "float32": 5e-4}
"""Largest difference, nats, between log-probs of vLLM and of transformers in the same precision; in proportion less for
a policy whose log-probs spread by less than 1 nat, for its logits are small and so is their rounding."""
EXTENSION = "rollcorr.engines.vllm_weights.WeightReloader"
"""The worker extension that reloads weights."""


class VllmBase(abc.ABC):
    """The engine without the way to reach vLLM, which subclasses give.

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
        check_choice("dtype", dtype, tuple(NOISE_FLOOR))
        check_integer("version", version, at_least=0)
        if sync_tolerance is not None:
            check_number("sync_tolerance", sync_tolerance, above=0)
        self.sync_tolerance = sync_tolerance
        self.sampling = dataclasses.replace(sampling, engine="vllm", policy_version=version)
        self.max_new_tokens = max_new_tokens
        self.pad_token_id = pad_token_id
        self.dtype = dtype
        self.vocabulary_size = vocabulary_size(model)
        self.max_model_len: int | None = None
        self.device = next(model.parameters()).device
        self._parameters = sampling_parameters(
            sampling,
            max_new_tokens=max_new_tokens,
            eos_token_id=eos_token_id,
            vocabulary_size=self.vocabulary_size,
            sampling_mask=sampling_mask,
        )
        self._probe = make_probe(model)
        self._expected = torch.empty(0)
        self._unusable: str | None = "it holds no verified weights yet"

    @abc.abstractmethod
    def _choices(self, prompts: list[list[int]], seeds: list[int]) -> list[Any]:
        """One answer a prompt, in the form of `/inference/v1/generate`."""

    @abc.abstractmethod
    def _prompt_log_probs(self, rows: list[list[int]], temperature: float) -> list[list[float]]:
        """Log-probs of the tokens of each row after its first, over the whole vocabulary."""

    @abc.abstractmethod
    def _load(self, version: int) -> None:
        """Make vLLM hold the weights in `self._folder`, all of them."""

    @property
    @abc.abstractmethod
    def _folder(self) -> Path:
        """The checkpoint of the weights that sample."""

    @abc.abstractmethod
    def _abandon(self) -> None:
        """See to it that weights that may be mixed sample nothing."""

    @property
    def _torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def weight_version(self) -> int:
        """Version of the policy that samples now."""
        return self.sampling.policy_version or 0

    def generate(self, prompts: Sequence[Sequence[int]], *, seed: int) -> Rollout:
        """Sample one response per prompt: all of them, or an error and none.

        Args:
            prompts: token ids, B rows, none empty.
            seed: seeds the draws, each row its own.

        Raises:
            ValueError: a prompt is empty, has an id outside the vocabulary, or leaves no room for `max_new_tokens`.
            EngineUnavailableError: vLLM died, or did not answer in time, also when tried again.
            EngineAnswerError: something is missing or no log-prob.
            EngineError: the last weight update failed, or the engine was closed.
        """
        self._require_weights()
        rows = [[int(token) for token in prompt] for prompt in prompts]
        self._check_prompts(rows)
        choices = self._choices(rows, [row_seed(seed, row) for row in range(len(rows))])
        return rollout_from_completions(
            rows,
            [completion(choice, row=row, sampling=self.sampling) for row, choice in enumerate(choices)],
            sampling=self.sampling,
            pad_token_id=self.pad_token_id,
            vocabulary_size=self.vocabulary_size,
            device=self.device,
        )

    def score(self, tokens: TokenBatch) -> Tensor:
        """Log-probs of response tokens at the sampling temperature, over the whole vocabulary, (B, T) float32.

        vLLM scores prompts at temperature 1. For another one every log-prob of the vocabulary is asked for: slow for a
        large one.

        Raises: as `generate`.
        """
        self._require_weights()
        return self._score(tokens, self.sampling.temperature)

    def update_weights(self, model: nn.Module, *, version: int) -> None:
        """Take over the weights of `model`, rounded to this engine's dtype, and verify them on the probe.

        Raises:
            WeightSyncError: the load failed, or the two sides differ above the noise floor. The engine is unusable
                until an update succeeds.
            EngineUnavailableError: vLLM died or did not answer in time. The engine is unusable as well.
        """
        check_integer("version", version, at_least=0)
        expected = score_probe(model, self._probe, dtype=self._torch_dtype)
        folder = self._folder
        with self._whole_or_unusable():
            write_checkpoint(model, folder, dtype=self._torch_dtype)
            self._load(version)
            self._verify(expected)
        self._expected = expected
        self.sampling = dataclasses.replace(self.sampling, policy_version=version)

    def export_weights(self) -> Mapping[str, Tensor]:
        """The weights that sample now, rounded to this engine's dtype, under their names in a checkpoint."""
        self._require_weights()
        return read_weights(self._folder)

    def import_weights(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Restore what `export_weights` returned, and verify it as an update.

        Raises: as `update_weights`.
        """
        self.update_weights(read_policy(self._folder, weights).to(self.device), version=version)

    def _verify(self, expected: Tensor) -> None:
        """Require that vLLM scores the probe as expected."""
        tolerance = self.sync_tolerance
        if tolerance is None:
            tolerance = NOISE_FLOOR[self.dtype] * min(1.0, float(expected.std()))
        check_weight_sync(self._score(self._probe, 1.0), expected, tolerance=tolerance)

    def _score(self, tokens: TokenBatch, temperature: float) -> Tensor:
        prompts, responses = (
            [ids[mask].tolist() for ids, mask in zip(all_ids, masks, strict=True)]
            for all_ids, masks in (
                (tokens.prompt_ids, tokens.prompt_mask),
                (tokens.response_ids, tokens.response_mask),
            )
        )
        rows = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        found = self._prompt_log_probs(rows, temperature)
        lengths = [(len(row) - 1, len(told)) for row, told in zip(rows, found, strict=True)]
        if any(wanted != told for wanted, told in lengths):
            raise EngineAnswerError(f"vLLM scored other numbers of tokens than asked (asked, told): {lengths}")
        flat = [value for prompt, told in zip(prompts, found, strict=True) for value in told[len(prompt) - 1 :]]
        mask = tokens.response_mask
        values = torch.tensor(flat, dtype=torch.float32, device=mask.device)
        return torch.zeros(mask.shape, device=mask.device).masked_scatter_(mask, values)

    @contextlib.contextmanager
    def _whole_or_unusable(self) -> Iterator[None]:
        """Nothing samples from weights that an error left half-loaded or unverified."""
        self._unusable = "its weights are being loaded"
        try:
            yield
        except EngineAnswerError as error:
            self._unusable = f"its weights could not be loaded and verified: {error}"
            self._abandon()
            raise WeightSyncError(f"weight sync incomplete, vLLM refused it: {error}") from error
        except BaseException as error:
            self._unusable = f"its weights could not be loaded and verified: {error}"
            self._abandon()
            raise
        self._unusable = None

    def _require_weights(self) -> None:
        if self._unusable is not None:
            raise EngineError(f"this vLLM engine may not be used, {self._unusable}. Call update_weights to try again")

    def _check_prompts(self, rows: list[list[int]]) -> None:
        pad_prompts(rows, pad_token_id=self.pad_token_id)  # refuses empty ones
        for row, prompt in enumerate(rows):
            wrong = [token for token in prompt if not 0 <= token < self.vocabulary_size]
            if wrong:
                raise ValueError(
                    f"prompt {row} has token id {wrong[0]}, outside the vocabulary 0 … {self.vocabulary_size - 1}"
                )
        longest = max(map(len, rows))
        if self.max_model_len is not None and longest + self.max_new_tokens > self.max_model_len:
            raise ValueError(
                f"a prompt of {longest} tokens and max_new_tokens {self.max_new_tokens} need more than vLLM's "
                f"max_model_len {self.max_model_len}: raise max_model_len, or shorten one of them"
            )


def row_seed(seed: int, row: int) -> int:
    """A 63-bit seed for one row of a batch: equal prompts draw apart."""
    digest = hashlib.blake2b(f"{seed}/{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
