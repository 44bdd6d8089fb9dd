"""The switch for verl in every process of a run: an entry point of the group `verl.plugins`.

verl imports this file at the end of `import verl`, in the driver and in each worker. It is a no-op unless the
environment enables it: ROLLCORR_VERL=1, or this module's name in verl's own VERL_USE_EXTERNAL_MODULES. It avoids heavy
imports, because it is imported for every verl user who has this library.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Mapping
from typing import Any

from rollcorr.integrations.verl_variables import MODULES, RAY_HOOK_BEFORE, ROLLOUTS, SWITCH

SWITCHES = dict.fromkeys(("1", "on", "true", "yes"), True) | dict.fromkeys(("0", "off", "false", "no"), False)


def start() -> None:
    """Install our functions if the environment enables them; exit if they cannot be installed.

    Raises:
        SystemExit: they were enabled but could not be installed, or the switch is neither on nor off. verl hides an
            ordinary error of a plugin, and the run would continue without the correction.
    """
    try:
        switch = os.environ.get(SWITCH, "").strip().lower()
        if switch and switch not in SWITCHES:
            raise ValueError(f"{SWITCH} must be 1 (on) or 0 (off); got {os.environ[SWITCH]!r}")

        # The switch takes precedence over verl's own list of modules.
        is_named = __name__ in _split_names(os.environ.get(MODULES, ""))
        if SWITCHES.get(switch, is_named):
            importlib.import_module("rollcorr.integrations.verl").install()
    except Exception as error:
        raise SystemExit(f"rollcorr could not be installed in verl, and {SWITCH}=0 runs verl alone: {error}") from error


def with_plugin(runtime_env: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return Ray's runtime environment with our switch added; `install` makes `ray.init` call this hook.

    Ray's own variable RAY_RUNTIME_ENV_HOOK names this function; its previous hook is called first.
    """
    # Ray may run on a cluster that was started without our environment, and a worker may lack the entry point.
    extended = dict(runtime_env or {})
    if before := os.environ.get(RAY_HOOK_BEFORE):
        extended = dict(pkgutil.resolve_name(before)(extended) or {})
    variables = dict(extended.get("env_vars") or {})
    modules = [*_split_names(variables.get(MODULES, os.environ.get(MODULES, ""))), __name__]
    rollouts = {ROLLOUTS: os.environ[ROLLOUTS]} if ROLLOUTS in os.environ else {}
    return extended | {"env_vars": rollouts | variables | {SWITCH: "1", MODULES: ",".join(dict.fromkeys(modules))}}


def _split_names(modules: str) -> list[str]:
    return [name.strip() for name in modules.split(",") if name.strip()]


start()
