"""What the adapter adds to a step of TRL's GRPOTrainer on the CPU: `python benchmarks/trl_step.py [--rows 32 …]`.

Needs TRL: run it in the environment that `make test-trl` makes. A small random Llama trains with the embedded engine in
the place of vLLM. CPU seconds are those of all threads, so other programs on the machine disturb them little. The
smaller the model, the larger the adapter's share.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
import warnings

from peers import provenance

TARGET = 0.03
WORDS = 512


def parsed():
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32, help="sequences in a step")
    parser.add_argument("--tokens", type=int, default=64, help="the longest completion")
    parser.add_argument("--width", type=int, default=64, help="of the model; 64 has 0.3 million parameters")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="measured steps, after two that warm up")
    return parser.parse_args()


class Stopwatch:
    """CPU seconds inside some functions."""

    def __init__(self):
        self.seconds = 0.0

    def around(self, function):
        """The function, with its seconds added."""

        def timed(*args, **kwargs):
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - start

        return timed


def make_trainer(arguments, folder):
    """A GRPOTrainer on a random model."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    shape = {"hidden_size": arguments.width, "intermediate_size": 3 * arguments.width, "vocab_size": WORDS}
    shape |= {"num_hidden_layers": arguments.layers, "num_attention_heads": 8, "max_position_embeddings": 1024}
    return GRPOTrainer(
        LlamaForCausalLM(LlamaConfig(**shape, pad_token_id=0, eos_token_id=1, bos_token_id=2)),
        reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
        args=GRPOConfig(
            folder,
            use_cpu=True,
            bf16=False,
            report_to=[],
            gradient_checkpointing=False,
            per_device_train_batch_size=arguments.rows,
            num_generations=8,
            max_completion_length=arguments.tokens,
            max_steps=arguments.steps + 2,
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": f"w{number} w{number + 1}"} for number in range(10, 138)]),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="w0", eos_token="w1", bos_token="w2"
        ),
    )


def main():
    """Train, and print the figures."""
    arguments = parsed()
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")

    import torch
    from transformers import TrainerCallback

    from rollcorr.config import SamplingSpec
    from rollcorr.core.mergeable_statistics import Statistics
    from rollcorr.engines import GenerationSettings, TransformersEngine
    from rollcorr.integrations.trl import attach, corrected_trainer

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(arguments, folder)
        sampling = SamplingSpec(temperature=trainer.temperature, logprobs="processed")
        settings = GenerationSettings(
            sampling=sampling, max_new_tokens=arguments.tokens, eos_token_id=1, pad_token_id=0
        )
        attach(trainer, engine=TransformersEngine(trainer.model, settings))

        # All that the adapter does in a step: the correction of its batch, and the metrics of the log.
        adapter = Stopwatch()
        corrected_trainer._correct_batch = adapter.around(corrected_trainer._correct_batch)
        Statistics.metrics = adapter.around(Statistics.metrics)
        marks = []

        class Marks(TrainerCallback):
            def on_step_begin(self, *_, **__):
                marks.append((time.process_time(), adapter.seconds))

        trainer.add_callback(Marks())
        trainer.train()
        marks.append((time.process_time(), adapter.seconds))

    (start, adapter_start), (end, adapter_end) = marks[2], marks[-1]
    step, own = (end - start) / arguments.steps, (adapter_end - adapter_start) / arguments.steps
    figures = {
        **provenance(__file__, "cpu", torch.get_num_threads()),
        "step_cpu_ms": round(1e3 * step, 1),
        "adapter_cpu_ms": round(1e3 * own, 2),
        "share": round(own / step, 4),
        "target": TARGET,
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
