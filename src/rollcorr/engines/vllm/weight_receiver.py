"""New weights inside a vLLM worker: reload them in place, and the output head with them.

`WeightReloader` is mixed into vLLM's workers (`worker_extension_cls`), so it runs where the model is, on every rank.
The folder holds a Hugging Face checkpoint in safetensors; each rank reads it and takes its part.

The head needs care. With tied embeddings a checkpoint has no head: vLLM loads the embedding, and the head shares the
tensor. On the CPU the head computes with a packed copy that is made when the engine starts, and a reload does not
change that copy: the new body feeds the old head, without an error. So the head is packed again after each reload. On a
GPU the head has no such copy, and there is nothing to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollcorr.engines.transport.weight_folder import checkpoint_weights

# What vLLM is told to mix into its workers.
WORKER_EXTENSION = "rollcorr.engines.vllm.weight_receiver.WeightReloader"


class WeightReloader:
    """Methods that vLLM's workers get; `collective_rpc` calls them."""

    def rollcorr_reload(self, folder: str) -> None:
        """Load every weight in `folder`."""
        self.reload_weights(weights_iterator=checkpoint_weights(Path(folder)))  # type: ignore[attr-defined]
        repack_output_head(self.get_model())  # type: ignore[attr-defined]


def repack_output_head(model: Any) -> None:  # noqa: ANN401 (a model of vLLM)
    """Make the packed copy of the output head again, if there is one."""
    for module in model.modules():
        if hasattr(module, "tie_weights") and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
