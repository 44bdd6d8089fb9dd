"""The environment variables that carry the switch to other processes.

Importing the plugin runs it, so names that the package itself needs are defined here: otherwise an import of the
package would install the switch half-way.
"""

SWITCH = "ROLLCORR_VERL"
ROLLOUTS = "ROLLCORR_VERL_ROLLOUTS"
MODULES = "VERL_USE_EXTERNAL_MODULES"
RAY_HOOK = "RAY_RUNTIME_ENV_HOOK"
RAY_HOOK_BEFORE = "ROLLCORR_RAY_RUNTIME_ENV_HOOK"
WITH_PLUGIN = "rollcorr.integrations.verl_plugin.with_plugin"
