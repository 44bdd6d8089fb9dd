"""The probe: a fixed batch that engine and policy both score after a weight update, to see that the weights arrived."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rollcorr.engines.model_scoring import TokenBatch, score_responses

PROBE_SHAPE = (4, 16)


def make_probe(model: nn.Module) -> TokenBatch:
    """A fixed batch of arbitrary tokens that reaches every parameter of the model, on its device."""
    parameter = next(model.parameters())
    ids = torch.randint(vocabulary_size(model), PROBE_SHAPE, generator=torch.Generator().manual_seed(0), device="cpu")
    prompt, response = ids.to(parameter.device).chunk(2, dim=1)
    mask = torch.ones_like(prompt, dtype=torch.bool)
    return TokenBatch(prompt, mask, response, mask)


@torch.no_grad()
def score_probe(model: nn.Module, probe: TokenBatch, *, dtype: torch.dtype, temperature: float = 1.0) -> Tensor:
    """Log-probs of the probe's responses under `model` with its parameters rounded to `dtype`, (B, T) float32.

    The policy computes as the engine would, so a parameter that kept its old value shows above rounding.
    """
    rounded = {name: weight.to(dtype) for name, weight in model.named_parameters()}
    return score_responses(_Rounded(model, rounded), probe, temperature=temperature).log_prob


def vocabulary_size(model: Any) -> int:  # noqa: ANN401 (a transformers model)
    """Rows of the input embeddings: how many token ids the model knows, padding of the vocabulary included."""
    return int(model.get_input_embeddings().weight.shape[0])


class _Rounded(nn.Module):
    """A module called with other parameters."""

    def __init__(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self._call = lambda **inputs: functional_call(model, weights, kwargs=inputs)

    def forward(self, **inputs: Any) -> Any:  # noqa: ANN401 (whatever the model takes and returns)
        return self._call(**inputs)
