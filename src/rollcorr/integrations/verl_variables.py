"""The environment variables that carry the switch to other processes.

The plugin acts when it is imported, so what the package itself needs of it stands here: else an import of the package
would install it half-way.
"""

SWITCH = "ROLLCORR_VERL"
MODULES = "VERL_USE_EXTERNAL_MODULES"
RAY_HOOK = "RAY_RUNTIME_ENV_HOOK"
RAY_HOOK_BEFORE = "ROLLCORR_RAY_RUNTIME_ENV_HOOK"
WITH_PLUGIN = "rollcorr.integrations.verl_plugin.with_plugin"
