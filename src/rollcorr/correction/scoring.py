"""The trainer's log-probs: computed from logits or hidden states, with the transforms of a `SamplingSpec`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollcorr.config.sampling_spec import SamplingSpec
from rollcorr.core.logprobs import (
    SupportedLogProb,
    kept_entropy,
    kept_log_prob,
    supported_log_prob,
    token_entropy,
    token_log_prob,
)
from rollcorr.core.ratios import at_least_float32
from rollcorr.core.sampling import (
    Filter,
    KeptSets,
    joint_support,
    min_p_support,
    sequential_support,
    top_k_support,
    top_p_support,
    with_sampled,
)
from rollcorr.kernels.linear_logprob import linear_log_prob
from rollcorr.kernels.linear_logprob.problem import LinearLogProb


def actor_log_prob(
    logits: Tensor,
    token_ids: Tensor,
    spec: SamplingSpec,
    *,
    kept: KeptSets | None = None,
    log_kept_mass: Tensor | None = None,
) -> SupportedLogProb:
    """Compute log π of the sampled tokens, such that log π − log μ is a log-ratio (after `check_compatible`).

    Args:
        logits: the trainer's logits, (…, V), before any transform.
        token_ids: the sampled tokens, (…).
        spec: the transforms of the log-probs, for instance `rollout.for_actor("replay")`. The logits are divided by its
            temperature. Its `support` selects how a truncation is repeated.
        kept: the engine's kept sets; required to replay a truncation.
        log_kept_mass: log S of the engine's sets, (…); required for support "kept_mass", and subtracted.

    Returns:
        Log-probs, nats, and a mask of the tokens outside the support, which were added to it (empty without a support).

    Raises:
        ValueError: shapes do not fit, an argument that the support requires is missing, or the spec has penalties or
            biases, which depend on the previous tokens: apply them to the logits and remove them from the spec.
    """
    sets = _replayed_sets(spec, kept)
    if sets is not None:
        return kept_log_prob(logits, token_ids, sets, temperature=spec.temperature)
    if spec.restricts and spec.support != "kept_mass":
        support = recomputed_support(logits, spec)
        return supported_log_prob(logits, token_ids, support, temperature=spec.temperature)
    whole = token_log_prob(logits, token_ids, temperature=_log_prob_temperature(spec))
    nowhere = whole.new_zeros(whole.shape, dtype=torch.bool)
    return SupportedLogProb(_subtract_log_kept_mass(whole, spec, log_kept_mass), nowhere)


def linear_actor_log_prob(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    spec: SamplingSpec,
    *,
    kept: KeptSets | None = None,
    log_kept_mass: Tensor | None = None,
    **options: Any,  # noqa: ANN401
) -> LinearLogProb:
    """Compute log π as `actor_log_prob` does, but from hidden states and the head's weight, without logits.

    Args:
        hidden: the hidden states that predict the tokens, (…, d).
        weight: weight of the output head, (V, d).
        token_ids: the sampled tokens, (…).
        spec: the transforms of the log-probs.
        kept: as in `actor_log_prob`.
        log_kept_mass: as in `actor_log_prob`.
        options: further options of `rollcorr.kernels.linear_logprob.linear_log_prob`, such as `bias` and
            `accumulate_into`.

    Raises:
        ValueError: as in `actor_log_prob`; or the support must be recomputed, which needs logits.
    """
    sets = _replayed_sets(spec, kept)
    if spec.restricts and spec.support not in ("replayed", "kept_mass"):
        raise ValueError(f"support={spec.support!r} needs logits: use actor_log_prob, or replay the engine's kept sets")
    found = linear_log_prob(hidden, weight, token_ids, temperature=_log_prob_temperature(spec), kept=sets, **options)
    return found._replace(log_prob=_subtract_log_kept_mass(found.log_prob, spec, log_kept_mass))


def actor_entropy(logits: Tensor, token_ids: Tensor, spec: SamplingSpec, *, kept: KeptSets | None = None) -> Tensor:
    """Compute the entropy over the support that `actor_log_prob` uses.

    With support "kept_mass" no set is known, so this is the entropy of the full softmax.

    Args:
        logits: z, (…, V), any float dtype.
        token_ids: the sampled tokens, (…), integers in 0 … V − 1.
        spec: the transforms of the trainer's log-probs.
        kept: the engine's kept sets, for support "replayed".

    Returns:
        (…), nats, at least float32.

    Raises:
        ValueError: as `actor_log_prob`.
    """
    sets = _replayed_sets(spec, kept)
    if sets is not None:
        return kept_entropy(logits, token_ids, sets, temperature=spec.temperature)
    if spec.restricts and spec.support != "kept_mass":
        support, _ = with_sampled(recomputed_support(logits, spec), token_ids)
        logits = logits.masked_fill(~support, -torch.inf)
    return token_entropy(logits, temperature=_log_prob_temperature(spec))


def recomputed_support(logits: Tensor, spec: SamplingSpec) -> Tensor:
    """Compute the support of a spec's temperature, top-k, top-p and min-p, in its engine's order: (…, V) bool.

    An unknown engine, or one of unknown order, defaults to the order of transformers. The sampled token may be outside
    the support: see `rollcorr.core.sampling`.
    """
    engine = spec.engine_sampling
    order = engine.order or ("temperature", "top_k", "top_p", "min_p")
    filters: dict[str, Filter] = {}
    if spec.top_k > 0:
        filters["top_k"] = partial(top_k_support, top_k=spec.top_k)
    if spec.top_p < 1:
        filters["top_p"] = partial(top_p_support, top_p=spec.top_p)
    if spec.min_p > 0:
        filters["min_p"] = partial(min_p_support, min_p=spec.min_p)

    # The temperature changes top-p and min-p only where the engine divides by it first.
    ordered = [name for name in order if name in filters or name == "temperature"]
    scaled = at_least_float32(logits)
    if ordered[0] == "temperature":
        scaled = scaled / spec.temperature
    chosen = [filters[name] for name in ordered if name in filters]
    return joint_support(scaled, chosen) if engine.joint else sequential_support(scaled, chosen)


def _log_prob_temperature(spec: SamplingSpec) -> float:
    return 1.0 if spec.logprobs == "raw" else spec.temperature


def _replayed_sets(spec: SamplingSpec, kept: KeptSets | None) -> KeptSets | None:
    """Return the engine's kept sets if the support replays them. Penalties raise `ValueError` for every support."""
    off = SamplingSpec()
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_new_tokens"):
        if getattr(spec, name) != getattr(off, name):
            raise ValueError(
                f"{name}={getattr(spec, name)!r} depends on the tokens before: apply it to the logits and take it out "
                "of the spec"
            )
    if not spec.restricts or spec.support != "replayed":
        return None
    if kept is None:
        raise ValueError("support='replayed' needs the engine's kept sets; record them, or use 'recomputed'")
    return kept


def _subtract_log_kept_mass(log_prob: Tensor, spec: SamplingSpec, log_kept_mass: Tensor | None) -> Tensor:
    """Return log p − log S for the support "kept_mass", and log p for any other support."""
    if not spec.restricts or spec.support != "kept_mass":
        return log_prob
    if log_kept_mass is None:
        raise ValueError("support='kept_mass' needs log_kept_mass, the log of the engine's kept mass at each token")
    return log_prob - log_kept_mass.to(log_prob.dtype)
