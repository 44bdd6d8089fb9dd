"""Put this library's functions in place of verl's in one process, before or after verl's trainers are imported."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from rollcorr.integrations.verl.bypass import wire_bypass_mode
from rollcorr.integrations.verl.losses import compute_policy_loss_bypass_mode, compute_policy_loss_vanilla

HELPER = "verl.trainer.ppo.rollout_corr_helper"


def install() -> None:
    """Replace verl's rollout-correction helper, register the losses, and wire bypass mode in every trainer's config.

    Call it in each process of a run: the one with the trainer, and those with the actors. As a text it is the
    `worker_process_setup_hook` of Ray: "rollcorr.integrations.verl.install". Calling it again changes nothing.

    Raises:
        ImportError: verl is not installed, or it has no `need_critic`, where its trainers hand over their
            configuration before they build a worker.
    """
    parent, core_algos, utils = (
        importlib.import_module(name)
        for name in ("verl.trainer.ppo", "verl.trainer.ppo.core_algos", "verl.trainer.ppo.utils")
    )
    if not hasattr(utils, "need_critic"):
        raise ImportError(
            "verl.trainer.ppo.utils has no need_critic: this verl is not one that install() knows. Change the imports "
            "as docs/verl.md says, and call wire_bypass_mode(config) before the trainer is built"
        )
    ours, theirs = importlib.import_module("rollcorr.integrations.verl"), sys.modules.get(HELPER)

    # Modules that were imported before this call hold verl's functions under their own names.
    replacements: list[tuple[str, Any, Any]] = []
    if theirs not in (None, ours):
        replacements = [(name, vars(theirs).get(name), getattr(ours, name)) for name in ours.__all__]
    if not getattr(utils.need_critic, "wires_bypass_mode", False):
        replacements.append(("need_critic", utils.need_critic, _wiring(utils.need_critic)))
    verl_modules = [m for name, m in sys.modules.items() if name.startswith("verl.") and m is not theirs]
    for module in verl_modules:
        for name, original, replacement in replacements:
            if original is not None and vars(module).get(name) is original:
                setattr(module, name, replacement)

    # Modules that are imported from now on find ours; actors look their loss up by name.
    sys.modules[HELPER] = ours
    parent.rollout_corr_helper = ours  # type: ignore[attr-defined]
    core_algos.POLICY_LOSS_REGISTRY["vanilla"] = compute_policy_loss_vanilla
    core_algos.POLICY_LOSS_REGISTRY["bypass_mode"] = compute_policy_loss_bypass_mode


def _wiring(need_critic: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """verl's `need_critic`, which each of its trainers asks in its constructor, with bypass mode wired first."""

    @functools.wraps(need_critic)
    def wired(config: Any) -> bool:  # noqa: ANN401 (the configuration of a verl run)
        wire_bypass_mode(config)
        return need_critic(config)

    wired.wires_bypass_mode = True  # type: ignore[attr-defined]
    return wired
