"""Policies: the tiny Qwen3 model of the demo, its byte tokenizer, and loading either from a directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollcorr.engines.transport.weight_folder import without_progress_bars
from rollcorr.train.model_files import demo_model_directory, model_directory
from rollcorr.train.steps import derived_seed

DEMO_POLICY = "demo"
TINY_QWEN3 = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Policy:
    """A causal language model in float32 and the tokenizer that belongs to it.

    Attributes:
        model: in float32.
        tokenizer: of that model.
    """

    model: Any
    tokenizer: Any

    @property
    def eos_token_id(self) -> int:
        """Return the token that ends a response."""
        return int(self.tokenizer.eos_token_id)

    @property
    def pad_token_id(self) -> int:
        """Return the token that pads rows to a common length."""
        pad = self.tokenizer.pad_token_id
        return self.eos_token_id if pad is None else int(pad)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def make_byte_tokenizer() -> Any:  # noqa: ANN401 (transformers is imported lazily)
    """Return a tokenizer with one token per byte, `<pad>` and `<eos>`: 258 entries, for any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )


def make_tiny_policy(*, seed: int = 0, **overrides: Any) -> Policy:  # noqa: ANN401 (any field of a configuration)
    """Return a randomly initialized policy over bytes, by default a Qwen3 with 1.0 M parameters.

    Args:
        seed: seeds the initial weights; the global generator does not change.
        overrides: `model_type`, and fields of its configuration in `transformers`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = make_byte_tokenizer()
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    model_type = overrides.pop("model_type", "qwen3")
    defaults = TINY_QWEN3 if model_type == "qwen3" else {}
    config = AutoConfig.for_model(model_type, **(defaults | {"vocab_size": len(tokenizer)} | special | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(seed, "weights"))
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False).float()
    return Policy(model, tokenizer)


def load_policy(
    path: str | os.PathLike[str] | None, *, config: Mapping[str, Any] | None = None, seed: int = 0
) -> Policy:
    """Load a policy in float32.

    Args:
        path: a directory with a model and its tokenizer, a hub id such as `"Qwen/Qwen3-0.6B"`, `"demo"` for the
            checkpoint of rollcorr-demo-models, or None, for random weights.
        config: `model_type` and fields of a `transformers` configuration; only with random weights, which use
            the byte tokenizer.
        seed: seeds random weights.

    Raises:
        FileNotFoundError: the directory does not exist, or has no model or tokenizer.
        ValueError: both or neither of `path` and `config` are given.
    """
    if (path is None) == (config is None):
        raise ValueError(f"give either model.path or model.config, got path={path!r} and config={config!r}")
    if path is None:
        return make_tiny_policy(seed=seed, **(config or {}))
    path = os.fspath(path)
    return read_policy(demo_model_directory(path) if path == DEMO_POLICY else model_directory(path))


def save_policy(policy: Policy, directory: str | os.PathLike[str]) -> None:
    """Write model (safetensors) and tokenizer into a directory that `load_policy` reads.

    Args:
        policy: model and tokenizer.
        directory: the folder to write.
    """
    with without_progress_bars():
        policy.model.save_pretrained(directory)
    policy.tokenizer.save_pretrained(directory)


def read_policy(directory: Path) -> Policy:
    """Return the policy in a directory.

    Raises:
        FileNotFoundError: there is no model or no tokenizer.
    """
    model = read_model(directory)
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        raise FileNotFoundError(
            f"model.path {str(directory)!r} has a model but no tokenizer: save one beside it with `save_pretrained`"
        )

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)

    # Remove how the model was loaded, so that saving it again produces the same file.
    for name in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(name, None)
    return Policy(model, tokenizer)


def read_model(directory: Path) -> Any:  # noqa: ANN401
    """Return the model in a directory, in float32.

    Raises:
        FileNotFoundError: the directory contains no model.
    """
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(
            f"model.path {str(directory)!r} has no config.json: give a directory written by `save_pretrained`, "
            f"or {DEMO_POLICY!r} for the policy of the demo"
        )

    from transformers import AutoModelForCausalLM

    with without_progress_bars():
        return AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, trust_remote_code=False).float()
