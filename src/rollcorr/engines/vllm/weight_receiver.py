"""Weight updates inside a vLLM worker: reload the weights in place, and repack the output head.

`WeightReloader` is mixed into vLLM's workers (`worker_extension_cls`), so it runs next to the model, on every rank.
The folder contains a Hugging Face checkpoint in safetensors; each rank reads it and loads its shard.

The head needs care. With tied embeddings a checkpoint has no head: vLLM loads the embedding, and the head shares the
tensor. On the CPU the head computes with a packed copy from the start of the engine, and a reload does not change
that copy: the new body feeds the old head, without an error. So each reload packs the head again. On a GPU the head
has no such copy, and no repacking is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollcorr.engines.transport.weight_folder import checkpoint_weights

# Import path of the worker extension for vLLM.
WORKER_EXTENSION = "rollcorr.engines.vllm.weight_receiver.WeightReloader"


class WeightReloader:
    """Mixin for vLLM's workers; `collective_rpc` calls its methods."""

    def rollcorr_reload(self, folder: str) -> None:
        """Load every weight in `folder`."""
        self.reload_weights(weights_iterator=checkpoint_weights(Path(folder)))  # type: ignore[attr-defined]
        repack_output_head(self.get_model())  # type: ignore[attr-defined]


def repack_output_head(model: Any) -> None:  # noqa: ANN401 (a model of vLLM)
    """Pack the output head again, if it has a packed copy."""
    for module in model.modules():
        if hasattr(module, "tie_weights") and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
