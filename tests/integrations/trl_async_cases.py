"""TRL's AsyncGRPOTrainer on a CPU: a rollout worker with an engine of ours, no weight transfer, and CPU attention."""

import queue
from types import SimpleNamespace

import numpy
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample as Sample
from trl_cases import EOS, LENGTH, PAD, ROWS, settings, tiny_model, tiny_tokenizer

from rollcorr import SamplingSpec, grpo_advantages
from rollcorr.engines import GenerationSettings, TransformersEngine

GENERATIONS = 4


def varlen_attention(query, key, value, cu_q, cu_k, *_, softmax_scale, **__):
    """Attention of packed segments, each over the end of its own keys: FlashAttention's formula, for a CPU."""
    outputs = []
    for segment in range(len(cu_q) - 1):
        q = query[cu_q[segment] : cu_q[segment + 1]].transpose(0, 1)
        k, v = (x[cu_k[segment] : cu_k[segment + 1]].transpose(0, 1) for x in (key, value))
        rows, columns = q.shape[1], k.shape[1]
        causal = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        scores = (q @ k.transpose(1, 2) * softmax_scale).masked_fill(~causal, -torch.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


class Worker:
    """Sample every completion of the training from fixed weights, before the first step."""

    def __init__(self, folder, steps=1):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        sampling = SamplingSpec(temperature=1.0, logprobs="processed")
        generation = GenerationSettings(sampling=sampling, max_new_tokens=LENGTH, eos_token_id=EOS, pad_token_id=PAD)
        self.engine = TransformersEngine(model, generation)  # bfloat16: log μ differs from log π
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        self.versions, self.samples = [], []
        self._steps = steps

    def start(self):
        for step in range(self._steps + 1):  # accelerate reads one batch ahead
            prompts = [[3 + step + row // GENERATIONS, 8] for row in range(ROWS)]
            rollout = self.engine.generate(prompts, seed=step)
            rewards = (rollout.tokens.response_ids % 2 == 0).float().mean(1)
            advantages = grpo_advantages(rewards, torch.arange(ROWS) // GENERATIONS)
            for row, (prompt, response) in enumerate(zip(*rollout.tokens.unpadded(), strict=True)):
                log_prob = rollout.rollout_log_prob[row][rollout.tokens.response_mask[row]].tolist()
                sample = Sample(
                    prompt=[],
                    completion=[],
                    input_ids=numpy.array(prompt + response),
                    completion_mask=numpy.array([0] * len(prompt) + [1] * len(response)),
                    old_log_probs=numpy.array([0.0] * len(prompt) + log_prob, dtype=numpy.float32),
                    advantage=float(advantages[row]),
                    model_version=1,
                    group_id=step * ROWS + row // GENERATIONS,
                    metrics={"reward": float(rewards[row])},
                )
                self.samples.append(sample)
                self.rollout_buffer.put(sample)

    def stop(self):
        pass

    def update_model_version(self, model_version):
        self.versions.append(model_version)

    def check_health(self, stale_after_s):
        raise RuntimeError("the worker has no samples left")


class NoTransfer:
    """A weight transfer that sends nothing: the engine keeps its weights, and the trainer moves on."""

    def __init__(self):
        self.sent = 0

    def init_weight_transfer(self):
        pass

    pause = resume = destroy = init_weight_transfer

    def send_weights(self, iterator):
        self.sent += len(list(iterator))


def async_trainer(folder, monkeypatch, *, steps=1, **options):
    """An AsyncGRPOTrainer of a policy that has moved from the sampler's weights."""
    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention))
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)  # it asks CUDA for a name
    monkeypatch.setattr(async_grpo_trainer, "VLLMClient", lambda *_: None)  # no server
    model = tiny_model()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(10)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    fixed = settings(max_steps=steps, token_budget=0, max_staleness=100, dtype="float32", trust_remote_code=False)
    trainer = AsyncGRPOTrainer(
        str(folder),
        args=AsyncGRPOConfig(str(folder / "out"), **(fixed | options)),
        train_dataset=Dataset.from_list([{"prompt": "w1 w2"}]),
        processing_class=tiny_tokenizer(),
        rollout_worker=Worker(folder, steps),
        weight_transfer=NoTransfer(),
    )
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def move(model, scale=0.05):
    """Move a policy away from the weights that sampled."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight += scale * torch.randn(weight.shape, generator=generator)
