"""Engine protocol: prompts in; sampled tokens, their log-probs and their provenance out.

`GenerationSettings` sets how every engine samples: how tokens are drawn, the longest response, and the end and pad
ids. Options of a single engine, such as its precision or its address, belong to that engine.

Symbols (docs/reference/notation.md): B sequences, P padded prompt length, T padded response length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Protocol

import torch
from torch import Tensor, nn

from rollcorr.config import SamplingSpec
from rollcorr.config.checks import names_unknown_options
from rollcorr.config.sampling_spec import Actor
from rollcorr.config.secrets import redact_text
from rollcorr.core.sampling import KeptSets
from rollcorr.correction.weight_probe import WeightProbe

# Largest difference, nats, between log-probs of two implementations in the same precision.
NOISE_FLOOR: Mapping[str, float] = {"bfloat16": 0.5, "float16": 0.1, "float32": 5e-4}

# The value that turns each setting off.
_DEFAULT_SAMPLING = SamplingSpec()

# Smallest value of each number, and how to fix a smaller one.
_INTEGER_SETTINGS = {
    "max_new_tokens": (1, "give the length of the longest response"),
    "eos_token_id": (0, "give the tokenizer's eos_token_id"),
    "pad_token_id": (0, "give the tokenizer's pad_token_id, or its eos_token_id if it has none"),
}


class EngineError(RuntimeError):
    """Failure of an engine. Discard its answer.

    Secrets in the message are redacted: engines quote addresses, and servers quote requests.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(redact_text(message))


class EngineUnavailableError(EngineError):
    """Error of an engine that died, is unreachable, or timed out after all waits and retries."""


class EngineAnswerError(EngineError):
    """Error of a refused request or an invalid answer: a list is short, or a log-prob is NaN, None or −9999."""


class EngineRestartedError(EngineAnswerError):
    """Error of a restarted engine: it samples from its initial weights, not from the latest update."""


class WeightSyncError(EngineError):
    """Error of an engine whose weights differ from the policy's: a failed copy, not staleness."""


@names_unknown_options
@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """Sampling settings of an engine. An engine raises `ValueError` for a setting that it cannot follow exactly.

    Attributes:
        sampling: how tokens are drawn, and which log-probs are reported. The engine fills in its name, its version and
            the policy version.
        max_new_tokens: the longest response, at least 1.
        eos_token_id: ends a response and belongs to it.
        pad_token_id: fills the rows of a batch.

    Raises:
        TypeError: `sampling` is no `SamplingSpec`, or a number is no integer.
        ValueError: a number is below its minimum, the temperature is 0, or `sampling` names the trainer's log-probs.

    Example:
        >>> GenerationSettings(sampling=SamplingSpec(), max_new_tokens=0, eos_token_id=2, pad_token_id=0)
        Traceback (most recent call last):
        ValueError: max_new_tokens must be at least 1, got 0; give the length of the longest response
    """

    sampling: SamplingSpec
    max_new_tokens: int
    eos_token_id: int
    pad_token_id: int

    def __post_init__(self) -> None:
        for name, (lowest, fix) in _INTEGER_SETTINGS.items():
            value = getattr(self, name)
            if not isinstance(value, Integral) or isinstance(value, bool):
                raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}; {fix}")
            if value < lowest:
                raise ValueError(f"{name} must be at least {lowest}, got {value}; {fix}")

        if not isinstance(self.sampling, SamplingSpec):
            raise TypeError(
                f"sampling must be a SamplingSpec, got {self.sampling!r} of type {type(self.sampling).__name__}; "
                "write SamplingSpec(temperature=1.0), for instance"
            )
        if self.sampling.temperature <= 0:
            raise ValueError(
                f"temperature must be > 0 to sample, got {self.sampling.temperature}; greedy decoding has no log-probs"
            )
        if self.sampling.support != "engine":
            raise ValueError(
                f"support={self.sampling.support!r}: an engine reports log-probs over its own support; "
                "set support='engine'"
            )


def settings_in_use(sampling: SamplingSpec, names: Iterable[str]) -> list[str]:
    """Return the named sampling settings that are not off."""
    return [name for name in names if getattr(sampling, name) != getattr(_DEFAULT_SAMPLING, name)]


def refuse_settings(sampling: SamplingSpec, names: Iterable[str], who: str) -> None:
    """Raise `ValueError` for sampling settings that an engine does not support.

    Args:
        sampling: the requested settings.
        names: settings that must be off.
        who: the engine and the reason, for the error message.

    Raises:
        ValueError: a setting is not off; the message contains its value and the value that turns it off.
    """
    for name in settings_in_use(sampling, names):
        value, off = getattr(sampling, name), getattr(_DEFAULT_SAMPLING, name)
        raise ValueError(f"{name}={value!r} is not supported by {who}; set {name}={off!r}")


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Prompts and responses, padded separately so that every response begins in the same column.

    Attributes:
        prompt_ids: (B, P) int64, left-padded.
        prompt_mask: (B, P) bool, true on prompt tokens.
        response_ids: (B, T) int64, right-padded.
        response_mask: (B, T) bool, true on sampled tokens; the sampled end-of-sequence token is one of them.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    response_mask: Tensor

    def __len__(self) -> int:
        return self.prompt_ids.shape[0]

    def select(self, rows: Tensor) -> TokenBatch:
        """Return the given rows with unchanged padding.

        Args:
            rows: int64 indices of rows, of shape (n,), or bool, (B,).
        """
        return TokenBatch(*(getattr(self, field.name)[rows] for field in fields(TokenBatch)))

    def to(self, device: torch.device | str) -> TokenBatch:
        """Return the same batch on `device`."""
        return TokenBatch(*(getattr(self, field.name).to(device) for field in fields(TokenBatch)))

    def unpadded(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return prompts and responses as lists of ids without padding. Waits for the device."""
        prompts = zip(self.prompt_ids, self.prompt_mask, strict=True)
        responses = zip(self.response_ids, self.response_mask, strict=True)
        return [ids[mask].tolist() for ids, mask in prompts], [ids[mask].tolist() for ids, mask in responses]


@dataclass(frozen=True, eq=False, kw_only=True)
class Rollout:
    """Tokens that an engine sampled, with their log-probs.

    Attributes:
        tokens: prompts and responses, B rows.
        rollout_log_prob: the log-prob of each response token, of the kind that `sampling` names, nats, (B, T) float32;
            0 outside the response mask.
        sampling: how the tokens were drawn, and by which policy version.
        raw_log_prob: log softmax(logits) at temperature 1 over the full vocabulary; optional.
        kept: the ids that could be sampled at each response token, packed: one set for each true entry of
            `tokens.response_mask`, row after row. None without truncation, or if the engine does not report them.
        log_kept_mass: log of the mass of those sets in the full softmax at the sampling temperature, nats, (B, T)
            float32; 0 outside the response mask; optional.
        policy_versions: the policy version of each token, (B, T) int64, if the engine changed weights within a
            response. Defaults to `sampling.policy_version` for all tokens.
    """

    tokens: TokenBatch
    rollout_log_prob: Tensor
    sampling: SamplingSpec
    raw_log_prob: Tensor | None = None
    kept: KeptSets | None = None
    log_kept_mass: Tensor | None = None
    policy_versions: Tensor | None = None


class Engine(Protocol):
    """A sampler with its own copy of the policy. Its constructor accepts the model and `GenerationSettings` first.

    Attributes:
        sampling: how tokens are drawn, by which engine and which policy version.
        row_seeds: whether the draws of a row depend only on the seed and the row's index in the global batch. False
            for a library with one seed per process: several ranks refuse such an engine.
        truncation_records: what its rollouts contain for processed log-probs of a truncated sampler, as the actor that
            needs it (`SamplingSpec.for_actor`): "replay" for kept sets, "kept_mass" for the log of their mass.
    """

    sampling: SamplingSpec
    row_seeds: bool = True
    truncation_records: tuple[Actor, ...] = ()

    @property
    def weight_version(self) -> int:
        """Return the version of the policy that samples now."""
        return self.sampling.policy_version or 0

    def generate(self, prompts: Sequence[Sequence[int]], *, seed: int, first_row: int = 0) -> Rollout:
        """Sample one response per prompt. Equal seeds, prompts and weights give equal tokens.

        Args:
            prompts: token ids of each prompt.
            seed: random seed of the sampling.
            first_row: index of the first prompt in the global batch: rows of other ranks or calls come before it.
        """

    def score(self, tokens: TokenBatch) -> Tensor:
        """Compute the engine's log-probs of given response tokens at its sampling temperature, (B, T) float32."""

    def update_weights(self, model: nn.Module, *, version: int) -> None:
        """Copy the weights of `model` into the engine and verify them.

        Args:
            model: the trainer's policy.
            version: version of its weights, recorded in rollouts.

        Raises:
            WeightSyncError: engine and policy score a probe batch differently.
        """

    def export_weights(self) -> Mapping[str, Tensor]:
        """Return the current weights, for the checkpoint of a run whose engine lags behind its policy."""

    def import_weights(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Restore weights from `export_weights`.

        Args:
            weights: name → parameter, each in the shape that it has in the model.
            version: version of these weights, recorded in rollouts.
        """

    def probe(
        self, rollout: Rollout, model: nn.Module, score: Callable[[Rollout], Tensor], *, rows: int = 32
    ) -> WeightProbe:
        """Score some rows of a rollout again with the trainer's weights, and return what the mismatch comes from.

        The engine gets the trainer's weights for one score, then its own weights back. Weights, gradients, random
        states and train or eval modes are afterwards as before.

        Args:
            rollout: sampled by this engine with the current weights of the run.
            model: the trainer's policy.
            score: callback that returns the trainer's log-probs of a rollout's responses, (B, T) nats, as in a training
                step; called twice.
            rows: number of rows to compare, the first ones.

        Raises:
            ValueError: as in `measure_null`.
            WeightSyncError: the weights do not arrive.
        """
        from rollcorr.engines.weight_probes import probe_engine

        return probe_engine(self, rollout, model, score, rows=rows)

    def close(self) -> None:
        """Release the process or connections, if any. Safe to call twice."""
        return  # a default, so that type checkers do not treat the method as abstract


def noise_floor(log_prob: Tensor, dtype: torch.dtype) -> float:
    """Compute NOISE_FLOOR[dtype] · min(1, std of `log_prob`), nats; a wider dtype has the floor of float32.

    The floor scales down for a policy whose log-probs spread by less than 1 nat: its logits are small, and so is their
    rounding.

    Args:
        log_prob: log-probs of a probe batch, nats, any shape.
        dtype: precision that both sides compute in.
    """
    floor = NOISE_FLOOR.get(str(dtype).removeprefix("torch."), NOISE_FLOOR["float32"])
    return floor * min(1.0, float(log_prob.std()))


def require_row_seeds(engine: Engine, ranks: int) -> None:
    """Raise if several ranks would sample with an engine that has one seed per process.

    Raises:
        ValueError: `ranks` is above 1 and `engine.row_seeds` is false; the message names the engine and the fix.
    """
    if ranks > 1 and not engine.row_seeds:
        raise ValueError(
            f"{ranks} ranks sample with the engine {engine.sampling.engine!r}, whose library has one seed per process: "
            "a row's draws would depend on its rank, and the limit is 1 rank. Start one process, or use an engine with "
            "one seed per row: transformers without continuous_batching, vllm, vllm_server or sglang"
        )


def check_weight_sync(
    engine_log_prob: Tensor, policy_log_prob: Tensor, *, tolerance: float, where: str = "engine"
) -> None:
    """Check that max |engine log-prob − policy log-prob| ≤ tolerance on a probe batch.

    Args:
        engine_log_prob: the engine's scores of the probe, nats, (B, T).
        policy_log_prob: the policy's scores of the probe in the engine's precision, nats, (B, T).
        tolerance: the noise floor between the two, nats.
        where: name of the checked side, for the error message.

    Raises:
        WeightSyncError: the difference is larger or NaN.
    """
    difference = float((engine_log_prob - policy_log_prob).abs().max())

    # `not (x <= tolerance)` is also true for NaN.
    if not difference <= tolerance:
        raise WeightSyncError(
            f"weight sync incomplete: a probe batch differs by {difference:.3g} nats between {where} and "
            f"policy, noise floor {tolerance:.3g}. Some parameters kept their old values; check tied and renamed ones"
        )


def check_prompts(prompts: Sequence[Sequence[int]], *, vocabulary_size: int | None = None) -> None:
    """Check that no prompt is empty and that every id is in the vocabulary.

    Args:
        prompts: token ids.
        vocabulary_size: valid ids are 0 to `vocabulary_size` − 1; optional. Defaults to no check of ids.

    Raises:
        ValueError: `prompts` is empty, a prompt is empty (a causal model needs at least one token), or an id is outside
            the vocabulary.
    """
    empty = [row for row, prompt in enumerate(prompts) if not prompt]
    if not prompts or empty:
        raise ValueError(f"every prompt needs at least one token; {len(prompts)} prompts, empty ones at {empty}")
    if vocabulary_size is None:
        return

    # Some engines map an unknown id to their own unknown token without an error.
    for row, prompt in enumerate(prompts):
        outside = [token for token in prompt if not 0 <= token < vocabulary_size]
        if outside:
            raise ValueError(
                f"prompt {row} has token id {outside[0]}, outside the vocabulary 0 … {vocabulary_size - 1}"
            )


def pad_prompts(prompts: Sequence[Sequence[int]], *, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Left-pad prompts to one length.

    Args:
        prompts: token ids of each prompt.
        pad_token_id: the padding id.

    Returns:
        ids (B, P) int64 and mask (B, P) bool.

    Raises:
        ValueError: `prompts` is empty, or a prompt is empty.
    """
    check_prompts(prompts)
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_token_id] * (width - len(prompt)) + list(prompt) for prompt in prompts], device="cpu")
    lengths = torch.tensor([len(prompt) for prompt in prompts], device="cpu")
    return ids, torch.arange(width, device="cpu") >= width - lengths[:, None]


def join_padded(parts: Sequence[Tensor]) -> Tensor:
    """Join chunks (b, t) of different length along the rows, right-padded with zeros."""
    width = max(part.shape[1] for part in parts)
    return torch.cat([nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])
