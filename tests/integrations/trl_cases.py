"""TRL's own trainers on a tiny random model, and a sampler that replays given completions. Needs TRL."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

WORDS = ["<pad>", "<eos>", "<bos>", *(f"w{number}" for number in range(29))]
PAD, EOS = 0, 1
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
ROWS, LENGTH = 8, 7


def tiny_model(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=2,
    )
    return LlamaForCausalLM(config)


def tiny_tokenizer():
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")


def even_ids(completion_ids, **_):
    """A reward that any policy can raise: the share of even ids."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def settings(**options):
    fixed = {
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "gradient_checkpointing": False,
        "per_device_train_batch_size": ROWS,
        "num_generations": 4,
        "max_completion_length": LENGTH,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "learning_rate": 1e-2,
    }
    return fixed | options


def grpo_trainer(folder, trainer_class=GRPOTrainer, trainer_options=None, config_class=GRPOConfig, **options):
    return trainer_class(
        tiny_model(),
        reward_funcs=even_ids,
        args=config_class(str(folder), **settings(**options)),
        train_dataset=Dataset.from_list([{"prompt": f"w{number} w{number + 1}"} for number in range(16)]),
        processing_class=tiny_tokenizer(),
        **(trainer_options or {}),
    )


def rloo_trainer(folder, **options):
    return RLOOTrainer(
        tiny_model(),
        reward_funcs=even_ids,
        args=RLOOConfig(str(folder), beta=0.0, **settings(**options)),  # otherwise it loads a reference by its name
        train_dataset=Dataset.from_list([{"prompt": f"w{number} w{number + 1}"} for number in range(16)]),
        processing_class=tiny_tokenizer(),
    )


def completions(seed=0):
    """Random completions, and log-probs near a random model's, as TRL's sampler returns them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, LENGTH + 1, (ROWS,), generator=generator).tolist()
    ids = [torch.randint(3, len(WORDS), (length,), generator=generator).tolist() for length in lengths]
    centre = -torch.tensor(float(len(WORDS))).log()
    log_probs = [(centre + 0.4 * torch.randn(length, generator=generator)).tolist() for length in lengths]

    # vLLM reports None where its log-prob was NaN.
    log_probs[1][0] = None
    return ids, log_probs


class Replay:
    """Mimic the vLLM interface that TRL uses, from lists."""

    def __init__(self, ids, log_probs):
        self.ids, self.log_probs, self.syncs = ids, log_probs, 0

    def sync_weights(self):
        self.syncs += 1

    def generate(self, prompts, images, num_generations, profiler=None):
        return prompts, self.ids, [[[value] for value in row] for row in self.log_probs], None


def replayed(trainer, ids, log_probs):
    """The trainer, sampling by replay as if by vLLM."""
    trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, Replay(ids, log_probs), -1
    trainer.vllm_mode = "replay"
    return trainer


def with_options(trainer, mode, upper, lower=None):
    for holder in (trainer, trainer.args):
        holder.vllm_importance_sampling_mode = mode
        holder.vllm_importance_sampling_clip_max = upper
        holder.vllm_importance_sampling_clip_min = lower


def prompts(rows=ROWS, generations=4):
    return [{"prompt": f"w{row // generations} w5"} for row in range(rows)]


def loss_and_gradient(trainer, batch):
    """TRL's loss of a batch under a policy that has moved since it was scored, and the gradient of all weights."""
    model = trainer.model
    model.train()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.compute_loss(model, batch)
    loss.backward()
    gradient = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(before[name])
    return loss.detach(), gradient
