"""The trainer's side: token log-probs from logits or hidden states, as a `SamplingSpec` describes them."""

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
    """log π of the sampled tokens, such that log π − log μ is a log-ratio (after `check_compatible`).

    Args:
        logits: the trainer's, (…, V), before any transform.
        token_ids: the sampled tokens, (…).
        spec: what the log-probs should be, for instance `rollout.for_actor("replay")`. The logits are divided by its
            temperature. Its `support` says how a truncation is repeated.
        kept: the engine's sets. They are needed to replay a truncation.
        log_kept_mass: log S of the engine's sets, (…). It is needed for support "kept_mass", and subtracted.

    Returns:
        Log-probs, nats, and which tokens lay outside the support and were added to it (none without a support).

    Raises:
        ValueError: shapes do not fit, what the support needs is missing, or the spec has penalties or biases, which
            need the tokens before: apply them to the logits and take them out of the spec.
    """
    sets = _replayed_sets(spec, kept)
    if sets is not None:
        return kept_log_prob(logits, token_ids, sets, temperature=spec.temperature)
    if spec.restricts and spec.support != "kept_mass":
        support = recomputed_support(logits, spec)
        return supported_log_prob(logits, token_ids, support, temperature=spec.temperature)
    whole = token_log_prob(logits, token_ids, temperature=_temperature(spec))
    nowhere = whole.new_zeros(whole.shape, dtype=torch.bool)
    return SupportedLogProb(_less_kept_mass(whole, spec, log_kept_mass), nowhere)


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
    """As `actor_log_prob`, from hidden states and the head's weight, without logits.

    Args:
        hidden: the hidden states that predict the tokens, (…, d).
        weight: of the output head, (V, d).
        token_ids: the sampled tokens, (…).
        spec: what the log-probs should be.
        kept: as in `actor_log_prob`.
        log_kept_mass: as in `actor_log_prob`.
        options: others of `rollcorr.kernels.linear_logprob.linear_log_prob`, such as `bias` and `accumulate_into`.

    Raises:
        ValueError: as in `actor_log_prob`; or the support must be recomputed, which needs logits.
    """
    sets = _replayed_sets(spec, kept)
    if spec.restricts and spec.support not in ("replayed", "kept_mass"):
        raise ValueError(f"support={spec.support!r} needs logits: use actor_log_prob, or replay the engine's kept sets")
    found = linear_log_prob(hidden, weight, token_ids, temperature=_temperature(spec), kept=sets, **options)
    return found._replace(log_prob=_less_kept_mass(found.log_prob, spec, log_kept_mass))


def actor_entropy(logits: Tensor, token_ids: Tensor, spec: SamplingSpec, *, kept: KeptSets | None = None) -> Tensor:
    """Entropy over the support that `actor_log_prob` uses.

    With support "kept_mass" no set is known, so this is the entropy of the whole softmax.

    Args:
        logits: z, (…, V), any float dtype.
        token_ids: the sampled tokens, (…), integers in 0 … V − 1.
        spec: what the trainer's log-probs are of.
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
    return token_entropy(logits, temperature=_temperature(spec))


def recomputed_support(logits: Tensor, spec: SamplingSpec) -> Tensor:
    """The support of a spec's temperature, top-k, top-p and min-p, in its engine's order: (…, V) bool.

    An engine that is not known, or whose order is not known, is assumed to work as transformers does. The sampled token
    may be outside: see `rollcorr.core.sampling`.
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


def _temperature(spec: SamplingSpec) -> float:
    return 1.0 if spec.logprobs == "raw" else spec.temperature


def _replayed_sets(spec: SamplingSpec, kept: KeptSets | None) -> KeptSets | None:
    """The engine's kept sets, if the support replays them. Penalties are refused for every support."""
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


def _less_kept_mass(log_prob: Tensor, spec: SamplingSpec, log_kept_mass: Tensor | None) -> Tensor:
    """log p − log S for the support "kept_mass", log p for every other."""
    if not spec.restricts or spec.support != "kept_mass":
        return log_prob
    if log_kept_mass is None:
        raise ValueError("support='kept_mass' needs log_kept_mass, the log of the engine's kept mass at each token")
    return log_prob - log_kept_mass.to(log_prob.dtype)
