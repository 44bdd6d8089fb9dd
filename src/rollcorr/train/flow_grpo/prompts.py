"""Prompts and their encoders.

An encoder turns prompts into a `Condition`: the word table of a small model, or the text encoders of a diffusers
pipeline.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from rollcorr.train.flow_grpo.family import Condition, Family, stack_conditions

# Folder of the trained network.
NETWORKS = ("transformer", "unet")

WORD_TABLE = "word_table.safetensors"


def read_prompts(path: str | Path) -> list[str]:
    """Read the prompts of a file, one per line; empty lines are ignored.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it contains no prompt.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"prompts.path={str(path)!r} does not exist")
    lines = [line for line in map(str.strip, path.read_text(encoding="utf-8").splitlines()) if line]
    if not lines:
        raise ValueError(f"{path} holds no prompt; write one per line")
    return lines


class WordTable:
    """A fixed vector for each word; a prompt is its words' vectors in order, padded with zeros.

    Args:
        words: the vocabulary.
        vectors: (words, E).
        length: maximum number of words of a prompt.
    """

    def __init__(self, words: Sequence[str], vectors: Tensor, *, length: int) -> None:
        self.words = {word: row for row, word in enumerate(words)}
        self.vectors = vectors
        self.length = length

    def encode(self, prompts: Sequence[str]) -> Condition:
        """Return token embeddings (B, length, E) and their mean over the words (B, E).

        Raises:
            ValueError: a word is not in the table, or a prompt exceeds `length`.
        """
        embeds = self.vectors.new_zeros(len(prompts), self.length, self.vectors.shape[1])
        for row, prompt in enumerate(prompts):
            words = prompt.lower().split()
            unknown = [word for word in words if word not in self.words]
            if unknown:
                raise ValueError(
                    f"prompt {prompt!r}: this model does not know {', '.join(map(repr, unknown))}; "
                    f"it knows {', '.join(self.words)}"
                )
            if len(words) > self.length:
                raise ValueError(f"prompt {prompt!r} has {len(words)} words; this model reads {self.length} at most")
            if words:
                embeds[row, : len(words)] = self.vectors[[self.words[word] for word in words]]

        return Condition(embeds, embeds.sum(1) / (embeds != 0).any(-1).sum(1, keepdim=True).clamp(min=1))

    @classmethod
    def load(cls, directory: Path, device: str) -> WordTable:
        """Read `word_table.safetensors`, with its vectors on a device.

        Raises:
            ValueError: the file is no word table.
        """
        from safetensors import SafetensorError, safe_open

        path = directory / WORD_TABLE
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata()
                vectors = file.get_tensor("vectors").to(device)
                return cls(json.loads(metadata["words"]), vectors, length=int(metadata["length"]))
        except (KeyError, TypeError, ValueError, SafetensorError) as error:
            raise ValueError(f"{path} is no word table ({error})") from error


class PipelineEncoder:
    """The text encoders of a diffusers pipeline directory.

    Args:
        directory: contains `model_index.json`, tokenizers and text encoders.
        family: encodes a prompt.
        dtype: precision of the encoders; the condition is float32.
        device: device of the encoders.

    Raises:
        ValueError: the directory's encoders cannot be loaded; the message contains the cause.
    """

    def __init__(
        self, directory: Path, family: Family, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> None:
        from diffusers import DiffusionPipeline

        # Leave out the network and the VAE: they are large, and loaded elsewhere.
        parts = json.loads((directory / "model_index.json").read_text(encoding="utf-8"))
        left_out = {name: None for name in (*NETWORKS, "vae", "safety_checker") if name in parts}
        try:
            self.pipeline = DiffusionPipeline.from_pretrained(directory, trust_remote_code=False, **left_out)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(f"the text encoders of {str(directory)!r} cannot be loaded: {error}") from error

        for part in self.pipeline.components.values():
            if isinstance(part, torch.nn.Module):
                torch.nn.Module.to(part, device, dtype).requires_grad_(False)
        self.family, self.device = family, device

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Condition:
        """Encode one prompt at a time, so that rows are independent."""
        return stack_conditions([self.family.encode(self.pipeline, prompt, self.device) for prompt in prompts])


PromptEncoder = WordTable | PipelineEncoder
"""Turns prompts into what the transformer reads: `encode` returns one row per prompt, on the model's device."""
