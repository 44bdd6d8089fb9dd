"""What engines in other processes share: answers become a rollout, weights travel in a folder and are verified.

A weight update goes through a checkpoint in a folder that the engine reads. Each is followed by a probe: a fixed batch
that engine and policy score, at temperature 1, over the whole vocabulary. Unless they agree to the noise floor, the
engine answers nothing more until an update has succeeded whole.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from rollcorr.config import SamplingSpec
from rollcorr.config.checks import check_choice, check_integer, check_number
from rollcorr.engines.base import EngineAnswerError, EngineError, Rollout, WeightSyncError, check_weight_sync
from rollcorr.engines.completions import Completion, check_log_prob, rollout_from_completions
from rollcorr.engines.model_scoring import TokenBatch, pad_prompts
from rollcorr.engines.probe import make_probe, score_probe, vocabulary_size
from rollcorr.engines.transport.checkpoint_folder import read_policy, read_weights, write_checkpoint

Dtype = Literal["bfloat16", "float16", "float32"]
NOISE_FLOOR: Mapping[str, float] = {"bfloat16": 0.5, "float16": 0.1, "float32": 5e-4}
"""Largest difference, nats, between log-probs of an engine and of transformers in the same precision; in proportion
less for a policy whose log-probs spread by less than 1 nat, for its logits are small and so is their rounding."""


class RemoteEngine(abc.ABC):
    """An engine without the way to reach it, which subclasses give.

    Args:
        model: a causal language model of `transformers`: the policy, and the reference of the first probe.
        sampling: how to draw tokens.
        max_new_tokens: longest response, at least 1.
        eos_token_id: ends a response and belongs to it.
        pad_token_id: fills rows.
        version: policy version of `model`.
        dtype: precision that the engine computes in.
        sync_tolerance: largest difference between the two sides of the probe, nats; None for `NOISE_FLOOR`.

    Raises:
        TypeError: a number is of the wrong type.
        ValueError: a setting is out of range.
    """

    engine: ClassVar[str]
    """Its name in a `SamplingSpec`."""
    title: ClassVar[str]
    """Its name in errors."""

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
    ) -> None:
        check_integer("max_new_tokens", max_new_tokens, at_least=1)
        check_choice("dtype", dtype, tuple(NOISE_FLOOR))
        check_integer("version", version, at_least=0)
        if sync_tolerance is not None:
            check_number("sync_tolerance", sync_tolerance, above=0)
        self.sampling = dataclasses.replace(sampling, engine=self.engine, policy_version=version)
        self.max_new_tokens = max_new_tokens
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        self.dtype = dtype
        self.sync_tolerance = sync_tolerance
        self.vocabulary_size = vocabulary_size(model)
        self.device = next(model.parameters()).device
        self.max_model_len: int | None = None  # longest prompt and response together, where the engine has a limit
        self._probe = make_probe(model)
        self._expected = torch.empty(0, device="cpu")  # of the weights that sample, on the probe
        self._unusable: str | None = "it holds no verified weights yet"

    @abc.abstractmethod
    def _complete(self, prompts: list[list[int]], seeds: list[int]) -> list[Completion]:
        """One completion a prompt."""

    @abc.abstractmethod
    def _prompt_log_probs(self, rows: list[list[int]], temperature: float) -> Sequence[Sequence[object]]:
        """Log-probs of the tokens of each row after its first, over the whole vocabulary, unchecked."""

    @abc.abstractmethod
    def _load(self, version: int) -> None:
        """Make the engine hold the weights in `self._folder`, all of them."""

    @property
    @abc.abstractmethod
    def _folder(self) -> Path:
        """The checkpoint of the weights that sample."""

    def _abandon(self) -> None:  # noqa: B027 (an engine may have nothing to abandon)
        """See to it that weights that may be mixed sample nothing, here or for others."""

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
            EngineUnavailableError: the engine died, or did not answer in time, also when tried again.
            EngineAnswerError: something is missing or no log-prob.
            EngineError: the last weight update failed, or the engine was closed.
        """
        self._require_weights()
        rows = [[int(token) for token in prompt] for prompt in prompts]
        self._check_prompts(rows)
        return rollout_from_completions(
            rows,
            self._complete(rows, [row_seed(seed, row) for row in range(len(rows))]),
            sampling=self.sampling,
            pad_token_id=self.pad_token_id,
            vocabulary_size=self.vocabulary_size,
            device=self.device,
        )

    def score(self, tokens: TokenBatch) -> Tensor:
        """Log-probs of response tokens at the sampling temperature, over the whole vocabulary, (B, T) float32.

        Raises: as `generate`.
        """
        self._require_weights()
        return self._score(tokens, self.sampling.temperature)

    def update_weights(self, model: nn.Module, *, version: int) -> None:
        """Take over the weights of `model`, rounded to this engine's dtype, and verify them on the probe.

        Raises:
            WeightSyncError: the load failed, or the two sides differ above the noise floor. The engine is unusable
                until an update succeeds.
            EngineUnavailableError: the engine died or did not answer in time. It is unusable as well.
        """
        check_integer("version", version, at_least=0)
        expected = self._score_policy(model)
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

    @property
    def _torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def _score_policy(self, model: nn.Module) -> Tensor:
        """The probe as the policy scores it in this engine's precision."""
        return score_probe(model, self._probe, dtype=self._torch_dtype)

    def _verify(self, expected: Tensor) -> None:
        """Require that the engine scores the probe as expected."""
        tolerance = self.sync_tolerance
        if tolerance is None:
            tolerance = NOISE_FLOOR[self.dtype] * min(1.0, float(expected.std()))
        check_weight_sync(self._score(self._probe, 1.0), expected, tolerance=tolerance)

    def _score(self, tokens: TokenBatch, temperature: float) -> Tensor:
        prompts = [ids[mask].tolist() for ids, mask in zip(tokens.prompt_ids, tokens.prompt_mask, strict=True)]
        responses = [ids[mask].tolist() for ids, mask in zip(tokens.response_ids, tokens.response_mask, strict=True)]
        rows = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        found = self._prompt_log_probs(rows, temperature)
        lengths = [len(told) + 1 for told in found]
        if lengths != [len(row) for row in rows]:
            raise EngineAnswerError(
                f"{self.title} scored rows of {lengths} tokens, asked for {[len(row) for row in rows]}"
            )
        flat = [
            check_log_prob(value, f"the score of token {token} of row {row}")
            for row, (told, prompt) in enumerate(zip(found, prompts, strict=True))
            for token, value in enumerate(told[len(prompt) - 1 :])
        ]
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
            raise WeightSyncError(f"weight sync incomplete, {self.title} refused it: {error}") from error
        except BaseException as error:
            self._unusable = f"its weights could not be loaded and verified: {error}"
            self._abandon()
            raise
        self._unusable = None

    def _require_weights(self) -> None:
        if self._unusable is not None:
            raise EngineError(
                f"this {self.title} engine may not be used, {self._unusable}. Call update_weights to try again"
            )

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
                f"a prompt of {longest} tokens and max_new_tokens {self.max_new_tokens} need more than {self.title}'s "
                f"max_model_len {self.max_model_len}: raise max_model_len, or shorten one of them"
            )


def row_seed(seed: int, row: int) -> int:
    """A 63-bit seed for one row of a batch: equal prompts draw apart."""
    digest = hashlib.blake2b(f"{seed}/{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
