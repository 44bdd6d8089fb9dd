"""Keep the rollouts of a verl run on disk, without an edit of verl: ROLLCORR_VERL_ROLLOUTS=DIRECTORY."""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from typing import Any

from rollcorr.integrations.verl_variables import ROLLOUTS
from rollcorr.monitor.capture import RolloutCapture
from rollcorr.monitor.field_names import read_fields

logger = logging.getLogger(__name__)


def keep_rollouts(batch: Any) -> None:  # noqa: ANN401 (verl's DataProto or TensorDict, or a `TensorBatch`)
    """Add a step's batch to the capture that the environment names. Never raises: the first error is logged.

    Args:
        batch: has old_log_probs, rollout_log_probs and response_mask, each (B, T); optionally responses, uid, and
            prompts with attention_mask.
    """
    setting = os.environ.get(ROLLOUTS, "").strip()
    if not setting:
        return
    try:
        capture = _capture_of(setting, os.getpid())
        tensors = batch.batch
        fields = read_fields(batch if hasattr(batch, "non_tensor_batch") else tensors, "verl")
        prompts: dict[str, Any] = {}
        prompt_mask = None
        if "prompts" in tensors.keys() and "attention_mask" in tensors.keys():  # noqa: SIM118 (a TensorDict needs it)
            prompts["prompt_ids"] = tensors["prompts"]
            prompt_mask = tensors["attention_mask"][:, : tensors["prompts"].shape[1]]
        log_probs = {"old_log_prob": fields.train_log_prob, "rollout_log_prob": fields.rollout_log_prob}
        capture.add(
            fields.response_mask, {"engine": "verl", **log_probs, **fields.columns, **prompts}, prompt_mask=prompt_mask
        )
        capture.step()
    except Exception as error:
        _log_once(f"{ROLLOUTS}={setting}: rollouts are not kept: {error}")


@lru_cache(maxsize=1)
def _capture_of(setting: str, process: int) -> RolloutCapture:
    """Return the capture of this process for "DIRECTORY[,steps=N][,gib=SIZE][,prompts=0][,ids=0]".

    Raises:
        ValueError: an option is unknown, or its value is no number.
    """
    directory, *options = setting.split(",")
    named = dict(option.partition("=")[::2] for option in options)
    unknown = named.keys() - {"steps", "gib", "prompts", "ids"}
    if unknown:
        raise ValueError(
            f"there is no option {', '.join(sorted(unknown))}; there are steps=N, gib=SIZE, prompts=0 and ids=0"
        )
    return RolloutCapture(
        directory,
        steps=int(named.get("steps", 20)),
        max_bytes=int(float(named.get("gib", 2)) * 2**30),
        prompts=named.get("prompts", "1") != "0",
        ids=named.get("ids", "1") != "0",
    )


@lru_cache(maxsize=16)
def _log_once(message: str) -> None:
    logger.error("%s", message)
