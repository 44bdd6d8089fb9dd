"""Is there the device that a configuration names? Found out before anything is made."""

from __future__ import annotations

import torch


def check_device(name: str) -> None:
    """Check that torch can use a device on this machine.

    Args:
        name: as in torch: "cpu", "cuda", "cuda:1", "mps".

    Raises:
        ValueError: the name means no device, or this machine does not have it. The message is one line.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name[:60]!r} is no device of torch; write cpu, cuda or cuda:N") from None

    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            why = "this torch was built without CUDA" if torch.version.cuda is None else "torch finds no GPU"
            raise ValueError(f"device={name} needs a GPU, but {why}; write device=cpu, or check `rollcorr info`")
        if (device.index or 0) >= count:
            names = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
            raise ValueError(f"device={name} does not exist here; torch finds {names}")

    # Each of the others has an error of its own. What cannot hold a number cannot train.
    try:
        torch.zeros(1, device=device).item()
    except (AssertionError, RuntimeError, NotImplementedError, ImportError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"device={name} cannot be used here: {reason}") from error
