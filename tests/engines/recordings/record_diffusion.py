"""Record answers of diffusion engines: `python record_diffusion.py SGLANG VLLM_OMNI`, folders of their unpacked wheels.

Runs SGLang's own rollout step and serializer, and vLLM-Omni's output formatter, in isolation, on a network with a known
formula, without a server; every other module that they import is a stub. Needs msgspec and pydantic. The answers are
written next to this file, with the version and the SHA-256 of each source file that ran.
"""

import base64
import hashlib
import importlib.util
import json
import sys
import types
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from safetensors.torch import save

HERE = Path(__file__).parent
SHAPE, STEPS, NOISE_LEVEL = (2, 4, 4), 4, 0.7
SGLANG_WINDOWS, OMNI_WINDOWS = [[0, 2], [1, 2]], [[0, 1], [1, 2]]


def velocity(x):
    """The network of the recorded policy."""
    return 0.5 * torch.tanh(x)


def schedule():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(STEPS)
    return scheduler


class Stub:
    """Stands for any class, function or decorator that a source imports."""

    def __new__(cls, *arguments, **_):
        is_subclass = cls.__module__ != __name__
        decorated = [] if is_subclass else [argument for argument in arguments[:1] if callable(argument)]
        return decorated[0] if decorated else super().__new__(cls)

    def __call__(self, *arguments, **_):
        return arguments[0] if arguments and callable(arguments[0]) else self

    def __getattr__(self, name):
        return Stub()


class StubModule(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Stub,), {"__init__": lambda self, *_, **__: None, "__module__": __name__})


class Finder:
    """Loads the chosen files of a source; every other module of the prefixes is a stub."""

    def __init__(self, root, chosen, prefixes):
        self.root, self.chosen, self.prefixes, self.hashes = Path(root), chosen, prefixes, {}

    def find_spec(self, name, path=None, target=None):
        if name in self.chosen:
            stem = self.root / name.replace(".", "/")
            file = stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")
            self.hashes[str(file.relative_to(self.root))] = hashlib.sha256(file.read_bytes()).hexdigest()
            return importlib.util.spec_from_file_location(name, file)
        if name.split(".")[0] in self.prefixes:
            return importlib.util.spec_from_loader(name, self)
        return None

    def create_module(self, spec):
        return StubModule(spec.name)

    def exec_module(self, module):
        pass


def write(name, finder, **content):
    package = next(iter(finder.chosen)).split(".")[0]
    version = {}
    exec((finder.root / package / "_version.py").read_text(encoding="utf-8"), version)
    found = {
        "version": version["__version__"],
        "commit": version["__commit_id__"] or "the wheel names none; the sources below are those of its version",
        "sources": finder.hashes,
        "sigmas": schedule().sigmas.tolist(),
        "noise_level": NOISE_LEVEL,
        **content,
    }
    (HERE / f"{name}_{found['version']}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def record_sglang(root):
    base = "sglang.multimodal_gen.runtime"
    entry, training = f"{base}.entrypoints.post_training", f"{base}.post_training"
    chosen = [f"{training}.rl_dataclasses", f"{training}.flow_rollout_controller"]
    chosen += [f"{entry}.{name}" for name in ("io_struct", "utils", "rollout_api")]
    finder = Finder(root, chosen, ("sglang", "fastapi"))
    sys.meta_path.insert(0, finder)
    rollout_api, classes = importlib.import_module(chosen[-1]), importlib.import_module(chosen[0])
    controller_class = importlib.import_module(chosen[1]).FlowRolloutController
    import msgspec

    answers = []
    for row, window in enumerate(SGLANG_WINDOWS):
        sigmas, times = schedule().sigmas, schedule().timesteps
        generator = torch.Generator().manual_seed(row)
        controller = controller_class(
            sde_type="sde", noise_level=NOISE_LEVEL, log_prob_no_const=False, debug_mode=True,
            sde_step_indices=window, generator=generator, return_dit_trajectory=True, return_step_indices=None,
            shard_for_sp=lambda batch, x: x, gather_for_sp=lambda batch, x: x, sigmas=sigmas, latents_shape=(1, *SHAPE),
        )  # fmt: skip
        x = torch.randn(1, *SHAPE, generator=generator)
        for step in range(STEPS):
            x = controller.transition(
                batch=None, model_output=velocity(x), sample=x, current_sigma=sigmas[step],
                next_sigma=sigmas[step + 1], dt=sigmas[step + 1] - sigmas[step], generator=None, step_index=step,
                timestep=times[step],
            )  # fmt: skip
        controller.record_trajectory_step(x, torch.tensor(0.0), STEPS)

        data = classes.RolloutTrajectoryData(
            rollout_log_probs=controller.collect_rollout_log_probs(),
            rollout_debug_tensors=controller.collect_rollout_debug_tensors(None),
            dit_trajectory=classes.RolloutDitTrajectory(
                latents=torch.stack(controller.step_latents, 1), timesteps=times, sigmas=sigmas
            ),
        )
        result = types.SimpleNamespace(
            output=torch.zeros(1, 3, 2, 2), metrics=None, peak_memory_mb=0.0, rollout_trajectory_data=data
        )
        responses = rollout_api._build_response(f"recorded-{row}", "a red circle", row, True, result)
        packed = msgspec.msgpack.encode([response.model_dump() for response in responses])
        answers.append(base64.b64encode(packed).decode())
    sys.meta_path.remove(finder)
    write("sglang_diffusion", finder, windows=SGLANG_WINDOWS, answers=answers)


def record_omni(root):
    chosen = ["vllm_omni.outputs", "vllm_omni.outputs.output_metadata", "vllm_omni.diffusion.output_formatter"]
    finder = Finder(root, chosen, ("vllm", "vllm_omni"))
    sys.meta_path.insert(0, finder)
    formatter = importlib.import_module(chosen[-1])

    answers = []
    for row, window in enumerate(OMNI_WINDOWS):
        scheduler, generator = schedule(), torch.Generator().manual_seed(row)
        sigmas, x = scheduler.sigmas, torch.randn(1, *SHAPE, generator=generator)
        kept, log_probs = [], []
        for step in range(STEPS):
            sigma, dt, v = sigmas[step], sigmas[step + 1] - sigmas[step], velocity(x)
            following = x + dt * v
            if step in window:
                g = NOISE_LEVEL * (sigma / (1 - min(sigma, sigmas[1]))).sqrt()
                mean, s = following + g**2 * dt / (2 * sigma) * (x + (1 - sigma) * v), g * (-dt).sqrt()
                following = mean + s * torch.randn(x.shape, generator=generator)
                log_probs.append(torch.distributions.Normal(mean, s).log_prob(following).mean())
                kept.append(x)
            if step == window[-1]:
                kept.append(following)
            x = following
        output = types.SimpleNamespace(
            trajectory_latents=torch.stack(kept, 1), trajectory_timesteps=scheduler.timesteps[window][None],
            trajectory_log_probs=torch.stack(log_probs)[None], trajectory_decoded=None, stage_durations={},
            peak_memory_mb=0.0,
        )  # fmt: skip
        request = types.SimpleNamespace(request_id=f"recorded-{row}")
        (answer,) = formatter._format_single_prompt_output(
            request=request, prompt="a red circle", diffusion_output=output, outputs=[], metrics={},
            postprocess_output=formatter.DiffusionPostprocessOutput({}), is_text_output=False, is_audio_output=False,
            final_output_type="image", audio_sample_rate=None,
        )  # fmt: skip
        fields = {name: value for name, value in vars(answer).items() if isinstance(value, torch.Tensor)}
        packed = save({name: value.contiguous() for name, value in fields.items() if name != "latents"})
        answers.append(base64.b64encode(packed).decode())
    sys.meta_path.remove(finder)
    write("vllm_omni", finder, windows=OMNI_WINDOWS, answers=answers)


if __name__ == "__main__":
    record_sglang(sys.argv[1])
    record_omni(sys.argv[2])
