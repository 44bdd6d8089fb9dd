"""Replace verl's functions by this library's, in one process, before or after verl's trainers are imported.

`install` replaces functions in the modules that define them, so every later import returns ours; it also patches
modules that imported one before. `uninstall` restores verl's functions. `rollcorr.integrations.verl_plugin` passes the
switch to other processes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, MutableMapping
from types import ModuleType
from typing import Any

from rollcorr import __version__
from rollcorr.integrations.verl.bypass import wire_bypass_mode
from rollcorr.integrations.verl_variables import RAY_HOOK, RAY_HOOK_BEFORE, SWITCH, WITH_PLUGIN

logger = logging.getLogger(__name__)

HELPER = "verl.trainer.ppo.rollout_corr_helper"
CORE_ALGOS = "verl.trainer.ppo.core_algos"
UTILS = "verl.trainer.ppo.utils"

_undo_stack = contextlib.ExitStack()


def install() -> None:
    """Replace verl's rollout-correction functions and losses, and wire bypass mode in every trainer's configuration.

    It covers this process and the Ray workers of every later `ray.init`. A log line lists the active functions.
    The call is idempotent. Its name, "rollcorr.integrations.verl.install", can be a `worker_process_setup_hook` of Ray.

    Raises:
        ImportError: verl is not installed, or its functions have different arguments; no function is replaced then.
    """
    modules = {name: importlib.import_module(name) for name in (HELPER, CORE_ALGOS, UTILS)}
    replacements = _replacements(modules)
    if not replacements:
        return

    # Modules that were imported before have their own references to verl's functions, verl-omni's modules too.
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(("verl.", "verl_omni.")):
            _replace_values(vars(module), replacements)

    # Actors look their loss up by name.
    losses = _replace_values(modules[CORE_ALGOS].POLICY_LOSS_REGISTRY, replacements)
    _carry_to_ray_workers()

    # Names of the active functions.
    parts = [f"{', '.join(_our_functions(modules[name]))} of {name}" for name in (HELPER, CORE_ALGOS)]
    parts.append(f"the policy losses {', '.join(losses)}")
    logger.warning(
        "rollcorr %s replaces in %s: %s; bypass mode reaches the actor", __version__, _verl_version(), "; ".join(parts)
    )


def uninstall() -> None:
    """Undo `install` in this process. Running Ray workers keep our functions."""
    _undo_stack.close()


def _replacements(modules: dict[str, ModuleType]) -> dict[int, Callable[..., Any]]:
    """Return our functions, keyed by the `id` of verl's function that each replaces.

    Raises:
        ImportError: verl lacks `need_critic`, to which its trainers pass their configuration before they build a
            worker, or a function has different arguments.
    """
    need_critic = getattr(modules[UTILS], "need_critic", None)
    if need_critic is None:
        raise ImportError(
            f"{UTILS} has no need_critic: this verl is not one that install() knows. Change the imports as "
            "docs/coming_from/verl.md says, and call wire_bypass_mode(config) before the trainer is built"
        )
    replacements: dict[int, Callable[..., Any]] = {}
    if not hasattr(need_critic, "wires_bypass_mode"):
        replacements[id(need_critic)] = _wrap_need_critic(need_critic)

    for module in (modules[HELPER], modules[CORE_ALGOS]):
        for name, ours in _our_functions(module).items():
            theirs = vars(module)[name]
            if theirs is ours:
                continue

            # Our functions must accept every argument that verl's callers pass.
            expected, known = (list(inspect.signature(function).parameters) for function in (theirs, ours))
            if expected != known[: len(expected)]:
                raise ImportError(
                    f"{module.__name__}.{name} of {_verl_version()} takes ({', '.join(expected)}), and ours "
                    f"({', '.join(known)}): this verl is not one that install() knows. Change the imports as "
                    "docs/coming_from/verl.md says; for verl of November 2025 use "
                    "rollcorr.integrations.verl.v2025_11"
                )
            replacements[id(theirs)] = ours
    return replacements


def _our_functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return our functions that replace functions of verl's module, by name."""
    package = importlib.import_module("rollcorr.integrations.verl")
    functions = {name: getattr(package, name) for name in package.__all__ if name in vars(module)}
    return {name: function for name, function in functions.items() if inspect.isfunction(function)}


def _wrap_need_critic(need_critic: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a wrapper of verl's `need_critic` that wires bypass mode; every trainer's constructor calls it."""

    @functools.wraps(need_critic)
    def wired(config: Any) -> bool:  # noqa: ANN401 (the configuration of a verl run)
        wire_bypass_mode(config)
        return need_critic(config)

    wired.wires_bypass_mode = True  # type: ignore[attr-defined]
    return wired


def _replace_values(holder: MutableMapping[str, Any], replacements: dict[int, Any]) -> list[str]:
    """Replace verl's functions in a module or a registry by ours, and return the replaced names."""
    names = [name for name, value in holder.items() if id(value) in replacements]
    for name in names:
        _set_with_undo(holder, name, replacements[id(holder[name])])
    return names


def _set_with_undo(holder: MutableMapping[str, Any], name: str, value: Any) -> None:  # noqa: ANN401 (any value)
    if name in holder:
        _undo_stack.callback(holder.__setitem__, name, holder[name])
    else:
        _undo_stack.callback(holder.pop, name, None)
    holder[name] = value


def _carry_to_ray_workers() -> None:
    """Switch verl in the workers of every later `ray.init`, and warn if Ray is initialized already."""
    ray = sys.modules.get("ray")
    if ray is not None and not os.environ.get(SWITCH) and hasattr(ray, "is_initialized") and ray.is_initialized():
        context = ray.get_runtime_context()
        started_here = context.worker.mode == ray.SCRIPT_MODE
        if started_here and SWITCH not in context.runtime_env.get("env_vars", {}):
            warnings.warn(
                "Ray was started before install(): its workers keep verl's own functions. Call install() before "
                f"ray.init(), or start the run with {SWITCH}=1",
                RuntimeWarning,
                stacklevel=3,
            )

    # A child process reads the first variable; `ray.init` calls the function that the second names.
    _set_with_undo(os.environ, SWITCH, "1")
    hook = os.environ.get(RAY_HOOK)
    if hook and hook != WITH_PLUGIN:
        _set_with_undo(os.environ, RAY_HOOK_BEFORE, hook)
    _set_with_undo(os.environ, RAY_HOOK, WITH_PLUGIN)


def _verl_version() -> str:
    return f"verl {getattr(sys.modules['verl'], '__version__', 'of unknown version')}"
