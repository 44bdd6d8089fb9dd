"""Programs of one rank: an engine of a policy that FSDP2 shards, and two engines with one folder."""

import os
import warnings
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from engine_contract import NEW_TOKENS
from micro_policy import make_micro_policy
from processes import PATIENCE
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from rollcorr.config import SamplingSpec
from rollcorr.engines import gathered_policy
from rollcorr.engines.base import EngineError, GenerationSettings, WeightSyncError
from rollcorr.engines.response_scoring import make_probe, score_probe
from rollcorr.engines.transformers import TransformersEngine

LIMIT = timedelta(seconds=PATIENCE)
PEFT = {"target_modules": ["q_proj", "down_proj"], "r": 4, "lora_dropout": 0.5}


@contextmanager
def gloo(rank, path, size=2):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=size, timeout=LIMIT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def settings_of(policy):
    return GenerationSettings(
        sampling=SamplingSpec(),
        max_new_tokens=NEW_TOKENS,
        eos_token_id=policy.eos_token_id,
        pad_token_id=policy.pad_token_id,
    )


def adapt(model, *, scale=0.3):
    """Add LoRA adapters with effect, the same in every process."""
    from peft import LoraConfig, get_peft_model

    generator = torch.Generator().manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads an attribute that transformers renamed
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **PEFT))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return adapted


def shard(model, **options):
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def grow(model, by=1.1):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(by)


def load_into_engines(rank, path, adapted):
    """Load a sharded policy into an engine, twice, and compare the probe with an unsharded policy's."""
    with gloo(rank, path):
        policy, twin = make_micro_policy(), make_micro_policy().model
        model = policy.model
        if adapted:
            model, twin = adapt(model), adapt(twin).eval()
        shard(model).train()
        probe = make_probe(twin)

        engine = TransformersEngine(model, settings_of(policy), dtype=torch.float32)
        for version in (0, 1):
            grow(model), grow(twin)
            engine.update_weights(model, version=version)
            whole = twin.merge_and_unload() if adapted and version else twin
            difference = engine.score(probe) - score_probe(whole, probe, dtype=torch.float32)
            assert difference.abs().max() <= (1e-5 if adapted else 0), difference
        assert all(hasattr(parameter, "full_tensor") for parameter in model.parameters())
        assert model.training
        if rank == 0:  # alone: a copy that still knows its wrapper would wait for rank 1
            assert engine.generate([[1, 2]], seed=0).sampling.policy_version == 1

        # One engine on rank 0: the others take part and store nothing.
        plain = gathered_policy.gather_policy(model, device="cpu" if rank == 0 else "meta")
        assert {parameter.device.type for parameter in plain.parameters()} == {"cpu" if rank == 0 else "meta"}

        # A rank that loses a part of the weights raises, and keeps its version.
        if rank == 1:
            gathered_policy._full_tensor = lose_second_half
        with suppress(WeightSyncError):
            engine.update_weights(model, version=2)
        assert (engine.weight_version == 1) == (rank == 1)


def lose_second_half(parameter):
    whole = parameter.detach().full_tensor()
    return torch.cat([whole[: len(whole) // 2], torch.zeros_like(whole[len(whole) // 2 :])])


def load_in_mixed_precision(rank, path):
    with gloo(rank, path):
        policy = make_micro_policy()
        shard(policy.model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        engine = TransformersEngine(policy.model, settings_of(policy))
        grow(policy.model)
        engine.update_weights(policy.model, version=1)
        assert engine.weight_version == 1


def share_a_folder(rank, path):
    """Give both ranks one folder, then one folder each; every rank has its own server."""
    from test_vllm_server import make_engine, server_of

    # The server is another program: it does not belong to the process group.
    policy = make_micro_policy()
    with server_of(policy, Path(path) / f"served-{rank}") as (url, _), gloo(rank, path):
        own = make_engine(url, policy, folder=Path(path) / f"weights-{rank}")
        pids = [None, None]
        dist.all_gather_object(pids, os.getpid())
        if rank == 1:
            with pytest.raises(EngineError, match=f"weights-0' is in use by process {pids[0]} on"):
                make_engine(url, policy, folder=Path(path) / "weights-0")
        dist.barrier()
        own.close()
        assert not (Path(path) / f"weights-{rank}" / "run.lock").exists()
