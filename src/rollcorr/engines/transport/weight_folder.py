"""Write and read a policy as a Hugging Face checkpoint, to send weights to an engine in another process."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

WEIGHTS = "*.safetensors*"


def write_checkpoint(model: Any, folder: Path, *, dtype: torch.dtype) -> None:  # noqa: ANN401 (a transformers model)
    """Write configuration and weights, with parameters rounded to `dtype`. Removes older weights in the folder first.

    Args:
        model: a model of `transformers`; unchanged.
        folder: an existing folder.
        dtype: precision of the parameters in the files. Buffers keep their own.
    """
    # A larger older checkpoint may have more files, which an engine would read as well.
    for file in folder.glob(WEIGHTS):
        file.unlink()

    saved = model.state_dict().keys()
    weights = {name: buffer.detach() for name, buffer in model.named_buffers() if name in saved}
    weights |= {name: parameter.detach().to(dtype) for name, parameter in model.named_parameters()}  # tied ones once

    # With an initialized process group, transformers 5 writes on rank 0 only, but every rank has a folder of its own.
    model.should_save_on_this_rank = lambda _: True
    try:
        with without_progress_bars():
            model.save_pretrained(folder, state_dict=weights)
    finally:
        del model.should_save_on_this_rank


def checkpoint_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors of all safetensors files of a folder.

    Raises:
        FileNotFoundError: the folder has no safetensors file.
    """
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {str(folder)!r}; every process must see it under this path")
    for file in files:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a mapping)
                yield name, weights.get_tensor(name)


def read_policy(folder: Path, weights: Mapping[str, torch.Tensor]) -> Any:  # noqa: ANN401 (a transformers model)
    """Build a float32 model from the configuration in `folder` and weights named as in `checkpoint_weights`."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory(prefix="rollcorr-weights-") as place, without_progress_bars():
        other = Path(place)
        shutil.copy(folder / "config.json", other)
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, other / "model.safetensors")
        return AutoModelForCausalLM.from_pretrained(
            other, local_files_only=True, trust_remote_code=False, dtype=torch.float32
        )


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hide transformers' progress bars for reading and writing weights, inside the `with` block."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
