"""The rollout policy: a copy of the transformer in the precision that an inference engine would use.

    float32    the trainer's own, as a control: log-ratios are 0
    bfloat16   parameters and activations in bfloat16
    fp8        weights of linear layers rounded to e4m3 with a scale, activations in bfloat16

fp8 is emulated: w → s · e4m3(w / s) with s = max |w| / 448 over each output channel, kept in bfloat16.
It has the rounding of a weight-only fp8 engine on any device, not its speed. LoRA adapters stay in bfloat16, as engines
keep them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

RolloutDtype = Literal["bfloat16", "fp8", "float32"]
LARGEST_E4M3 = 448.0


class RolloutModel:
    """A frozen copy that is brought up to date on request.

    Args:
        model: the trained transformer, float32.
        dtype: precision of the copy.
    """

    def __init__(self, model: nn.Module, *, dtype: RolloutDtype) -> None:
        self.dtype = dtype
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        if dtype != "float32":
            nn.Module.to(self.module, torch.bfloat16)  # not diffusers' own, which remarks on it
        self.update_weights(model, version=0)

    @torch.no_grad()
    def update_weights(self, model: nn.Module, *, version: int) -> None:
        """Take over the trainer's weights, rounded.

        Raises:
            ValueError: the copy has other tensors than the model; nothing is left out silently.
        """
        source, target = model.state_dict(), self.module.state_dict()
        if source.keys() != target.keys():
            different = sorted(source.keys() ^ target.keys())
            raise ValueError(f"weight sync incomplete: {', '.join(different[:3])} on one side only")

        # Rounded from the trainer's float32, never from the copy: roundings must not add up.
        linear = _linear_weights(model) if self.dtype == "fp8" else set()
        for name, value in source.items():
            target[name].copy_(round_to_e4m3(value) if name in linear else value)
        self.weight_version = version

    def export_weights(self) -> Mapping[str, Tensor]:
        """The copy's weights, for a checkpoint: with adapters those alone, because nothing else ever changes."""
        weights = self.module.state_dict()
        adapters = {name: value for name, value in weights.items() if "lora_" in name}
        return {name: value.detach().cpu().contiguous() for name, value in (adapters or weights).items()}

    def import_weights(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Weights from a checkpoint, rounded already; those that it leaves out are as the copy was made.

        Raises:
            ValueError: they are not those that `export_weights` returns.
        """
        different = sorted(weights.keys() ^ self.export_weights().keys())
        if different:
            raise ValueError(
                f"the engine's weights do not fit model.lora: {different[0]} and {len(different) - 1} more are on one "
                "side only; set model.lora as it was when they were saved"
            )
        self.module.load_state_dict(dict(weights), strict=False)
        self.weight_version = version


def round_to_e4m3(weight: Tensor) -> Tensor:
    """s · e4m3(w / s), s = max |w| / 448: a weight as a weight-only fp8 layer holds it, in the weight's dtype.

    Args:
        weight: (out, in); s is one for each output channel.

    Source: Micikevicius et al. (2022), "FP8 Formats for Deep Learning", arXiv:2209.05433.
    """
    s = (weight.abs().amax(dim=1, keepdim=True) / LARGEST_E4M3).clamp(min=torch.finfo(torch.float32).tiny)
    return (weight / s).to(torch.float8_e4m3fn).to(weight.dtype) * s


def _linear_weights(model: nn.Module) -> set[str]:
    """Names of the weights of linear layers, adapters left out."""
    return {
        f"{name}.weight"
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and "lora_" not in name
    }
