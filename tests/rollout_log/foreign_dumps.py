"""Dumps in the form of other frameworks, written as the code of the named version writes them. The numbers are ours.

| dump | written like |
|---|---|
| verl | verl 0.9.1, verl/trainer/ppo/ray_trainer.py, `_write_generations` |
| TRL | TRL 1.16.0, trl/trainer/grpo_trainer.py, `log` |
| prime-rl | prime-rl 559b447 (0.8.0), src/prime_rl/trainer/rl/token_export.py, `TokenExporter.export` |
| slime | slime 624b824 (0.3.1), slime/observability/{rollout,train}_data_utils.py, `save_debug_*_data` |
| SkyRL | SkyRL 0.3.0, skyrl/train/trainer.py, `dump_data`; training_batch.py, `TensorBatch.__reduce__` |
| SkyRL, older | skyrl_train-v0.3.0, skyrl_train/training_batch.py, `TensorBatch.__getstate__` |

All of them contain the two sequences of `PROMPTS` and `RESPONSES`. In the second, the middle token is a tool's.
"""

from __future__ import annotations

import io
import json
import pickle
import sys
import types
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

PROMPTS = [[5, 6], [7]]
RESPONSES = [[11, 12], [21, 22, 23]]
MASKS = [[1, 1], [1, 0, 1]]
ROLLOUT = [[-0.5, -1.0], [-0.25, 0.0, -2.0]]
TRAIN = [[-0.5, -1.25], [-0.25, -0.125, -2.5]]
ADVANTAGES = [[1.0, 1.0], [-1.0, -1.0, -1.0]]
REWARDS = [1.0, 0.0]
STEP = 3


def write_verl(folder: Path) -> Path:
    rows = [
        {
            "input": "2+2=",
            "output": "4",
            "gts": "4",
            "score": reward,
            "step": STEP,
            "acc": reward,
            "request_id": f"r{i}",
        }
        for i, reward in enumerate(REWARDS)
    ]
    return _write_lines(folder / f"{STEP}.jsonl", rows)


def write_trl(folder: Path) -> Path:
    path = folder / f"completions_{STEP:05d}.parquet"
    table = {
        "step": [STEP, STEP],
        "prompt": ["2+2=", "3+3="],
        "completion": ["4", "7"],
        "accuracy_reward": REWARDS,
        "advantage": [0.7, -0.7],
    }
    pq.write_table(pa.table(table), path)
    return path


def write_prime_rl(folder: Path, **changes: object) -> Path:
    """One line per sequence; every list covers prompt and response."""
    path = folder / "token_exports" / f"step_{STEP}" / "rank_0.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        before = len(prompt)
        count = before + len(response)
        record = {
            "schema_version": 1,
            "step": STEP,
            "rank": 0,
            "micro_step": 0,
            "micro_sequence_idx": i,
            "export_sequence_idx": i,
            "env_name": "gsm8k",
            "token_ids": prompt + response,
            "position_ids": list(range(count)),
            "loss_mask": [False] * before + [bool(x) for x in MASKS[i]],
            "advantages": [0.0] * before + ADVANTAGES[i],
            "inference_logprobs": [0.0] * before + ROLLOUT[i],
            "trainer_logprobs": [-11.0] * before + TRAIN[i],
            "entropy": [1.0] * count,
            "mismatch_kl": [0.0] * count,
            "is_masked": [None] * count,
            "rl_weights": [None] * count,
            "ce_weights": [None] * count,
            "ref_kl_weights": [None] * count,
        }
        rows.append(record | changes)
    return _write_lines(path, rows)


def write_slime_train(folder: Path, **changes: object) -> Path:
    """Training data: tensors per sample, and the raw rewards of the batch."""
    path = folder / "train_data" / f"{STEP}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = []
    for i in range(2):
        sample = {
            "data_parallel_rank": i,
            "sample_index": 40 + i,
            "rollout_position": i,
            "tokens": torch.tensor(PROMPTS[i] + RESPONSES[i]),
            "response_lengths": len(RESPONSES[i]),
            "rewards": 0.5 - i,
            "truncated": 0,
            "loss_masks": torch.tensor(MASKS[i], dtype=torch.int),
            "rollout_mask_sums": torch.tensor([4.0, 4.0])[i],
            "rollout_log_probs": torch.tensor(ROLLOUT[i]),
            "log_probs": torch.tensor(TRAIN[i]),
            "advantages": torch.tensor([9.0, *ADVANTAGES[i]])[1:],
            "total_lengths": len(PROMPTS[i]) + len(RESPONSES[i]),
        }
        samples.append(sample | changes)
    payload = {"format_version": 2, "rollout_id": STEP, "rank": 0, "samples": samples, "dp_shards": []}
    torch.save(payload | {"raw_reward": REWARDS}, path)
    return path


def write_slime_rollout(folder: Path, **changes: object) -> Path:
    """The rollout side: `Sample.to_dict()`, with plain lists."""
    path = folder / "rollout_data" / f"{STEP}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = []
    for i in range(2):
        sample = {
            "group_index": 0,
            "index": 40 + i,
            "rollout_id": None,
            "prompt": "2+2=",
            "tokens": PROMPTS[i] + RESPONSES[i],
            "response": "4",
            "response_length": len(RESPONSES[i]),
            "reward": REWARDS[i],
            "loss_mask": MASKS[i],
            "weight_versions": ["1"],
            "rollout_log_probs": ROLLOUT[i],
            "rollout_top_p_token_ids": None,
            "rollout_top_p_token_offsets": None,
            "status": "completed",
            "metadata": {},
            "spec_info": {"spec_accept_token_num": 0},
        }
        samples.append(sample | changes)
    torch.save({"rollout_id": STEP, "samples": samples}, path)
    return path


def skyrl_tensors() -> dict[str, torch.Tensor | None]:
    """`convert_prompts_responses_to_batch_tensors`: left padding. A third row fills up the batch."""
    width, longest, rows = 4, 3, [0, 1, 0]

    def padded(values: list[list[float]], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([[0] * (longest - len(values[i])) + values[i] for i in rows], dtype=dtype)

    real = [PROMPTS[i] + RESPONSES[i] for i in rows]
    loss_mask = padded(MASKS, torch.float32)
    loss_mask[2] = 0
    return {
        "sequences": torch.tensor([[99] * (width - len(row)) + row for row in real]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in real]),
        "response_mask": padded([[1] * len(row) for row in RESPONSES], torch.int64),
        "loss_mask": loss_mask,
        "action_log_probs": padded(TRAIN, torch.float32),
        "base_action_log_probs": None,
        "rollout_logprobs": padded(ROLLOUT, torch.float32),
        "advantages": padded(ADVANTAGES, torch.bfloat16),
    }


def write_skyrl(folder: Path, *, older: bool = False, **changes: object) -> Path:
    """A pickled `TrainingInputBatch`; the classes exist only while it is written."""
    path = folder / "dumped_data" / f"global_step_{STEP}_training_input.pkl"
    path.parent.mkdir(parents=True, exist_ok=True)
    home = "skyrl_train.training_batch" if older else "skyrl.backends.skyrl_train.training_batch"
    module = types.ModuleType(home)

    class TrainingInputBatch(dict):
        def __getstate__(self) -> dict[str, object]:
            stored = {name: _older_bytes(value) if older else _stored(value) for name, value in self.items()}
            metadata = {"pad_size": 1, "response_length": 3, "global_step": STEP}
            return {"batch_dict": stored, "batch_size": 3, "device": torch.device("cpu"), "metadata": metadata}

    def _rebuild_tensor_batch(cls: type, state: object) -> None:
        raise AssertionError("a pickle is never run")

    names: tuple[type | types.FunctionType, ...] = (TrainingInputBatch, _rebuild_tensor_batch)
    for value in names:
        value.__module__, value.__qualname__ = home, value.__name__
        setattr(module, value.__name__, value)
    if not older:
        reduce = lambda batch: (_rebuild_tensor_batch, (type(batch), batch.__getstate__()))  # noqa: E731
        TrainingInputBatch.__reduce__ = reduce  # type: ignore[assignment]

    parents = [home.rsplit(".", n)[0] for n in range(home.count(".") + 1)]
    sys.modules.update(dict.fromkeys(parents, module))
    try:
        path.write_bytes(pickle.dumps(TrainingInputBatch(skyrl_tensors() | changes)))
    finally:
        for name in parents:
            del sys.modules[name]
    return path


def _stored(value: torch.Tensor | None) -> object:
    if value is None:
        return None
    if value.dtype == torch.bfloat16:
        return {"format": "torch", "data": _older_bytes(value)}
    array = value.numpy()
    return {"format": "numpy", "data": array.tobytes(), "shape": array.shape, "dtype": str(array.dtype)}


def _older_bytes(value: torch.Tensor | None) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _write_lines(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
