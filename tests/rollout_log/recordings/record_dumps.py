"""Record dumps with the writers of other frameworks: `python record_dumps.py SOURCES [NAME…]`.

SOURCES contains one git checkout per framework, with the folder names of `RECORDERS`. Each recorder imports the
framework's own writer, replaces packages that are not installed by empty modules, and passes tensors as the training
loop does: the sequences of `foreign_dumps.py`. `recordings.json` lists the commit, the function, and the SHA-256 of
each file. A recording is never edited.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import foreign_dumps as dumps  # noqa: E402


class AbsentPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Importer of empty modules for packages that a writer's file imports and its function does not use."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if any(name == absent or name.startswith(f"{absent}.") for absent in self.names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        # Keep what an attribute was, so that every importer has the same one.
        module.__getattr__ = lambda name: vars(module).setdefault(name, MagicMock(name=name))  # type: ignore
        return module

    def exec_module(self, module):
        pass


def without(*names: str) -> None:
    """Import these packages as empty modules."""
    sys.meta_path.insert(0, AbsentPackages(*names))


def functions_of(path: Path, *names: str, **namespace: Any) -> dict[str, Any]:
    """Run the definitions of these functions or classes of a file, which cannot be imported as a whole."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    found = [node for node in ast.walk(ast.Module(body, [])) if getattr(node, "name", None) in names]
    assert len(found) == len(names), (path, names)
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, *found], []), str(path), "exec"), namespace)
    return {name: namespace[name] for name in names}


def record_nemo_rl(source: Path, target: Path) -> None:
    """Log a step as `grpo_train` does. The third sequence has loss multiplier 0, as with overlong filtering."""
    sys.path.insert(0, str(source))
    without("mlflow", "ray", "swanlab", "wandb", "prometheus_client", "datasets")
    from nemo_rl.data.llm_message_utils import batched_message_log_to_flat_message
    from nemo_rl.utils.logger import Logger

    own = functions_of(
        source / "nemo_rl" / "algorithms" / "grpo.py",
        "add_grpo_token_loss_masks_and_generation_logprobs",
        torch=torch,
        cast=lambda _, value: value,
        backfill_missing_routed_experts=lambda logs: None,
    )

    # The middle token of the second response is a tool's message, so that this response consists of three messages.
    logs = []
    for i in (0, 1, 0):
        messages = [{"role": "user", "content": "2+2=", "token_ids": torch.tensor(dumps.PROMPTS[i])}]
        for token, sampled, log_prob in zip(dumps.RESPONSES[i], dumps.MASKS[i], dumps.ROLLOUT[i], strict=True):
            message = {"role": "assistant" if sampled else "tool", "content": "4", "token_ids": torch.tensor([token])}
            messages.append(message | ({"generation_logprobs": torch.tensor([log_prob])} if sampled else {}))
        logs.append(messages)
    own["add_grpo_token_loss_masks_and_generation_logprobs"](logs)
    flat, lengths = batched_message_log_to_flat_message(
        logs, pad_value_dict={"token_ids": 99}, make_sequence_length_divisible_by=8
    )

    # The trainer's forward pass scores every position, padding included.
    train = torch.full(flat["token_ids"].shape, -11.0)
    for row, i in enumerate((0, 1, 0)):
        train[row, len(dumps.PROMPTS[i]) : int(lengths[row])] = torch.tensor(dumps.TRAIN[i])
    train[2] -= 5
    train[:, 0] = 0
    advantages = torch.tensor([[1.0], [-1.0], [7.0]]).expand(train.shape)
    logged = {
        "content": flat["content"],
        "rewards": torch.tensor([*dumps.REWARDS, 9.0]).tolist(),
        "input_lengths": lengths.tolist(),
        "token_ids": flat["token_ids"].tolist(),
        "token_loss_mask": flat["token_loss_mask"].tolist(),
        "sample_loss_mask": torch.tensor([1.0, 1.0, 0.0]).tolist(),
        "advantages": advantages.tolist(),
        "generation_logprobs": flat["generation_logprobs"].tolist(),
        "prev_logprobs": train.tolist(),
    }
    off = dict.fromkeys(("wandb_enabled", "swanlab_enabled", "tensorboard_enabled", "mlflow_enabled", "monitor_gpus"))
    logger = Logger({"log_dir": str(target), **off})
    logger.log_batched_dict_as_jsonl(logged, f"train_data_step{dumps.STEP}.jsonl")
    validation = {"content": [[{"role": "user", "content": "2+2="}]], "rewards": [1.0]}
    logger.log_batched_dict_as_jsonl(validation, f"val_data_step{dumps.STEP}.jsonl")


def record_prime_rl(source: Path, target: Path) -> None:
    """Export a packed micro-batch of both sequences and two tokens of padding."""
    sys.path.insert(0, str(source / "src"))
    without("prime_rl.configs", "prime_rl.trainer.rl.loss")
    from prime_rl.trainer.rl import token_export

    name = "compute_importance_ratio_and_mismatch_kl"
    loss = functions_of(source / "src/prime_rl/trainer/rl/loss.py", name, torch=torch)
    config = type("DefaultLossConfig", (), {"dppo_mask_low": 0.2, "dppo_mask_high": 0.2})
    vars(token_export).update(loss, DefaultLossConfig=config)

    sequences = list(zip(dumps.PROMPTS, dumps.RESPONSES, dumps.MASKS, dumps.ROLLOUT, dumps.TRAIN, strict=True))
    packed: dict[str, list[Any]] = {name: [] for name in ("input_ids", "loss_mask", "inference_logprobs", "logprobs")}
    for prompt, response, mask, rollout, train in sequences:
        packed["input_ids"] += prompt + response
        packed["loss_mask"] += [False] * len(prompt) + [bool(sampled) for sampled in mask]
        packed["inference_logprobs"] += [0.0] * len(prompt) + rollout
        packed["logprobs"] += [-11.0] * len(prompt) + train
    lengths = [len(prompt + response) for prompt, response, *_ in sequences]
    batch = {name: torch.tensor([[*values, 0, 0]]) for name, values in packed.items()}
    batch["position_ids"] = torch.tensor([[*range(lengths[0]), *range(lengths[1] + 2)]])
    batch["advantages"] = torch.tensor([[0.0] * 2 + [1.0] * 2 + [0.0] + [-1.0] * 3 + [0.0] * 2])
    env_names = ["gsm8k"] * sum(lengths) + [""] * 2
    output = {"logprobs": batch.pop("logprobs"), "entropy": torch.ones(1, len(env_names))}
    exporter = token_export.TokenExporter(target, rank=0)
    lengths[1] += 2
    exporter.export(dumps.STEP, 0, batch | {"env_names": env_names}, output, lengths, config())
    exporter.mark_stable()


def record_slime(source: Path, target: Path) -> None:
    """Save the rollouts and the training data of one data-parallel rank."""
    sys.path.insert(0, str(source))
    without("megatron", "slime.backends", "sglang_router", "ray")
    from megatron.core import mpu
    from slime.observability.rollout_data_utils import save_debug_rollout_data
    from slime.observability.train_data_utils import save_debug_train_data
    from slime.utils.types import Sample

    numbers = {"get_tensor_model_parallel_rank": 0, "get_context_parallel_rank": 0, "get_data_parallel_rank": 0}
    numbers |= {"get_data_parallel_world_size": 1, "get_data_parallel_src_rank": 0, "is_pipeline_last_stage": True}
    for name, number in numbers.items():
        setattr(mpu, name, lambda *_, number=number, **__: number)
    cp_utils = importlib.import_module("slime.backends.megatron_utils.cp_utils")
    vars(cp_utils)["all_gather_with_cp"] = lambda value, *_: value
    torch.distributed.get_rank = lambda: 0

    rollout_data = {
        "tokens": [torch.tensor(p + r) for p, r in zip(dumps.PROMPTS, dumps.RESPONSES, strict=True)],
        "response_lengths": [len(response) for response in dumps.RESPONSES],
        "total_lengths": [len(p + r) for p, r in zip(dumps.PROMPTS, dumps.RESPONSES, strict=True)],
        "rewards": [0.5, -0.5],
        "raw_reward": dumps.REWARDS,
        "truncated": [0, 0],
        "sample_indices": [40, 41],
        "partition": [0, 1],
        "loss_masks": [torch.tensor(mask, dtype=torch.int) for mask in dumps.MASKS],
        "rollout_log_probs": [torch.tensor(values) for values in dumps.ROLLOUT],
        "log_probs": [torch.tensor(values) for values in dumps.TRAIN],
        "advantages": [torch.tensor(values) for values in dumps.ADVANTAGES],
        "micro_batch_indices": [[0, 1]],
    }
    args = types.SimpleNamespace(save_debug_train_data=str(target / "train_data" / "{rollout_id}.pt"))
    save_debug_train_data(args, rollout_id=dumps.STEP, rollout_data=rollout_data)

    samples = []
    for i in range(2):
        sample = Sample(group_index=0, index=40 + i, prompt="2+2=", tokens=dumps.PROMPTS[i] + dumps.RESPONSES[i])
        sample.response, sample.response_length, sample.reward = "4", len(dumps.RESPONSES[i]), dumps.REWARDS[i]
        sample.loss_mask, sample.rollout_log_probs = dumps.MASKS[i], dumps.ROLLOUT[i]
        samples.append(sample)
    template = str(target / "rollout_data" / "{rollout_id}.pt")
    save_debug_rollout_data(template, samples, rollout_id=dumps.STEP, evaluation=False)


def record_skyrl(source: Path, target: Path) -> None:
    """Dump a batch of both sequences and a row that pads the batch."""
    sys.path.insert(0, str(source))
    without("jaxtyping", "cloudpathlib", "skyrl.backends.backend", "skyrl.backends.skyrl_train.utils")
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch

    batch = TrainingInputBatch({name: value for name, value in dumps.skyrl_tensors().items() if value is not None})
    batch.metadata = {"pad_size": 1, "response_length": 3, "global_step": dumps.STEP}
    own = functions_of(source / "skyrl/train/trainer.py", "dump_data", Path=Path)
    config = types.SimpleNamespace(trainer=types.SimpleNamespace(export_path=str(target)))
    own["dump_data"](types.SimpleNamespace(cfg=config), batch, f"global_step_{dumps.STEP}_training_input")


def record_areal(source: Path, target: Path) -> None:
    """Dump the trajectories of one task."""
    own = functions_of(source / "areal/infra/workflow_executor.py", "_dump_trajectory", **vars(asynchronous_files()))
    sequence = [dumps.PROMPTS[0] + dumps.RESPONSES[0]] * 2
    trajectory = {
        "input_ids": torch.tensor(sequence),
        "attention_mask": torch.ones(2, 4, dtype=torch.int),
        "loss_mask": torch.tensor([[0, 0, 1, 1]] * 2),
        "rewards": torch.tensor(dumps.REWARDS),
        "versions": torch.tensor([[-1, -1, 7, 7]] * 2),
    }
    tokenizer = types.SimpleNamespace(decode=lambda ids, **_: "4" * len(ids))
    executor = types.SimpleNamespace(
        _get_dump_dir=lambda is_eval: str(target / "rollout"), _get_tokenizer=lambda: tokenizer
    )
    asyncio.run(own["_dump_trajectory"](executor, trajectory, 12, False))


def asynchronous_files() -> types.SimpleNamespace:
    """Return the modules that AReaL's dump uses. aiofiles must be installed."""
    aiofiles = importlib.import_module("aiofiles")
    importlib.import_module("aiofiles.os")
    return types.SimpleNamespace(aiofiles=aiofiles, os=os, json=json)


def record_roll(source: Path, target: Path) -> None:
    """Dump the rollouts as text, and mock them as a pickled DataProto. tensordict must be installed."""
    sys.path.insert(0, str(source))
    protocol_file = source / "roll/distributed/scheduler/protocol.py"
    write = functions_of(
        source / "roll/pipeline/rlvr/utils.py", "write_to_json_process", os=os, json=json, numpy=np, Timer=MagicMock(),
        logger=MagicMock(),
    )["write_to_json_process"]  # fmt: skip
    data = {"id": np.array(["a", "b"]), "prompt": np.array(["2+2=", "3+3="]), "responses": ["4", "7"]}
    data |= {"scores": dumps.REWARDS, "global_step": [dumps.STEP] * 2, "sampling_params": ["{}"] * 2}
    columns = ["global_step", "id", "prompt", "responses", "scores", "sampling_params"]
    write(str(target), data, [[name, "string"] for name in columns])

    without("ray", "codetiming", "roll.distributed.scheduler.remote_protocol", "roll.utils", "roll.platforms")
    without("roll.distributed.scheduler.transfer_backend")
    tensordict = importlib.import_module("tensordict")
    protocol = importlib.import_module("roll.distributed.scheduler.protocol")
    assert Path(protocol.__file__) == protocol_file
    batch = {"responses": torch.tensor([[11, 12, 0], [21, 22, 23]]), "infer_logprobs": torch.zeros(2, 3)}
    proto = protocol.DataProto(batch=tensordict.TensorDict(batch, batch_size=[2]), meta_info={"global_step": 3})
    dump = functions_of(
        source / "roll/distributed/scheduler/rollout_mock_mixin.py", "_dump_batch", os=os, pickle=pickle,
        logger=MagicMock(),
    )["_dump_batch"]  # fmt: skip
    config = types.SimpleNamespace(dump_dir=str(target))
    mixin = types.SimpleNamespace(mock_config=config, _get_mode_str=lambda: "train")
    asyncio.run(dump(mixin, proto, dumps.STEP))


def record_ms_swift(source: Path, target: Path) -> None:
    """Append the tables of GRPOTrainer and of the trainers for Megatron."""
    check = functions_of(
        source / "swift/utils/utils.py", "check_json_format", torch=torch, Sequence=Sequence, Mapping=Mapping
    )
    helpers = {"is_master": lambda: True, "Queue": Queue, "Thread": threading.Thread, "os": os, "json": json}
    writer = functions_of(source / "swift/utils/io_utils.py", "JsonlWriter", Union=Any, **helpers, **check)
    table = {"prompt": ["2+2=", "3+3="], "completion": ["4", "7"], "Accuracy": dumps.REWARDS}
    steps = {"step": [str(dumps.STEP)] * 2, **table, "advantages": [0.7, -0.7]}
    writer["JsonlWriter"](str(target / "completions.jsonl")).append(steps)
    of_megatron = {"gen_step": [dumps.STEP] * 2, **table}
    writer["JsonlWriter"](str(target / "megatron" / "completions.jsonl")).append(of_megatron)


def record_tinker(source: Path, target: Path) -> None:
    """Write the summaries of a group of two trajectories."""
    home = source / "tinker_cookbook"
    names = ("_json_safe", "serialize_rollout_summaries")
    own = functions_of(home / "rl/rollout_logging.py", *names, safezip=partial(zip, strict=True), logger=MagicMock())
    trajectories = []
    for i in range(2):
        length = types.SimpleNamespace(length=len(dumps.PROMPTS[i]))
        step = {"ob": length, "ac": types.SimpleNamespace(tokens=dumps.RESPONSES[i]), "reward": dumps.REWARDS[i]}
        step |= {"episode_done": True, "metrics": {}, "logs": {}}
        trajectories.append(types.SimpleNamespace(transitions=[types.SimpleNamespace(**step)], final_ob=length))
    group = types.SimpleNamespace(
        trajectories_G=trajectories,
        final_rewards_G=[0.0, 0.0],
        metrics_G=[{}, {}],
        get_total_rewards=lambda: dumps.REWARDS,
    )
    records = own["serialize_rollout_summaries"](
        split="train",
        iteration=dumps.STEP,
        trajectory_groups_P=[group],
        taglist_P=[["gsm8k"]],
        sampling_client_steps_P=[dumps.STEP],
    )
    store = functions_of(home / "stores/training_store.py", "write_rollouts", json=json)["write_rollouts"]
    target.mkdir(parents=True, exist_ok=True)
    itself = types.SimpleNamespace(
        storage=types.SimpleNamespace(write=lambda path, data: Path(path).write_bytes(data)),
        _rollout_filename=lambda base: f"{base}_rollout_summaries.jsonl",
        _iter_dir=lambda _: str(target),
        _path=os.path.join,
        _rollout_cache={},
    )
    store(itself, dumps.STEP, records)


def record_verl(source: Path, target: Path) -> None:
    """Log a step as `fit` does: as it is, and with the lines that `rollcorr check` prints."""
    names = ("_write_generations", "_log_rollout_data")
    helpers = {"os": os, "json": json, "marked_timer": lambda *_, **__: contextlib.nullcontext()}
    own = functions_of(source / "verl/trainer/ppo/ray_trainer.py", *names, DataProto=Any, **helpers)
    mask, rollout, train = (
        torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        for rows in (dumps.MASKS, dumps.ROLLOUT, dumps.TRAIN)
    )
    tensors = {"prompts": mask, "responses": mask, "token_level_scores": torch.tensor([[1.0], [0.0]])}
    tensors |= {"response_mask": mask, "rollout_log_probs": rollout, "old_log_probs": train}

    class Batch(list):
        batch, non_tensor_batch = tensors, {"request_id": np.array(["r0", "r1"])}

    batch = Batch([types.SimpleNamespace(non_tensor_batch={})] * 2)
    trainer = types.SimpleNamespace(tokenizer=types.SimpleNamespace(batch_decode=lambda ids, **_: ["4"] * len(ids)))
    trainer._dump_generations = partial(own["_write_generations"].__func__, global_steps=dumps.STEP)
    own["_log_rollout_data"](trainer, batch, {"acc": dumps.REWARDS}, {}, str(target))

    from rollcorr.rollout_log.framework_lines import VERL

    reward_extra_infos_dict: dict[str, Any] = {"acc": dumps.REWARDS}
    exec(VERL.lines, {"batch": batch, "reward_extra_infos_dict": reward_extra_infos_dict})
    own["_log_rollout_data"](trainer, batch, reward_extra_infos_dict, {}, str(target / "with_lines"))


def record_trl(source: Path, target: Path) -> None:
    """Train one step. TRL must be installed."""
    sys.path.insert(0, str(HERE.parents[1] / "integrations"))
    trainer = importlib.import_module("trl_cases").grpo_trainer(target, log_completions=True, max_steps=1)
    trainer.train()


RECORDERS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "nemo-rl": (record_nemo_rl, "nemo_rl/utils/logger.py, Logger.log_batched_dict_as_jsonl"),
    "prime-rl": (record_prime_rl, "src/prime_rl/trainer/rl/token_export.py, TokenExporter.export"),
    "slime": (record_slime, "slime/observability/{train,rollout}_data_utils.py, save_debug_{train,rollout}_data"),
    "skyrl": (record_skyrl, "skyrl/train/trainer.py, dump_data"),
    "areal": (record_areal, "areal/infra/workflow_executor.py, _dump_trajectory"),
    "roll": (record_roll, "roll/pipeline/rlvr/utils.py, write_to_json_process; rollout_mock_mixin.py, _dump_batch"),
    "ms-swift": (record_ms_swift, "swift/utils/io_utils.py, JsonlWriter.append"),
    "tinker-cookbook": (record_tinker, "tinker_cookbook/stores/training_store.py, write_rollouts"),
    "verl": (record_verl, "verl/trainer/ppo/ray_trainer.py, RayPPOTrainer._log_rollout_data"),
    "trl": (record_trl, "trl/trainer/grpo_trainer.py, GRPOTrainer.log"),
}


def main(sources: str, *names: str) -> None:
    if len(names) != 1:
        # Each in a process of its own: their empty modules differ.
        for name in names or RECORDERS:
            subprocess.run([sys.executable, __file__, sources, name], check=True)
        return

    (name,) = names
    source, target = Path(sources).resolve() / name, HERE / name
    shutil.rmtree(target, ignore_errors=True)
    recorder, function = RECORDERS[name]
    recorder(source, target)

    # A release has no commit, but the version in its name.
    git = ["git", "-C", source, "rev-parse", "HEAD"]
    release = next((folder.name for folder in source.glob("*.dist-info")), None)
    commit = release or subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    listed = json.loads((HERE / "recordings.json").read_text()) if (HERE / "recordings.json").exists() else {}
    files = sorted(file for file in target.rglob("*") if file.is_file())
    listed[name] = {
        "commit": commit,
        "function": function,
        "sha256": {str(file.relative_to(target)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files},
    }
    text = json.dumps(dict(sorted(listed.items())), indent=2) + "\n"
    (HERE / "recordings.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
