"""The contract, kept by the engines that run in process on any machine."""

from typing import ClassVar

import ctranslate2
import pytest
import torch
from engine_contract import NEW_TOKENS, TRUNCATED, EngineContract, KeptSetContract

from rollcorr.config import SamplingSpec
from rollcorr.engines.base import GenerationSettings
from rollcorr.engines.ctranslate2 import CTranslate2Engine
from rollcorr.engines.transformers import TransformersEngine


def settings(policy, sampling=SamplingSpec()):  # noqa: B008 (frozen)
    return GenerationSettings(
        sampling=sampling,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=policy.eos_token_id,
        pad_token_id=policy.pad_token_id,
    )


class ForgetfulTransformers(TransformersEngine):
    forgotten = None

    def _copy_weights(self, model):
        parameter = dict(self.model.named_parameters()).get(self.forgotten)
        kept = None if parameter is None else parameter.clone()
        super()._copy_weights(model)
        if kept is not None:
            parameter.copy_(kept)


class TestTransformers(EngineContract, KeptSetContract):
    name = "transformers"
    noise = 0.05
    rescoring_noise = 0.02
    options: ClassVar = {"dtype": torch.bfloat16}

    def make(self, policy, cls=TransformersEngine):
        return cls(policy.model, settings(policy), **self.options)

    def make_truncated(self, policy):
        return TransformersEngine(policy.model, settings(policy, TRUNCATED), **self.options)

    def forgetful(self, policy, parameter):
        engine = self.make(policy, ForgetfulTransformers)
        engine.forgotten = parameter
        return engine


class TestTransformersInFloat32(TestTransformers):
    noise = rescoring_noise = 1e-4
    options: ClassVar = {"dtype": torch.float32}


class ForgetfulCTranslate2(CTranslate2Engine):
    forgotten = None

    def _copy_to_cpu(self, model):
        twin = super()._copy_to_cpu(model)
        if self.forgotten is not None:
            with torch.no_grad():
                dict(twin.named_parameters())[self.forgotten].copy_(self.export_weights()[self.forgotten])
        return twin


class TestCTranslate2Int8(EngineContract):
    name = "ctranslate2"
    noise = 0.02
    rescoring_noise = 1e-3
    options: ClassVar = {"compute_type": "int8"}

    def make(self, policy, cls=CTranslate2Engine):
        return cls(policy.model, settings(policy), **self.options, threads=1)

    def forgetful(self, policy, parameter):
        engine = self.make(policy, ForgetfulCTranslate2)
        engine.forgotten = parameter
        return engine


@pytest.mark.skipif(
    "int16" not in ctranslate2.get_supported_compute_types("cpu"),
    reason="CTranslate2 multiplies int16 with Intel's MKL alone: run this on an x86 processor, without CT2_USE_MKL=0",
)
class TestCTranslate2Int16(TestCTranslate2Int8):
    noise = rescoring_noise = 5e-3
    options: ClassVar = {"compute_type": "int16"}


class TestCTranslate2Float32(TestCTranslate2Int8):
    noise = rescoring_noise = 1e-4
    options: ClassVar = {"compute_type": "float32"}
