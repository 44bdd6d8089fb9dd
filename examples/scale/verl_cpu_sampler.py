"""A sampler on the CPU for verl's asynchronous trainer: `rollout.name=cpu`, `rollout.checkpoint_engine.backend=file`.

verl samples with vLLM, SGLang or TensorRT-LLM, and sends weights over NCCL, NIXL or the like. Here an engine of this
library samples, and weights go through a folder. verl finds both in its own registries; nothing of verl is replaced.
VERL_USE_EXTERNAL_MODULES=verl_cpu_sampler makes every process of verl import this module.
"""

import asyncio
import os
from pathlib import Path

import ray
import torch
from transformers import AutoModelForCausalLM
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from rollcorr import SamplingSpec
from rollcorr.engines import GenerationSettings, TransformersEngine


class Sampler:
    """The server of a replica: a Ray actor that samples one response per request."""

    def __init__(self, path, config):
        self.model = AutoModelForCausalLM.from_pretrained(path)
        sampling = SamplingSpec(temperature=config.temperature, logprobs="processed")
        ids = {"eos_token_id": self.model.config.eos_token_id, "pad_token_id": self.model.config.pad_token_id}
        settings = GenerationSettings(sampling=sampling, max_new_tokens=config.response_length, **ids)
        self.engine = TransformersEngine(self.model, settings)
        self.calls = 0

    async def generate(self, prompt_ids, **_):
        """Return a response with its log-probs and the version of the weights."""
        self.calls += 1
        rollout = self.engine.generate([prompt_ids], seed=self.calls)
        mask = rollout.tokens.response_mask[0]
        return TokenOutput(
            token_ids=rollout.tokens.unpadded()[1][0],
            log_probs=rollout.rollout_log_prob[0][mask].tolist(),
            stop_reason="completed",
            extra_fields={"global_steps": self.engine.weight_version},
        )

    async def update_weights(self, weights, version):
        """Take weights of the trainer; the engine verifies them on its probe."""
        self.model.load_state_dict(weights)
        self.engine.update_weights(self.model, version=version)

    async def nothing(self, **_):
        """Answer verl's other calls: a request is never half done, and there is no cache to free."""

    wake_up = sleep = abort_all_requests = resume_generation = nothing
    clear_kv_cache = release_kv_cache = resume_kv_cache = nothing


class Replica(RolloutReplica):
    """One sampler beside verl's worker, which receives the weights for it."""

    async def launch_servers(self):
        """Start the sampler."""
        self._server_address = f"sampler_{self.replica_rank}"
        sampler = ray.remote(Sampler).options(name=self._server_address)
        self._server_handle = sampler.remote(self.model_config.path, self.config)
        self.servers = [self._server_handle]


class ServerAdapter(base.BaseRollout):
    """What verl's worker calls: it passes the weights on to the sampler."""

    is_leader_rank = True

    def __init__(self, *args, replica_rank, **kwargs):
        super().__init__(*args, **kwargs)
        self.replica_rank = replica_rank

    async def update_weights(self, weights, global_steps=None, **_):
        """Collect all weights, and send them at once."""
        state = {name: weight async for name, weight in ensure_async_iterator(weights)}
        await ray.get_actor(f"sampler_{self.replica_rank}").update_weights.remote(state, global_steps)

    async def resume(self, tags):
        """Nothing was released."""

    async def release(self):
        """There is no memory to release."""


@CheckpointEngineRegistry.register("file")
class FileCheckpointEngine(CheckpointEngine):
    """Weights in a folder that the trainer and the samplers share: `engine_kwargs.file.folder`."""

    def __init__(self, bucket_size, folder, is_master=False):
        self.folder, self.is_master = Path(folder), is_master

    def prepare(self):
        """Return no addresses: the folder is known."""
        return {}

    @classmethod
    def build_topology(cls, actor_wg_world_size, rollout_world_size, metadata):
        """Return no arguments of a process group."""
        return {}, {}

    def init_process_group(self):
        """There is no process group."""

    def finalize(self):
        """Nothing is kept between two updates."""

    async def send_weights(self, weights, global_steps=None):
        """Gather every weight on every rank, and write them on the first."""
        state = {name: weight.cpu() async for name, weight in ensure_async_iterator(weights)}
        if self.is_master:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.save(state, self.folder / "writing")
            os.replace(self.folder / "writing", self.folder / f"{global_steps}.pt")

    async def receive_weights(self, global_steps=None):
        """Wait for the file of this version."""
        path = self.folder / f"{global_steps}.pt"
        while not path.exists():
            await asyncio.sleep(0.05)
        for pair in torch.load(path, weights_only=True).items():
            yield pair


RolloutReplicaRegistry.register("cpu", lambda: Replica)
base._ROLLOUT_REGISTRY["cpu", "async"] = "verl_cpu_sampler.ServerAdapter"
