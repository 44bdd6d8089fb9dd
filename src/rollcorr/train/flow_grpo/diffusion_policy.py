"""Diffusion policies on disk and in memory: a directory in the layout of diffusers.

DIR/transformer/ or DIR/unet/   the network: of a class in `families.py`, or of your own family
DIR/scheduler/                  a scheduler that the family reads
DIR/word_table.safetensors      prompts of a small model, or
DIR/model_index.json, …         text encoders and tokenizers of a pipeline
DIR/vae/                        latents → pictures; without it, latents are pictures
DIR/lora/, DIR/base.json        a checkpoint: adapters, and the paths of all other parts
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollcorr.config.functions import load_function
from rollcorr.train.flow_grpo.families import FAMILIES
from rollcorr.train.flow_grpo.family import Family
from rollcorr.train.flow_grpo.prompts import NETWORKS, WORD_TABLE, PipelineEncoder, PromptEncoder, WordTable
from rollcorr.train.model_files import demo_model_directory, model_directory

SMALL_MODEL = "shapes"
ADAPTER_FILE = "pytorch_lora_weights.safetensors"


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Low-rank adapters (peft): y = W x + (alpha / rank) B A x, with W frozen.

    Attributes:
        rank: rank of the adapters; 0 trains the full transformer.
        alpha: adapters are scaled by alpha / rank; defaults to `rank`.
        target_modules: names of the linear layers with adapters.
    """

    rank: int = 0
    alpha: float | None = None
    target_modules: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"model.lora.rank must be at least 0, got {self.rank}")
        if self.rank and not self.target_modules:
            raise ValueError("model.lora.target_modules is empty: nothing would be trained")


@dataclass(frozen=True, eq=False)
class DiffusionPolicy:
    """A transformer with its scheduler, encoder and decoder.

    Attributes:
        transformer: the network, float32; contains the adapters, if any.
        scheduler: diffusers' scheduler, for its schedule.
        family: call convention of the network.
        encoder: prompts → condition.
        decoder: the VAE; optional. Without it, latents are pictures.
        size: height and width in latent pixels.
        base: directory of the frozen parts.
        origin: folder of the transformer, or of the base transformer of the adapters.
        lora: the adapters' settings; rank 0 without adapters.
    """

    transformer: Any
    scheduler: Any
    family: Family
    encoder: PromptEncoder
    decoder: nn.Module | None
    size: tuple[int, int]
    base: Path
    origin: Path
    lora: LoraSettings

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Return the shape of one latent."""
        return self.family.latent_shape(self.transformer.config, *self.size)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Context manager that disables the adapters."""
        if not self.lora.rank:
            yield
            return

        self.transformer.disable_adapters()
        try:
            yield
        finally:
            self.transformer.enable_adapters()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Compute pictures (B, 3, H, W) in [0, 1], float32, from latents at σ = 0."""
        if self.decoder is None:
            pictures = self.family.unpack(latents, *self.size)
        else:
            pictures = self.family.decode(self.decoder, latents, *self.size)
        return (pictures.float() / 2 + 0.5).clamp(0, 1)


def load_policy(
    path: str | os.PathLike[str],
    *,
    family: str | None = None,
    height: int | None = None,
    width: int | None = None,
    lora: LoraSettings | None = None,
    encoder_dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> DiffusionPolicy:
    """Read a policy.

    Args:
        path: a directory as above, or a hub id of one; "shapes" is the small model of rollcorr-demo-models.
        family: `package.module:Class` or `file.py:Class` of a `Family`; defaults to the family of the network's class.
        height: pixels; defaults to the model's own size, if it has one.
        width: pixels; defaults to the height.
        lora: adapters to add; adapters of a checkpoint are loaded and must have the same settings.
        encoder_dtype: precision of text encoders and VAE.
        device: device of all parts.
        seed: seeds new adapters.

    Raises:
        FileNotFoundError: the directory or a part is missing; the message names it.
        ValueError: a part is of an unsupported class, or sizes do not fit.
    """
    import diffusers

    path = os.fspath(path)
    directory = demo_model_directory(SMALL_MODEL) if path == SMALL_MODEL else model_directory(path)

    # A checkpoint contains the paths of its base; a directory of diffusers has no such file.
    note = _read_json(directory / "base.json")
    base = Path(note.get("path", directory))
    network = _network_folder(directory, base, note.get("transformer"))
    class_name = _class_name(network / "config.json")
    chosen = _choose_family(class_name, family)
    chosen.check(_read_json(base / "model_index.json"))

    scheduler_folder = _part_folder(directory, base, "scheduler")
    scheduler_class = _class_name(scheduler_folder / "scheduler_config.json")
    if scheduler_class not in chosen.schedulers:
        raise ValueError(
            f"{scheduler_folder}: {scheduler_class} is not supported; {type(chosen).__name__} reads the schedule of "
            f"{' or '.join(chosen.schedulers)}"
        )

    transformer = getattr(diffusers, class_name).from_pretrained(network)
    nn.Module.float(transformer)
    transformer.register_to_config(_name_or_path="")  # a saved copy must not depend on the load path
    lora = lora or LoraSettings()
    _add_adapters(transformer, lora, directory, seed)
    vae = None
    if (base / "vae").is_dir():
        vae = getattr(diffusers, _class_name(base / "vae" / "config.json")).from_pretrained(base / "vae")
        nn.Module.to(vae, device, encoder_dtype).eval().requires_grad_(False)

    return DiffusionPolicy(
        transformer=transformer.to(device).eval(),  # no dropout: log-probs of one policy must agree between passes
        scheduler=getattr(diffusers, scheduler_class).from_pretrained(scheduler_folder),
        family=chosen,
        encoder=_load_encoder(base, chosen, encoder_dtype, device),
        decoder=vae,
        size=_latent_size(transformer.config, vae, height, width),
        base=base,
        origin=network,
        lora=lora,
    )


def save_policy(policy: DiffusionPolicy, directory: str | os.PathLike[str]) -> None:
    """Write the trained parts and the paths of the frozen ones, for `load_policy`.

    Args:
        policy: the trained policy.
        directory: the folder to write.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    note = {"path": str(policy.base.resolve())}
    if policy.lora.rank:
        from peft import get_peft_model_state_dict
        from safetensors.torch import save_file

        path = directory / "lora" / ADAPTER_FILE
        path.parent.mkdir(exist_ok=True)
        weights = get_peft_model_state_dict(policy.transformer)
        save_file({name: value.detach().cpu().contiguous() for name, value in weights.items()}, path)

        # The adapters may belong to a transformer that was trained before and differs from the base's.
        note["transformer"] = str(policy.origin.resolve())
    else:
        policy.transformer.save_pretrained(directory / policy.origin.name)
    (directory / "base.json").write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")


def _add_adapters(transformer: Any, lora: LoraSettings, directory: Path, seed: int) -> None:  # noqa: ANN401
    """Add adapters to the transformer: from the checkpoint if it has adapters, else new (B = 0)."""
    saved = directory / "lora" / ADAPTER_FILE
    if saved.is_file() and not lora.rank:
        raise ValueError(f"{directory} holds LoRA adapters; set model.lora.rank to theirs")
    if not lora.rank:
        return
    from peft import LoraConfig

    alpha = float(lora.rank if lora.alpha is None else lora.alpha)
    settings = LoraConfig(
        r=lora.rank, lora_alpha=alpha, target_modules=list(lora.target_modules), init_lora_weights="gaussian"
    )

    # Restore the global generator, so that adapters do not change later draws.
    transformer.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            transformer.add_adapter(settings)
        except ValueError as error:
            raise ValueError(f"model.lora.target_modules={list(lora.target_modules)}: {error}") from error
    if saved.is_file():
        _load_adapters(transformer, saved)


def _load_adapters(transformer: nn.Module, path: Path) -> None:
    """Load the adapters from a file; names and shapes must match."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    weights = load_file(path)
    wanted = {
        name.replace(".default.", "."): value for name, value in transformer.named_parameters() if "lora_" in name
    }

    # peft silently skips tensors that do not match, so compare names and shapes first.
    shapes = [{name: tuple(value.shape) for name, value in found.items()} for found in (weights, wanted)]
    if shapes[0] != shapes[1]:
        different = sorted(name for name in {*weights, *wanted} if shapes[0].get(name) != shapes[1].get(name))
        raise ValueError(f"{path} does not fit model.lora: {different[0]} and {len(different) - 1} more differ")
    set_peft_model_state_dict(transformer, weights)


def _load_encoder(base: Path, family: Family, dtype: torch.dtype, device: str) -> PromptEncoder:
    if (base / WORD_TABLE).is_file():
        return WordTable.load(base, device)
    if (base / "model_index.json").is_file():
        return PipelineEncoder(base, family, dtype=dtype, device=device)
    raise FileNotFoundError(
        f"{base} cannot read prompts: it holds neither model_index.json with text encoders nor {WORD_TABLE}"
    )


def _latent_size(config: Mapping[str, Any], vae: Any, height: int | None, width: int | None) -> tuple[int, int]:  # noqa: ANN401
    """Return height and width in latent pixels."""
    factor = 1 if vae is None else _downsampling_factor(vae.config)
    if height is None:
        if "sample_size" not in config:
            raise ValueError("this model has no size of its own; set model.height (and model.width) in pixels")
        return config["sample_size"], config["sample_size"] if width is None else width // factor
    pixels = (height, height if width is None else width)
    if pixels[0] % factor or pixels[1] % factor:
        raise ValueError(f"model.height={pixels[0]} and model.width={pixels[1]} must be divisible by {factor}")
    return pixels[0] // factor, pixels[1] // factor


def _downsampling_factor(config: Mapping[str, Any]) -> int:
    """Return the pixels per latent pixel along each side."""
    if "block_out_channels" in config:
        return int(2 ** (len(config["block_out_channels"]) - 1))
    if config.get("scale_factor_spatial") is not None:
        return int(config["scale_factor_spatial"])
    return int(2 ** len(config["temperal_downsample"]))  # diffusers' spelling


def _choose_family(class_name: str, where: str | None) -> Family:
    """Return the family of a class of diffusers, or an instance of the class at a reference."""
    if where is not None:
        family = load_function(where, option="model.family")()
        if not isinstance(family, Family):
            raise ValueError(f"model.family={where!r} is no subclass of rollcorr.train.Family")
        return family
    if class_name not in FAMILIES:
        raise ValueError(
            f"network class {class_name!r} is not supported; supported are {', '.join(FAMILIES)}, or set model.family "
            "to a family of your own"
        )
    return FAMILIES[class_name]


def _network_folder(directory: Path, base: Path, noted: str | None) -> Path:
    """Return the folder of the network: in the directory, at the path in base.json, or in the base."""
    for name in NETWORKS:
        if (directory / name).is_dir():
            return directory / name

    # Adapters are valid only for the transformer that they were trained with.
    if noted is not None:
        if not Path(noted).is_dir():
            raise FileNotFoundError(f"{noted} does not exist, and the adapters of {directory} sit on it; put it back")
        return Path(noted)
    return _part_folder(base, base, "unet" if (base / "unet").is_dir() else "transformer")


def _part_folder(directory: Path, base: Path, name: str) -> Path:
    """Return the folder of a part, in the directory or in the base."""
    folder = next((place / name for place in (directory, base) if (place / name).is_dir()), None)
    if folder is None:
        raise FileNotFoundError(f"{base} has no folder {name!r}; give the directory of a diffusers pipeline")
    return folder


def _read_json(path: Path) -> dict[str, Any]:
    """Return the content of a file, empty if it does not exist."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _class_name(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give the directory of a diffusers pipeline")
    return str(_read_json(path).get("_class_name"))
