"""Variants of scoring one row: each computes log-probs of the response as a faulty sampler or trainer would.

A pass is one forward computation of the model, over one context and in one precision. Several variants share the pass
over the logged context, because they differ only in what follows from its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollcorr.core.sampling import Filter, top_k_support, top_p_support, with_sampled

TEMPERATURES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.75, 2.0)
REPETITION_PENALTIES = (1.02, 1.05, 1.1, 1.15, 1.2, 1.3)
PENALTIES = (0.2, 0.4, 0.6, 0.8, 1.0, 1.5)
TOP_P, TOP_K = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99), (5, 10, 20, 40, 50, 100)

# The logged context and temperature in float32 and evaluation mode, without any change.
PLAIN = "plain"


@dataclass(frozen=True)
class LoggedRow:
    """One logged row.

    Attributes:
        prompt: token ids.
        response: token ids, (T,).
        sampled: (T,) bool, true on tokens that the policy sampled.
        log_probs: side → (T,) float64 nats: "sampler" is log μ, "trainer" is log π_old or log π_θ.
        neighbors: name → prompt of another row.
        temperature: the recorded temperature of both sides' log-probs, which every variant starts from.
    """

    prompt: tuple[int, ...]
    response: Tensor
    sampled: Tensor
    log_probs: dict[str, Tensor]
    neighbors: Mapping[str, tuple[int, ...]] = field(default_factory=dict, repr=False)
    temperature: float = 1.0


Template = Callable[[tuple[int, ...]], "tuple[int, ...] | None"]

# Name of a variant; its (T,) log-probs in nats, NaN where it has no value; and the same from a pass in bfloat16, which
# shows what rounding does to it. None for a changed context, where it does as much as to the plain scores.
Scores = tuple[str, Tensor, "Tensor | None"]


def score_row(model: Any, row: LoggedRow, template: Template) -> Iterator[Scores]:  # noqa: ANN401
    """Yield the log-probs of a row under each variant; the plain scores are first.

    Args:
        model: a causal language model of `transformers` in float32 and evaluation mode.
        row: the row.
        template: function that adds a chat template to a prompt, or removes it; None where it does neither.
    """
    logits = _logits(model, row.prompt, row.response)
    rounded = _logits(model, row.prompt, row.response, dtype=torch.bfloat16)
    for (name, scores), (_, of_rounded) in zip(_of_logits(logits, row), _of_logits(rounded, row), strict=True):
        yield name, scores, of_rounded

    # A changed context needs a pass of its own.
    contexts: dict[str, tuple[int, ...] | None] = {
        "chat template": template(row.prompt),
        "BOS": _toggled_bos(model, row),
        **row.neighbors,
    }
    for name, prompt in contexts.items():
        if prompt and prompt != row.prompt:
            yield name, _gathered(_logits(model, prompt, row.response) / row.temperature, row.response), None


def _of_logits(logits: Tensor, row: LoggedRow) -> Iterator[tuple[str, Tensor]]:
    """Yield the variants that follow from the logits (T, V) of the logged context; the plain scores are first."""
    raw, logits = logits, logits / row.temperature
    yield PLAIN, _gathered(logits, row.response)
    rounded = raw.to(torch.bfloat16)
    of_rounded = (rounded / row.temperature).log_softmax(-1)
    yield "bfloat16 log-softmax", _gathered(of_rounded, row.response, normalized=True)
    yield "bfloat16 logits", _gathered(rounded.float() / row.temperature, row.response)

    # Logits of the token itself in place of those of its predecessor; and the log-probs moved by one token. One end of
    # the row has no value then.
    unshifted = _gathered(logits.roll(-1, 0), row.response)
    early, late = (_gathered(logits, row.response).roll(by) for by in (-1, 1))
    unshifted[-1] = early[-1] = late[0] = torch.nan
    yield "logits not shifted", unshifted
    yield "log-probs one token early", early
    yield "log-probs one token late", late

    for value in TEMPERATURES:
        if value != row.temperature:
            yield f"temperature {value:g}", _gathered(raw / value, row.response)

    # Engines apply penalties before the temperature.
    counts = _occurrences(row, logits.shape[-1])
    for value in REPETITION_PENALTIES:
        penalized = _with_repetition(raw, counts(True), value) / row.temperature
        yield f"repetition penalty {value:g}", _gathered(penalized, row.response)
    for value in PENALTIES:
        seen = counts(False) / row.temperature
        yield f"presence penalty {value:g}", _gathered(logits - value / row.temperature * (seen > 0), row.response)
        yield f"frequency penalty {value:g}", _gathered(logits - value * seen, row.response)
    filters: dict[str, Filter] = {f"top-p {p:g}": partial(top_p_support, top_p=p) for p in TOP_P}
    filters |= {f"top-k {k}": partial(top_k_support, top_k=k) for k in TOP_K if k < logits.shape[-1]}
    for name, keep in filters.items():
        # The sampler's rounding may keep a token at the edge that float32 removes: a sampled token is in the set.
        support, _ = with_sampled(keep(logits), row.response)
        yield name, _gathered(logits.masked_fill(~support, -torch.inf), row.response)


@torch.no_grad()
def _logits(model: Any, prompt: Sequence[int], response: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:  # noqa: ANN401
    """Return the logits that each response token was drawn from, (T, V) float32."""
    ids = torch.tensor([[*prompt, *response.tolist()]], device=model.device)
    with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        logits: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=len(response) + 1).logits
    return logits[0, :-1].float().cpu()


def _gathered(logits: Tensor, response: Tensor, *, normalized: bool = False) -> Tensor:
    log_probs = logits if normalized else logits.log_softmax(-1)
    return log_probs.gather(-1, response[:, None]).squeeze(-1).double()


def _occurrences(row: LoggedRow, vocabulary: int) -> Callable[[bool], Tensor]:
    """Return a function: counts of each id before each response token, (T, V), with or without the prompt."""
    drawn = torch.zeros(len(row.response), vocabulary, device="cpu")
    drawn[torch.arange(1, len(row.response), device="cpu"), row.response[:-1]] = 1.0
    of_response = drawn.cumsum(0)
    of_prompt = torch.bincount(torch.tensor(row.prompt, dtype=torch.int64, device="cpu"), minlength=vocabulary)[
        :vocabulary
    ]
    return lambda with_prompt: of_response + of_prompt if with_prompt else of_response


def _with_repetition(logits: Tensor, counts: Tensor, penalty: float) -> Tensor:
    """Divide positive logits of seen ids by the penalty, and multiply negative ones (Keskar et al., 2019)."""
    return torch.where(counts > 0, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def _toggled_bos(model: Any, row: LoggedRow) -> tuple[int, ...] | None:  # noqa: ANN401
    """Return the prompt with its first BOS removed, or with one added; None for a model without BOS."""
    bos = model.config.bos_token_id
    if bos is None:
        return None
    return row.prompt[1:] if row.prompt[:1] == (bos,) else (bos, *row.prompt)
