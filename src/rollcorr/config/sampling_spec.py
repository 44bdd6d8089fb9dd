"""Sampling settings behind a log-prob, and the check whether two log-probs may be subtracted.

A `SamplingSpec` accompanies every log-prob tensor: from the engine into the rollout log and to the trainer.
`check_compatible` compares two specs. The table of engines contains the order of each engine's transforms and the way
to get the log-probs of its samples. This module does not import torch. docs/guides/sampling.md explains the rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rollcorr.config.checks import check_choice, check_integer, check_number, names_unknown_options
from rollcorr.config.finding import Finding, HasFindings

__all__ = [
    "ENGINES",
    "JSON_MINUS_INFINITY",
    "MOST_ROUNDED_UP",
    "Comparison",
    "EngineSampling",
    "IncompatibleSamplingError",
    "SamplingSpec",
    "check_compatible",
    "compare",
]

Transform = Literal["logit_bias", "penalties", "min_new_tokens", "temperature", "top_k", "top_p", "min_p"]
Support = Literal["engine", "recomputed", "replayed", "kept_mass"]
Actor = Literal["full", "recompute", "replay", "kept_mass"]
Verdict = Literal["same", "approximate", "different"]

JSON_MINUS_INFINITY = -9999.0
"""What engines write for a log-prob of −inf, which JSON cannot hold. No sampled token has it, so it marks a token whose
log-prob is missing."""

MOST_ROUNDED_UP = 2.0**-8
"""Largest log-prob above 0 that the rounding of bfloat16 makes of a probability of 1, nats."""

_TRUNCATIONS = ("top_k", "top_p", "min_p")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
# Raw log-probs ignore every setting; tempered ones only ignore the truncation.
_OMITTED_SETTINGS = {"raw": ("temperature", *_PENALTIES, *_TRUNCATIONS), "tempered": _TRUNCATIONS, "processed": ()}
_LIMITS: Mapping[str, Mapping[str, float]] = {
    "temperature": {"at_least": 0},
    "top_p (1 for off)": {"above": 0, "at_most": 1},
    "min_p": {"at_least": 0, "at_most": 1},
    "repetition_penalty": {"above": 0},
    "presence_penalty": {},
    "frequency_penalty": {},
}
_SUPPORT_OF_ACTOR: Mapping[str, Support] = {
    "full": "engine",
    "recompute": "recomputed",
    "replay": "replayed",
    "kept_mass": "kept_mass",
}


@dataclass(frozen=True, kw_only=True)
class EngineSampling:
    """Sampling behavior of an engine, and the log-probs that it returns.

    Attributes:
        order: its transforms, first to last. Empty if unknown.
        joint: top-k, top-p and min-p all use the same unrenormalized softmax; otherwise each uses the renormalized
            output of the previous one.
        logprobs: the kinds it can return, its default first.
        processed: how to get the log-probs of the distribution it sampled from.
        kept_sets: how to get the ids that could be sampled; None if the engine does not return them.
    """

    order: tuple[Transform, ...]
    joint: bool = False
    logprobs: tuple[Literal["raw", "tempered", "processed"], ...]
    processed: str
    kept_sets: str | None = None


ENGINES: Mapping[str, EngineSampling] = {
    "transformers": EngineSampling(
        order=("logit_bias", "penalties", "min_new_tokens", "temperature", "top_k", "top_p", "min_p"),
        logprobs=("raw", "processed"),
        processed="read `output_scores` instead of `output_logits`",
        kept_sets="the finite entries of `output_scores`",
    ),
    "vllm": EngineSampling(
        order=("min_new_tokens", "logit_bias", "penalties", "temperature", "min_p", "top_k", "top_p"),
        logprobs=("raw", "processed"),
        processed='start it with `logprobs_mode="processed_logprobs"`',
        kept_sets="`return_sampling_mask`, or the finite entries of `logprobs=top_k` under processed_logprobs",
    ),
    "sglang": EngineSampling(
        order=("penalties", "logit_bias", "temperature", "top_k", "top_p", "min_p"),
        joint=True,
        logprobs=("tempered", "processed"),
        processed="ask for `return_sampling_mask` and read `output_token_sampling_logprobs`",
        kept_sets="`output_token_sampling_mask`, with `return_sampling_mask`",
    ),
    "llama.cpp": EngineSampling(
        order=("logit_bias", "penalties", "top_k", "top_p", "min_p", "temperature"),
        logprobs=("raw",),
        processed="take its logits through its own transforms, temperature last",
    ),
    "ctranslate2": EngineSampling(
        order=(),
        logprobs=("raw",),
        processed="sample at temperature 1 without truncation: it returns raw log-probs only",
    ),
}
"""Engines by name, from their sources and measured answers; docs/guides/sampling.md shows the table."""

_DEFAULT = EngineSampling(
    order=("temperature", "top_k", "top_p", "min_p"), logprobs=("raw",), processed="return processed log-probs"
)


class IncompatibleSamplingError(ValueError):
    """Error for a difference of two log-probs that are not comparable; the message contains the reason and the fix."""


@names_unknown_options
@dataclass(frozen=True, kw_only=True)
class SamplingSpec:
    """Distribution of a log-prob: the sampling settings, and the engine or trainer that applied them.

    Two log-probs may be subtracted only if all settings that change a probability agree (`check_compatible`).

    Attributes:
        temperature: divisor of the logits; 0 is greedy decoding.
        top_p: nucleus mass, in (0, 1]; 1 is off.
        top_k: number of tokens that are kept; −1 is off.
        min_p: smallest probability that is kept, as a share of the largest one, in [0, 1]; 0 is off.
        repetition_penalty: divisor of seen tokens' logits, > 0; 1 is off.
        presence_penalty: amount subtracted once from a seen token's logit; 0 is off.
        frequency_penalty: amount subtracted from a token's logit for each occurrence; 0 is off.
        logit_bias: amounts added to logits by token id: a mapping, or (as stored) the string "id:bias,id:bias".
        min_new_tokens: smallest length of a response; the end token is masked until then.
        logprobs: "raw": at temperature 1 over the full vocabulary, for any settings; "tempered": after penalties, bias
            and temperature, over the full vocabulary; "processed": after these and the truncation, renormalized.
        support: token set of a truncated log-prob. "engine": the set of the sampling engine; "recomputed": a set from
            the trainer's own logits; "replayed": the engine's recorded set; "kept_mass": none, but the log of the
            recorded kept mass is subtracted from a full log-prob.
        engine: name of the engine that sampled ("vllm", "transformers", …); optional. Determines the order of
            transforms (`ENGINES`).
        engine_version: version of that engine; optional.
        policy_version: version number of the weights that sampled; optional.

    Raises:
        TypeError: a value has an invalid type.
        ValueError: a value is outside its limits, or `support` is not the engine's and the log-probs are not processed.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Any = ""  # OmegaConf knows no union with a mapping; checked below
    min_new_tokens: int = 0
    logprobs: Literal["raw", "tempered", "processed"] = "raw"
    support: Support = "engine"
    engine: str | None = None
    engine_version: str | None = None
    policy_version: int | None = None

    def __post_init__(self) -> None:
        for option, limits in _LIMITS.items():
            check_number(option, getattr(self, option.split()[0]), **limits)
        check_integer("top_k (−1 for off)", self.top_k, at_least=-1)
        if self.top_k == 0:
            raise ValueError("top_k must be −1 (off) or >= 1; got 0")
        object.__setattr__(self, "logit_bias", _canonical_bias(self.logit_bias))
        check_integer("min_new_tokens", self.min_new_tokens, at_least=0)
        check_choice("logprobs", self.logprobs, ("raw", "tempered", "processed"))
        check_choice("support", self.support, ("engine", "recomputed", "replayed", "kept_mass"))
        if self.support != "engine" and self.logprobs != "processed":
            raise ValueError(
                f"support={self.support!r} is about processed log-probs; got logprobs={self.logprobs!r}. "
                "Set logprobs='processed', or leave support out"
            )
        for option in ("engine", "engine_version"):
            if not isinstance(getattr(self, option), str | None):
                raise TypeError(f"{option} must be a text or None; got {getattr(self, option)!r}")
        if self.policy_version is not None:
            check_integer("policy_version", self.policy_version, at_least=0)

    @property
    def restricts(self) -> bool:
        """True if the log-probs come from a softmax over a subset of the vocabulary."""
        return self.logprobs == "processed" and self.truncates

    @property
    def truncates(self) -> bool:
        """True if top-k, top-p or min-p is on."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def engine_sampling(self) -> EngineSampling:
        """The engine's row of `ENGINES`; an unknown engine defaults to the order of transformers."""
        return ENGINES.get(self.engine or "", _DEFAULT)

    def for_actor(self, actor: Actor, *, temperature: float | None = None) -> SamplingSpec:
        """Return the spec of the log-probs that a trainer computes of tokens sampled with this one.

        Args:
            actor: "full": divide by the temperature, full vocabulary (also for a reference policy);
                "recompute": also truncate its own logits; "replay": take the softmax over the engine's kept sets;
                "kept_mass": full vocabulary, minus the log of the engine's kept mass.
            temperature: divisor of the actor's logits; defaults to this spec's.

        Returns:
            A processed spec. Penalties, bias and the mask of the end token are off, because actors only see logits. Set
            them with `dataclasses.replace` for an actor that applies them.

        Raises:
            ValueError: `actor` is not one of the four.
        """
        check_choice("actor", actor, _SUPPORT_OF_ACTOR)
        on = actor != "full"
        return SamplingSpec(
            temperature=self.temperature if temperature is None else temperature,
            top_p=self.top_p if on else 1.0,
            top_k=self.top_k if on else -1,
            min_p=self.min_p if on else 0.0,
            logprobs="processed",
            support=_SUPPORT_OF_ACTOR[actor],
            engine=self.engine,
        )

    def biases(self) -> dict[int, float]:
        """Return `logit_bias` as a mapping from token id to number."""
        return _parse_bias(str(self.logit_bias))


@dataclass(frozen=True)
class Comparison(HasFindings):
    """Result of the check whether two log-probs may be subtracted.

    Attributes:
        findings: the differences. An error forbids the subtraction; a warning makes it approximate.
    """

    findings: tuple[Finding, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """Verdict: "same"; "approximate", the same except for `reason`; or "different", not comparable."""
        if not self.findings:
            return "same"
        return "different" if self.errors else "approximate"

    @property
    def reason(self) -> str:
        """The reasons for the verdict; empty for "same"."""
        return "; ".join(finding.reason for finding in self._decisive_findings)

    @property
    def fix(self) -> str:
        """The change to make; empty for "same"."""
        return "; ".join(dict.fromkeys(finding.fix for finding in self._decisive_findings))

    @property
    def _decisive_findings(self) -> tuple[Finding, ...]:
        return self.errors or self.findings


def check_compatible(rollout: SamplingSpec, trainer: SamplingSpec) -> Comparison:
    """Check that log π − log μ is a log-ratio: the two are comparable, and μ is the distribution of the samples.

    Args:
        rollout: spec of the engine's log-probs.
        trainer: spec of the trainer's log-probs, for instance `rollout.for_actor("replay")`.

    Returns:
        The comparison, "same" or "approximate"; its `reason` explains the approximation.

    Raises:
        IncompatibleSamplingError: they differ; the message names the difference and the fix.

    Example:
        >>> rollout = SamplingSpec(temperature=0.7, top_p=0.9, logprobs="processed", engine="vllm")
        >>> check_compatible(rollout, rollout.for_actor("replay")).verdict
        'same'
    """
    comparison = compare(rollout, trainer)
    if comparison.verdict == "different":
        raise IncompatibleSamplingError(
            f"these log-probs are not comparable: {comparison.reason}. To fix it: {comparison.fix}"
        )
    return comparison


def compare(rollout: SamplingSpec, trainer: SamplingSpec) -> Comparison:
    """Compare as in `check_compatible`, without raising."""
    checks = (_find_greedy, _compare_with_sampling, _compare_settings, _compare_supports)
    return Comparison(tuple(finding for check in checks for finding in check(rollout, trainer)))


def _different_finding(code: str, reason: str, fix: str) -> Finding:
    return Finding(code=code, title="these log-probs are not comparable", reason=reason, fix=fix, severity="error")


def _approximate_finding(code: str, reason: str, fix: str) -> Finding:
    return Finding(code=code, title="these log-probs are only roughly comparable", reason=reason, fix=fix)


def _find_greedy(rollout: SamplingSpec, trainer: SamplingSpec) -> Iterator[Finding]:
    for side, spec in (("rollout", rollout), ("trainer", trainer)):
        if spec.temperature == 0:
            yield _different_finding(
                "greedy",
                f"the {side}'s temperature is 0: one token has probability 1, and no ratio exists",
                "sample and score at a temperature above 0",
            )
            return


def _compare_with_sampling(rollout: SamplingSpec, trainer: SamplingSpec) -> Iterator[Finding]:
    """Yield the reasons why the rollout's log-probs differ from the distribution that sampled its tokens."""
    ignored = _settings_on(rollout, _OMITTED_SETTINGS[rollout.logprobs])
    fix = rollout.engine_sampling.processed
    if ignored:
        reason = f"tokens were sampled with {', '.join(ignored)}, which {rollout.logprobs} log-probs leave out"
        yield _different_finding("not_what_was_sampled", reason, fix)
    if rollout.logprobs != "processed" and rollout.min_new_tokens:
        reason = f"{rollout.logprobs} log-probs include the end token, forbidden for {rollout.min_new_tokens} tokens"
        yield _approximate_finding("end_token", reason, fix)


def _compare_settings(rollout: SamplingSpec, trainer: SamplingSpec) -> Iterator[Finding]:
    """Yield differences in settings that change a probability but not the support."""
    # Raw log-probs are at temperature 1, for any sampling temperature.
    ours, theirs = (1.0 if spec.logprobs == "raw" else spec.temperature for spec in (rollout, trainer))
    if ours != theirs:
        raw = " (raw)" if rollout.logprobs == "raw" else ""
        reason = f"rollout log-probs are at temperature {ours:g}{raw}, the trainer's at {theirs:g}"
        only_reported_raw = raw and rollout.temperature == trainer.temperature
        fix = rollout.engine_sampling.processed if only_reported_raw else f"divide the trainer's logits by {ours:g}"
        yield _different_finding("temperature", reason, fix)

    ours_on, theirs_on = (
        _settings_on(spec, _PENALTIES) if spec.logprobs != "raw" else [] for spec in (rollout, trainer)
    )
    if ours_on != theirs_on:
        texts = [", ".join(names) or "none" for names in (ours_on, theirs_on)]
        reason = f"penalties and biases in the rollout's log-probs: {texts[0]}; in the trainer's: {texts[1]}"
        yield _different_finding("penalties", reason, "apply them on both sides, or sample without them")


def _compare_supports(rollout: SamplingSpec, trainer: SamplingSpec) -> Iterator[Finding]:
    """Yield differences in the token sets of the two softmaxes."""
    if rollout == trainer:
        return
    code, replay = "support", "replay the engine's kept sets on the trainer"

    # The rollout's softmax is over the full vocabulary.
    if rollout.logprobs != "processed" or not rollout.truncates:
        if trainer.truncates:
            reason = "the trainer's softmax runs over a truncated set, the rollout's over the whole vocabulary"
            yield _different_finding(code, reason, "truncate on both sides or on neither")
        elif (
            rollout.logprobs == "processed"
            and rollout.min_new_tokens != trainer.min_new_tokens
            and trainer.support not in ("replayed", "kept_mass")
        ):
            reason = (
                f"the end token was forbidden for {rollout.min_new_tokens} tokens, here for {trainer.min_new_tokens}"
            )
            yield _approximate_finding("end_token", reason, "forbid it on both sides, or set min_new_tokens=0")
        return

    # It is over a truncated set. Only a replay uses exactly that set in the trainer.
    named = ", ".join(_settings_on(rollout, _TRUNCATIONS))
    if trainer.support == "replayed":
        return
    if trainer.support == "kept_mass":
        yield _approximate_finding(
            code, f"{named}: the trainer's mass on the kept set is taken to be the engine's", replay
        )
    elif not trainer.truncates:
        reason = f"the rollout's softmax runs over what {named} kept, the trainer's over the whole vocabulary"
        yield _different_finding(
            code, reason, f"{replay}; with the kept mass S alone, subtract log S from the log-ratio"
        )
    elif any(getattr(rollout, name) != getattr(trainer, name) for name in _TRUNCATIONS):
        reason = (
            f"the rollout was truncated by {named}, the trainer's by {', '.join(_settings_on(trainer, _TRUNCATIONS))}"
        )
        yield _different_finding(code, reason, replay)
    else:
        reason = f"{named} recomputed from other logits: tokens at the boundary fall in or out"
        if rollout.engine not in ENGINES or not rollout.engine_sampling.order:
            reason += ", and the engine's order of transforms is not known"
        yield _approximate_finding(code, reason, replay)


def _settings_on(spec: SamplingSpec, names: Iterable[str]) -> list[str]:
    """Return the settings that are on, with their values."""
    values = {name: getattr(spec, name) for name in names if getattr(spec, name) != getattr(_DEFAULT_SPEC, name)}
    return [f"{name} {value}" if isinstance(value, str) else f"{name} {value:g}" for name, value in values.items()]


def _canonical_bias(bias: object) -> str:
    """Format biases by token id as one string, sorted by id; omit biases of 0."""
    if isinstance(bias, str):
        bias = _parse_bias(bias)
    if not isinstance(bias, Mapping):
        raise TypeError(f"logit_bias must map token ids to numbers; got {bias!r} of type {type(bias).__name__}")
    values = {
        check_integer("a token id of logit_bias", key, at_least=0): check_number(f"logit_bias of token {key}", value)
        for key, value in bias.items()
    }
    return ",".join(f"{key}:{values[key]!r}" for key in sorted(values) if values[key])


def _parse_bias(text: str) -> dict[int, float]:
    try:
        pairs = [pair.split(":") for pair in text.split(",")] if text.strip() else []
        return {int(token): float(value) for token, value in pairs}
    except ValueError as error:
        raise ValueError(f"logit_bias must read 'id:bias,id:bias'; got {text!r}") from error


_DEFAULT_SPEC = SamplingSpec()
