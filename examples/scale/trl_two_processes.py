"""TRL on two processes with an engine of this library, a run directory, and a null from a run at equal weights.

torchrun --nproc-per-node 2 examples/scale/trl_two_processes.py runs/right --steps 20 --learning-rate 0
rollcorr null runs/right -o null.json
mkdir -p runs/trained && cp null.json runs/trained/
torchrun --nproc-per-node 2 examples/scale/trl_two_processes.py runs/trained --steps 20
rollcorr report runs/trained

The model is tiny and random, so that this runs anywhere; the reward is the share of even tokens.
"""

import argparse

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from rollcorr import Monitor, RolloutSample, SamplingSpec
from rollcorr.engines import GenerationSettings, TransformersEngine
from rollcorr.integrations.trl import attach

WORDS = ["<pad>", "<eos>", *(f"w{number}" for number in range(62))]


def make_tokenizer():
    """Return a tokenizer that has one token per word."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def make_model():
    """Return a random model of two layers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(max_position_embeddings=128, **sizes, **ids))


def even_share(completion_ids, **_):
    """Return the share of even tokens in each completion."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def main():
    """Train, and leave a run directory."""
    parser = argparse.ArgumentParser(description="Train a tiny model with TRL and an engine.")
    parser.add_argument("run")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--correction", default="measure")
    arguments = parser.parse_args()

    options = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 48, "report_to": []}
    steps = {"max_steps": arguments.steps, "learning_rate": arguments.learning_rate, "save_strategy": "no"}
    trainer = GRPOTrainer(
        make_model(),
        reward_funcs=even_share,
        args=GRPOConfig(f"{arguments.run}/trl", use_cpu=True, bf16=False, **options, **steps),
        train_dataset=Dataset.from_list([{"prompt": f"w{number} w{number + 1}"} for number in range(60)]),
        processing_class=make_tokenizer(),
    )

    # Each rank has an engine of its own, on its own prompts; `group` merges what the ranks measure.
    sampling = SamplingSpec(temperature=trainer.temperature, logprobs="processed")
    settings = GenerationSettings(sampling=sampling, max_new_tokens=48, eos_token_id=1, pad_token_id=0)
    engine = TransformersEngine(trainer.model, settings)
    group = torch.distributed.group.WORLD if trainer.accelerator.num_processes > 1 else None
    with Monitor(arguments.run, rollouts=RolloutSample(), group=group) as monitor:
        attach(trainer, arguments.correction, engine=engine, monitor=monitor)
        trainer.train()


if __name__ == "__main__":
    main()
