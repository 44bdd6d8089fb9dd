"""Bypass mode in verl's own trainers, configurations and actor loss. Runs with `make test-verl`.

The actor gets its configuration through pickle, as Ray sends it, and reads it as verl's engine worker does. No process
is started, and no model is built.
"""

import pickle
import warnings
from pathlib import Path

import pytest
import torch

from rollcorr.config import InertOptionWarning
from rollcorr.integrations import verl as ours

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    REASON = "verl with its trainers is not installed: `make test-verl` installs it; test_verl_bypass.py has stand-ins"
    trainer_base = pytest.importorskip("verl.trainer.ppo.v1.trainer_base", reason=REASON, exc_type=ImportError)
    ray_trainer = pytest.importorskip("verl.trainer.ppo.ray_trainer", reason=REASON, exc_type=ImportError)
    hydra = pytest.importorskip("hydra", reason=REASON)
    import verl
    from omegaconf import OmegaConf
    from tensordict import TensorDict
    from verl.protocol import DataProto
    from verl.trainer.ppo import core_algos, rollout_corr_helper, utils
    from verl.trainer.ppo.utils import Role
    from verl.utils import tensordict_utils
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.utils import losses

pytestmark = pytest.mark.filterwarnings("ignore", f"error::{InertOptionWarning.__module__}.InertOptionWarning")

REJECTION = {"bypass_mode": "True", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}
REINFORCE = {"bypass_mode": "True", "loss_type": "reinforce", "rollout_is": "token"}


def composed(correction, *overrides, resolve=True):
    """verl's configuration of a run, resolved as in its task runner."""
    lines = [f"algorithm.rollout_correction.{name}={value}" for name, value in correction.items()]
    lines += ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", "trainer.device=cpu", *overrides]
    folder = str(Path(verl.__file__).parent / "trainer" / "config")
    with hydra.initialize_config_dir(folder, version_base=None):
        config = hydra.compose("ppo_trainer", overrides=lines)
    if resolve:
        OmegaConf.resolve(config)
    return config


def built_trainer(config, generation):
    if generation == "v1":
        return trainer_base.get_trainer_cls("sync")(config)
    return ray_trainer.RayPPOTrainer(
        config,
        tokenizer=None,
        role_worker_mapping={Role.ActorRollout: object},
        resource_pool_manager=None,
        train_dataset=list(range(config.data.train_batch_size)),
        val_dataset=[0],
        collate_fn=list,
    )


def step_gradient(trainer, generation, monkeypatch):
    """Of one step on one sequence with ratios π_θ/μ of 2.5 and 1 and advantage −1."""
    actor = omega_conf_to_dataclass(pickle.loads(pickle.dumps(trainer.config.actor_rollout_ref)).actor)
    rollout = torch.full((1, 2), -1.0)
    if generation == "v1":
        store = {"rollout_log_probs": rollout}
        queue = type("Queue", (), {})()
        queue.kv_batch_get = lambda keys, partition_id, select_fields: {name: store[name] for name in select_fields}
        queue.kv_batch_put = lambda keys, partition_id, fields: store.update(fields)
        monkeypatch.setattr(trainer_base, "tq", queue)
        trainer._compute_old_log_prob(type("Meta", (), {"keys": [0], "partition_id": "train"})(), {})
        old = store["old_log_probs"]
    else:
        batch = DataProto.from_dict(tensors={"rollout_log_probs": rollout})
        rollout_corr_helper.apply_bypass_mode(
            batch, trainer.config.algorithm.rollout_correction, trainer.config.actor_rollout_ref.actor.policy_loss
        )
        old = batch.batch["old_log_probs"]

    log_prob = (torch.tensor([[2.5, 1.0]]).log() - 1).requires_grad_()
    tensors = {"response_mask": torch.ones(1, 2), "old_log_probs": old, "advantages": torch.full((1, 2), -1.0)}
    nested = {name: torch.nested.as_nested_tensor(list(rows), layout=torch.jagged) for name, rows in tensors.items()}
    data = TensorDict(nested, batch_size=1)
    tensordict_utils.assign_non_tensor(data, dp_size=1, batch_num_tokens=2, global_batch_size=1)
    monkeypatch.setattr(losses, "no_padding_2_padding", lambda values, _: values)
    loss, _ = losses.ppo_loss(actor, {"log_probs": log_prob}, data)
    loss.backward()
    return log_prob.grad.flatten().tolist()


@pytest.fixture
def installed():
    """`install` in this process, taken back afterwards."""
    ours.install()
    yield
    ours.uninstall()


@pytest.mark.parametrize("generation", ["v1", "legacy"])
@pytest.mark.parametrize("correction", [REJECTION, REINFORCE], ids=["rejection", "reinforce"])
def test_verl_alone_leaves_the_correction_of_a_bypass_run_inert(generation, correction, monkeypatch):
    """The fault itself: gradients equal plain PPO's. If this fails, verl was fixed and the wiring may go."""
    trainer = built_trainer(composed(correction), generation)
    assert step_gradient(trainer, generation, monkeypatch) == pytest.approx([1.25, 0.5])
    assert core_algos.POLICY_LOSS_REGISTRY["vanilla"] is not ours.compute_policy_loss_vanilla


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("generation", ["v1", "legacy"])
@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (REJECTION, [0.0, 0.5]),  # the first token leaves; the denominator counts both, as in verl
        (REINFORCE, [1.0, 0.5]),  # weights min(ρ, 2)
        ({"bypass_mode": "True"}, [1.25, 0.5]),
        (REJECTION | {"+rollout_token_veto_threshold": "2.0"}, [0.0, 0.0]),
        (REINFORCE | {"+apply_is": "False"}, [0.5, 0.5]),
        (REINFORCE | {"+rollout_is_floor": "1.5"}, [1.0, 0.75]),
    ],
    ids=["rejection", "reinforce", "nothing", "veto", "measured", "floor"],
)
def test_the_correction_of_a_bypass_run_acts_once_installed(generation, correction, expected, monkeypatch):
    lines = {name: value for name, value in correction.items() if not name.startswith("+")}
    new = [f"+algorithm.rollout_correction.{name[1:]}={correction[name]}" for name in correction.keys() - lines.keys()]
    trainer = built_trainer(composed(lines, *new), generation)
    assert step_gradient(trainer, generation, monkeypatch) == pytest.approx(expected)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("generation", ["v1", "legacy"])
@pytest.mark.parametrize(
    ("line", "message"), [("apply_isn=False", "Did you mean 'apply_is'"), ("normalizer=kept", "actor")]
)
def test_a_key_that_cannot_act_is_refused_before_a_worker_is_built(generation, line, message):
    with pytest.raises(ValueError, match=message):
        built_trainer(composed({}, f"+algorithm.rollout_correction.{line}"), generation)


@pytest.mark.usefixtures("installed")
def test_verls_default_configuration_starts_without_a_warning_and_unchanged():
    config = composed({})
    before = OmegaConf.to_container(config)
    built_trainer(config, "v1")
    assert OmegaConf.to_container(config) == before


@pytest.mark.parametrize("generation", ["v1", "legacy"])
def test_the_lines_that_warnings_give_turn_the_switch_on_in_verl_alone(generation, monkeypatch):
    lines = (
        "actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode",
        "+actor_rollout_ref.actor.policy_loss.rollout_correction=${algorithm.rollout_correction}",
    )
    trainer = built_trainer(composed(REINFORCE, *lines), generation)
    assert step_gradient(trainer, generation, monkeypatch) == pytest.approx([1.0, 0.5])


def test_loss_mode_alone_gives_the_actor_verls_default_correction_and_ours_says_so(installed, monkeypatch):
    config = composed({}, "actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode")
    trainer = built_trainer(config, "v1")
    OmegaConf.update(config, "algorithm.rollout_correction.bypass_mode", True)
    with pytest.warns(InertOptionWarning, match="when policy_loss.rollout_correction is left out"):
        step_gradient(trainer, "v1", monkeypatch)


@pytest.mark.usefixtures("installed")
def test_the_driver_wires_bypass_mode_before_interpolations_are_resolved():
    """`verl.trainer.main_ppo` asks `need_critic` in the driver first, of the configuration as Hydra composed it."""
    config = composed(REJECTION, resolve=False)
    utils.need_critic(config)
    OmegaConf.resolve(config)
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    assert policy_loss.loss_mode == "bypass_mode"
    assert policy_loss.rollout_correction == config.algorithm.rollout_correction
    assert policy_loss.rollout_correction.rollout_rs == "token_k1"
