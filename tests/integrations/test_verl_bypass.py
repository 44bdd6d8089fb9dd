"""The actor's switch of bypass mode, without verl: trainers that copy the actor's configuration as verl's do.

tests/integrations/test_verl_own_trainers.py runs verl's own trainers.
"""

import copy
import functools
import inspect
import os
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from rollcorr.config import InertOptionWarning
from rollcorr.integrations import verl, verl_variables
from rollcorr.integrations.verl import TensorBatch
from rollcorr.integrations.verl import v2025_11 as verl_2025_11

HELPER = "verl.trainer.ppo.rollout_corr_helper"

# The correction of verl 0.9.1's ppo_trainer.yaml, which is disabled.
DEFAULTS = {
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
    "bypass_mode": False,
    "loss_type": "ppo_clip",
    "rollout_is_batch_normalize": False,
}
REJECTION = {"bypass_mode": True, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}


def run_config(correction, *, loss_mode="vanilla", calculate_log_probs=True, kind=OmegaConf.create, **of_actor):
    """The sections of a verl run that bypass mode touches; an OmegaConf node refuses new keys, as Hydra's do."""
    config = kind(
        {
            "algorithm": {"rollout_correction": DEFAULTS | correction},
            "actor_rollout_ref": {
                "rollout": {"calculate_log_probs": calculate_log_probs},
                "actor": {"policy_loss": {"loss_mode": loss_mode, **of_actor}},
            },
        }
    )
    if kind is OmegaConf.create:
        OmegaConf.set_struct(config, True)
    return config


class Trainer:
    """Bypass mode in verl's trainers: V1 copies log-probs itself, the legacy trainer calls apply_bypass_mode."""

    def __init__(self, config, modules, *, generation):
        self.config, self.modules, self.generation = config, modules, generation
        modules["verl.trainer.ppo.v1.trainer_base"].need_critic(config)
        self.actor = SimpleNamespace(
            clip_ratio=0.2,
            clip_ratio_low=None,
            clip_ratio_high=None,
            get={"clip_ratio_c": 3.0}.get,
            global_batch_info={},
            policy_loss=copy.deepcopy(config["actor_rollout_ref"]["actor"]["policy_loss"]),
        )

    def gradient(self, ratios):
        """Of one step on one sequence with these ratios π_θ/μ and advantage −1."""
        log_prob = (torch.tensor([ratios], dtype=torch.float64).log() - 1).requires_grad_()
        batch = TensorBatch({"rollout_log_probs": torch.full_like(log_prob, -1.0).detach()})
        if self.generation == "v1":
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
        else:
            policy_loss = self.config["actor_rollout_ref"]["actor"]["policy_loss"]
            correction = self.config["algorithm"]["rollout_correction"]
            sys.modules[HELPER].apply_bypass_mode(batch, correction, policy_loss)
        function = self.modules["verl.trainer.ppo.core_algos"].POLICY_LOSS_REGISTRY[self.actor.policy_loss["loss_mode"]]
        loss, _ = function(
            batch.batch["old_log_probs"],
            log_prob,
            torch.full_like(log_prob, -1.0).detach(),
            torch.ones_like(log_prob),
            config=self.actor,
        )
        loss.backward()
        return log_prob.grad.flatten().tolist()


def theirs_like(ours):
    """A function with the arguments of ours, and without the keywords that only ours has."""

    def theirs(*args, **kwargs):
        raise AssertionError("verl's own function was called")

    kept = [p for p in inspect.signature(ours).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    theirs.__signature__ = inspect.Signature(kept)
    return theirs


@pytest.fixture
def modules(monkeypatch):
    """verl's modules as `install` finds them, with the trainer imported already."""
    names = ("verl", "verl.trainer", "verl.trainer.ppo")
    leaves = ("core_algos", "utils", "rollout_corr_helper", "v1", "v1.trainer_base")
    found = {name: ModuleType(name) for name in (*names, *(f"verl.trainer.ppo.{leaf}" for leaf in leaves))}
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    core_algos = found["verl.trainer.ppo.core_algos"]
    for name in ("agg_loss", "compute_policy_loss_vanilla", "compute_policy_loss_bypass_mode"):
        setattr(core_algos, name, theirs_like(getattr(verl, name)))
    core_algos.POLICY_LOSS_REGISTRY = {
        "gspo": "theirs",
        "vanilla": core_algos.compute_policy_loss_vanilla,
        "bypass_mode": core_algos.compute_policy_loss_bypass_mode,
    }
    found["verl.trainer.ppo.utils"].need_critic = lambda config: False
    found[HELPER].compute_rollout_correction_and_add_to_batch = lambda batch, rollout_corr_config: (batch, {})
    found[HELPER].apply_bypass_mode = lambda batch, rollout_corr_config=None, policy_loss_config=None: None
    for name in ("need_critic", "compute_rollout_correction_and_add_to_batch"):
        source = found["verl.trainer.ppo.utils" if name == "need_critic" else HELPER]
        setattr(found["verl.trainer.ppo.v1.trainer_base"], name, getattr(source, name))
    for variable in (verl_variables.SWITCH, verl_variables.RAY_HOOK, verl_variables.RAY_HOOK_BEFORE):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))  # tests of other rooms may have a real one
    yield found
    verl.uninstall()


@pytest.mark.parametrize("generation", ["v1", "legacy"])
def test_rejection_acts_in_bypass_mode_in_either_trainer(modules, generation):
    """Ratios 3 and 1 with the band [0.5, 2]: the first token is rejected, the second one has a gradient of 1."""
    verl.install()
    trainer = Trainer(run_config(REJECTION), modules, generation=generation)
    assert trainer.gradient([3.0, 1.0]) == pytest.approx([0.0, 1.0])


@pytest.mark.parametrize("generation", ["v1", "legacy"])
def test_reinforce_acts_in_bypass_mode_in_either_trainer(modules, generation):
    """−min(ρ, 2) log π · A with A = −1 has the gradients 2 and 1, over two tokens; PPO's would be 3 and 1."""
    verl.install()
    correction = {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token"}
    trainer = Trainer(run_config(correction), modules, generation=generation)
    assert trainer.gradient([3.0, 1.0]) == pytest.approx([1.0, 0.5])


@pytest.mark.parametrize("generation", ["v1", "legacy"])
def test_a_veto_acts_in_bypass_mode_in_either_trainer(modules, generation):
    verl.install()
    trainer = Trainer(
        run_config({"bypass_mode": True, "rollout_token_veto_threshold": 1e-4}), modules, generation=generation
    )
    assert trainer.gradient([1e-5, 1.0]) == [0.0, 0.0]


def test_the_legacy_trainer_says_that_it_is_too_late_when_imports_alone_were_switched(modules, monkeypatch):
    """The actor exists, so its loss stays: it rejects no token, and the first step prints the lines to add."""
    modules[HELPER].apply_bypass_mode = verl.apply_bypass_mode
    modules["verl.trainer.ppo.core_algos"].POLICY_LOSS_REGISTRY["vanilla"] = verl.compute_policy_loss_vanilla
    trainer = Trainer(run_config(REJECTION), modules, generation="legacy")
    with pytest.warns(InertOptionWarning, match="built with loss_mode='vanilla'") as warned:
        assert trainer.gradient([2.5, 1.0]) == pytest.approx([1.25, 0.5])
    assert "actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode" in str(warned[0].message)
    assert trainer.gradient([2.5, 1.0]) == pytest.approx([1.25, 0.5])  # the second step prints no more


def test_install_replaces_what_trainers_imported_before_and_does_so_once(modules):
    verl.install()
    trainer_base, utils = modules["verl.trainer.ppo.v1.trainer_base"], modules["verl.trainer.ppo.utils"]
    wired = utils.need_critic
    ours = verl.compute_rollout_correction_and_add_to_batch
    for _ in range(2):
        assert trainer_base.need_critic is utils.need_critic is wired
        assert trainer_base.compute_rollout_correction_and_add_to_batch is ours
        assert modules[HELPER].compute_rollout_correction_and_add_to_batch is ours
        verl.install()
    core_algos = modules["verl.trainer.ppo.core_algos"]
    assert core_algos.agg_loss is verl.agg_loss
    assert {
        "gspo": "theirs",
        "vanilla": verl.compute_policy_loss_vanilla,
        "bypass_mode": verl.compute_policy_loss_bypass_mode,
    } == core_algos.POLICY_LOSS_REGISTRY


def test_install_reaches_modules_of_verl_omni(modules, monkeypatch):
    """verl-omni's rollout correction imports verl's functions by name, perhaps before install()."""
    omni = ModuleType("verl_omni.trainer.diffusion.rollout_correction")
    theirs = modules[HELPER].compute_rollout_correction_and_add_to_batch
    omni.imported = theirs
    monkeypatch.setitem(sys.modules, omni.__name__, omni)
    verl.install()
    assert omni.imported is verl.compute_rollout_correction_and_add_to_batch is not theirs
    verl.uninstall()
    assert omni.imported is theirs


def test_install_refuses_a_verl_whose_trainers_it_cannot_reach(modules):
    del modules["verl.trainer.ppo.utils"].need_critic
    with pytest.raises(ImportError, match="wire_bypass_mode"):
        verl.install()
    assert modules["verl.trainer.ppo.core_algos"].agg_loss is not verl.agg_loss


def test_install_refuses_a_verl_whose_functions_take_other_arguments(modules):
    """November 2025 passed the lower end of the band by itself; ours would take it for something else."""
    modules[HELPER].compute_rollout_rejection_mask = (
        lambda log_ratio, response_mask, rollout_rs, rollout_rs_threshold, rollout_rs_threshold_lower: None
    )
    before = {name: dict(vars(module)) for name, module in modules.items()}
    with pytest.raises(ImportError, match=r"takes \(.*rollout_rs_threshold_lower\).*v2025_11"):
        verl.install()
    assert {name: dict(vars(module)) for name, module in modules.items()} == before


def test_uninstall_puts_back_all_that_install_replaced(modules, monkeypatch):
    monkeypatch.setenv(verl_variables.RAY_HOOK, "json.loads")
    registry = modules["verl.trainer.ppo.core_algos"].POLICY_LOSS_REGISTRY
    before = {name: dict(vars(module)) for name, module in modules.items()}, dict(registry), dict(os.environ)
    verl.install()
    verl.install()
    assert registry != before[1]
    assert os.environ[verl_variables.RAY_HOOK_BEFORE] == "json.loads"
    verl.uninstall()
    verl.uninstall()
    assert ({name: dict(vars(module)) for name, module in modules.items()}, dict(registry), dict(os.environ)) == before


def test_one_line_says_which_functions_of_which_verl_are_replaced(modules, caplog):
    modules["verl"].__version__ = "0.9.1"
    verl.install()
    verl.install()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "in verl 0.9.1: apply_bypass_mode, compute_rollout_correction_and_add_to_batch of verl.trainer" in line
    assert "the policy losses vanilla, bypass_mode; bypass mode reaches the actor" in line


def test_install_after_ray_says_that_workers_keep_verls_functions(modules, monkeypatch):
    context = SimpleNamespace(worker=SimpleNamespace(mode=0), runtime_env={})
    ray = SimpleNamespace(SCRIPT_MODE=0, is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.warns(RuntimeWarning, match=r"Call install\(\) before ray\.init\(\)"):
        verl.install()
    verl.uninstall()

    # A worker, and a driver whose workers have the switch, print no message.
    context.worker.mode = 1
    verl.install()
    verl.uninstall()
    context.worker.mode, context.runtime_env = 0, {"env_vars": {verl_variables.SWITCH: "1"}}
    verl.install()


@pytest.mark.parametrize("kind", [dict, OmegaConf.create])
def test_the_actor_is_told_what_the_legacy_trainer_tells_it(kind):
    wired, legacy = run_config(REJECTION, kind=kind), run_config(REJECTION, kind=kind)
    assert verl.wire_bypass_mode(wired)
    policy_loss = legacy["actor_rollout_ref"]["actor"]["policy_loss"]
    apply = functools.partial(verl.apply_bypass_mode, TensorBatch({"rollout_log_probs": torch.zeros(1, 1)}))
    if kind is dict:  # shared with the actor, so it still arrives
        apply(legacy["algorithm"]["rollout_correction"], policy_loss)
    else:
        with pytest.warns(InertOptionWarning, match="only now"):
            apply(legacy["algorithm"]["rollout_correction"], policy_loss)
    assert wired == legacy
    assert verl.wire_bypass_mode(wired)
    assert wired == legacy


@pytest.mark.parametrize(
    "correction", [{}, {"rollout_is": "token", "rollout_rs": "token_k2"} | {"rollout_rs_threshold": 1}]
)
def test_a_run_without_bypass_mode_is_left_as_it_is(correction):
    config = run_config(correction)
    assert not verl.wire_bypass_mode(config)
    assert config == run_config(correction)
    assert not verl.wire_bypass_mode({"algorithm": {}})


def test_the_lines_that_a_warning_gives_turn_the_switch_on():
    config = run_config(REJECTION)
    with pytest.warns(InertOptionWarning) as warned:
        verl.apply_bypass_mode(
            TensorBatch({"rollout_log_probs": torch.zeros(1, 1)}),
            config.algorithm.rollout_correction,
            OmegaConf.create({"loss_mode": "vanilla"}),
        )
    lines = re.findall(r"^  '?(\+?actor_rollout_ref\S+?)'?$", str(warned[0].message), flags=re.MULTILINE)
    OmegaConf.set_struct(config, False)
    for line in lines:
        name, value = line.lstrip("+").split("=")
        OmegaConf.update(config, name, value)
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    assert len(lines) == 2
    assert (policy_loss.loss_mode, policy_loss.rollout_correction.rollout_rs) == ("bypass_mode", "token_k1")
    assert verl.wire_bypass_mode(config)


def test_another_loss_stays_and_what_it_ignores_is_named():
    config = run_config(REJECTION | {"rollout_token_veto_threshold": 1e-4}, loss_mode="gspo")
    with pytest.warns(InertOptionWarning, match="loss_mode='gspo'") as warned:
        assert not verl.wire_bypass_mode(config)
    assert [str(warning.message).split("=")[0] for warning in warned] == ["rollout_rs", "rollout_token_veto_threshold"]
    assert config.actor_rollout_ref.actor.policy_loss == {"loss_mode": "gspo"}
    assert not verl.wire_bypass_mode(run_config({"bypass_mode": True}, loss_mode="gspo"))  # no option to ignore


def test_a_run_that_only_measures_its_weights_starts_without_a_warning():
    measured = {"rollout_is": "token", "apply_is": False, "nonfinite": "neutral"}
    assert not verl.wire_bypass_mode(run_config(measured))
    assert verl.wire_bypass_mode(run_config({**measured, "bypass_mode": True}))


def test_two_corrections_that_differ_are_refused():
    config = run_config(REJECTION, loss_mode="bypass_mode", rollout_correction={"bypass_mode": True})
    with pytest.raises(ValueError, match=r"rollout_rs is 'token_k1', but actor_rollout_ref.*rollout_rs is None"):
        verl.wire_bypass_mode(config)


def test_a_run_without_rollout_log_probs_is_told_before_it_starts():
    with pytest.raises(ValueError, match="calculate_log_probs=False"):
        verl.wire_bypass_mode(run_config(REJECTION, calculate_log_probs=False))
    with pytest.warns(InertOptionWarning, match="rollout_is='token' has no effect with .*calculate_log_probs=False"):
        verl.wire_bypass_mode(run_config({"rollout_is": "token"}, calculate_log_probs=False))


def test_a_run_without_a_place_for_the_actors_switch_is_refused():
    with pytest.raises(ValueError, match=r"needs actor_rollout_ref\.actor\.policy_loss"):
        verl.wire_bypass_mode({"algorithm": {"rollout_correction": REJECTION}})


@pytest.mark.parametrize(
    ("correction", "message"),
    [
        ({"loss_type": "reinforce"}, "loss_type='reinforce' has no effect without bypass mode"),
        ({"rollout_rs_threshold": 2.0}, "rollout_rs_threshold=2.0 has no effect without rollout_rs"),
        ({"rollout_is_batch_normalize": True}, "rollout_is_batch_normalize=True has no effect"),
        ({"rollout_is": "token", "bypass_mode": True}, "rollout_is='token' does not weight the loss"),
        ({"rollout_is": "token", "rollout_is_threshold": None}, "rollout_is='token' has no effect"),
        ({"apply_is": False}, "apply_is=False has no effect without rollout_is"),
        ({"rollout_is_floor": 0.5}, "rollout_is_floor=0.5 has no effect without rollout_is"),
    ],
)
def test_an_option_that_cannot_act_is_named_before_the_run_starts(correction, message):
    with pytest.warns(InertOptionWarning, match=re.escape(message)) as warned:
        verl.wire_bypass_mode(run_config(correction))
    assert len(warned) == 1


@pytest.mark.parametrize(
    ("correction", "message"),
    [
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 1}, "token_k4"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "2.0_0.5"}, "2.0_0.5"),
        ({"rollout_treshold": 1}, "Did you mean"),
        ({"normalizer": "original"}, "normalizer"),
        ({"loss_type": "dpo"}, "'dpo'"),
    ],
)
def test_an_option_outside_its_limits_is_refused_before_the_run_starts(correction, message):
    with pytest.raises(ValueError, match=message):
        verl.wire_bypass_mode(run_config(correction))


def actor(**policy_loss):
    return SimpleNamespace(
        clip_ratio=0.2,
        clip_ratio_low=None,
        clip_ratio_high=None,
        get={}.get,
        global_batch_info={},
        policy_loss=policy_loss,
    )


def test_the_vanilla_loss_of_a_bypass_run_says_that_the_correction_does_not_act():
    inputs = torch.zeros(1, 1), torch.zeros(1, 1, requires_grad=True), torch.ones(1, 1), torch.ones(1, 1)
    with pytest.warns(InertOptionWarning, match="loss_mode is 'vanilla', which never reads it"):
        verl.compute_policy_loss_vanilla(*inputs, config=actor(loss_mode="vanilla", rollout_correction=REJECTION))
    verl.compute_policy_loss_vanilla(*inputs, config=actor(loss_mode="vanilla", rollout_correction=DEFAULTS))
    verl.compute_policy_loss_vanilla(*inputs, config=actor(loss_mode="bypass_mode", rollout_correction=REJECTION))


def test_a_bypass_loss_with_verls_default_correction_says_that_the_runs_correction_is_missing():
    """Only loss_mode: verl fills in a RolloutCorrectionConfig() without rejection."""
    inputs = torch.zeros(1, 1), torch.zeros(1, 1, requires_grad=True), torch.ones(1, 1), torch.ones(1, 1)
    config = actor(loss_mode="bypass_mode", rollout_correction=verl.RolloutCorrectionConfig())
    with pytest.warns(InertOptionWarning, match=r"policy_loss\.rollout_correction=\$\{algorithm\.rollout_correction\}"):
        verl.compute_policy_loss_bypass_mode(*inputs, config=config)


def test_november_says_too_that_its_pure_loss_comes_too_late():
    options = {"bypass_old_logprob_for_rollout": True, "use_pure_rollout_correction": True}
    batch, policy_loss = (
        TensorBatch({"rollout_log_probs": torch.zeros(1, 1)}),
        OmegaConf.create({"loss_mode": "vanilla"}),
    )
    with pytest.warns(InertOptionWarning, match=r"policy_loss\.loss_mode=rollout_correction"):
        verl_2025_11.maybe_apply_rollout_correction(batch, options, policy_loss)
    verl_2025_11.maybe_apply_rollout_correction(batch, options, policy_loss)
    assert policy_loss.loss_mode == "rollout_correction"
