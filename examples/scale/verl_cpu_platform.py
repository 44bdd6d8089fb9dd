"""A CPU platform for verl, which has NVIDIA's, AMD's and Huawei's, as verl/plugin/platform/README.md describes.

VERL_USE_EXTERNAL_MODULES=verl_cpu_platform VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cuda: verl's FSDP engine, which is
registered for CUDA and NPU, runs on gloo then. For examples and tests: it has the calls of a training, no profiler.
"""

# ruff: noqa: D101, D102 (the names are verl's)

import types
from contextlib import nullcontext

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.utils import distributed

device_module = types.ModuleType("cpu_device_module")
vars(device_module).update(vars(torch.cpu))
device_module.get_device_name = lambda *_: "CPU"
device_module.max_memory_allocated = device_module.max_memory_reserved = lambda *_: 0
device_module.memory_allocated = device_module.memory_reserved = lambda *_: 0
device_module.mem_get_info = lambda *_: (0, 0)
device_module.empty_cache = device_module.ipc_collect = lambda: None


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "any"
    device_module = device_module

    def is_available(self):
        return True

    def current_device(self):
        return torch.device("cpu")

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg):
        return nullcontext()

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def ray_resource_name(self):
        return "GPU"  # verl's pools count them: `ray.init(num_gpus=…)`, also where there are none

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False

    def cudart(self):
        return None


# verl names the backends of the CPU and of its device, which torch refuses where both are the CPU.
initialize = distributed.initialize_global_process_group_ray
distributed.initialize_global_process_group_ray = lambda timeout_second=None, backend=None: initialize(
    timeout_second, "cpu:gloo"
)
