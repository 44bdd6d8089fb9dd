"""SGLang-Diffusion and vLLM-Omni, from answers that their own code produced (recordings/record_diffusion.py)."""

import base64
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from local_server import serving
from safetensors.torch import load, save

from rollcorr.core import gaussian_kl, gaussian_log_prob, sde_step_mean
from rollcorr.engines import DiffusionSettings, EngineAnswerError, SglangDiffusionEngine, VllmOmniEngine
from rollcorr.engines.sglang_diffusion import read_rollouts
from rollcorr.engines.transport.msgpack_body import parse_msgpack
from rollcorr.engines.vllm_omni import read_outputs

RECORDINGS = Path(__file__).parent / "recordings"
PROMPTS = ["a red circle", "a red circle"]


def recorded(name):
    found = json.loads((RECORDINGS / name).read_text(encoding="utf-8"))
    assert found["version"] in name
    assert found["commit"]
    answers = [base64.b64decode(answer) for answer in found["answers"]]
    settings = DiffusionSettings(sigmas=found["sigmas"], height=16, width=16, noise_level=found["noise_level"])
    return answers, torch.tensor(found["windows"]), settings


def unpack(data):
    return parse_msgpack(bytearray(data), None, limit=1 << 20, where="test")


def trainer_moments(rollout, settings, column):
    """Mean and deviation of the recorded network, v = tanh(x) / 2, in one column of the window."""
    sigmas, steps = torch.tensor(settings.sigmas), rollout.steps[:, column]
    x = rollout.data["latents"][:, column]
    return sde_step_mean(
        torch.tanh(x) / 2, x, sigma=sigmas[steps], sigma_next=sigmas[steps + 1], sigma_max=settings.sigmas[1],
        noise_level=settings.noise_level,
    )  # fmt: skip


def check_log_probs(rollout, settings):
    """The trainer's log-probs of the same steps and weights equal the engine's."""
    after = rollout.data.get("next_latents", rollout.data["latents"][:, 1:])
    for column in range(rollout.steps.shape[1]):
        mean, std = trainer_moments(rollout, settings, column)
        log_prob = gaussian_log_prob(after[:, column], mean, std)
        torch.testing.assert_close(rollout.data["rollout_log_probs"][:, column], log_prob, rtol=0, atol=2e-6)
        torch.testing.assert_close(rollout.data["std"][:, column], std.flatten(), rtol=1e-6, atol=0)
        if "prev_sample_mean" in rollout.data:
            assert gaussian_kl(mean, rollout.data["prev_sample_mean"][:, column], std).max() < 1e-9


def test_sglang_rollouts_equal_the_trainers_log_probs():
    answers, windows, settings = recorded("sglang_diffusion_0.5.23.json")
    served = dict(zip(map(str, windows.tolist()), answers, strict=True))

    def answer(handler, body):
        handler.send(200, served[str(body["rollout_sde_step_indices"])])

    with serving(answer) as server:
        rollout = SglangDiffusionEngine(server.url, settings, version=3).sample(PROMPTS, windows, seed=1)
    assert {path for path, _ in server.requests} == {"/rollout/generate"}
    body = server.requests[0][1]
    assert (body["num_inference_steps"], body["rollout_noise_level"], body["guidance_scale"]) == (4, 0.7, 1.0)
    assert len({body["seed"] for _, body in server.requests}) == 2

    check_log_probs(rollout, settings)
    assert (rollout.version, "next_latents" in rollout.data) == (3, True)
    assert rollout.final.shape == (2, 2, 4, 4)
    assert torch.equal(rollout.data["timesteps"], 1000 * torch.tensor(settings.sigmas)[windows])


def test_vllm_omni_rollouts_equal_the_trainers_log_probs():
    answers, windows, settings = recorded("vllm_omni_0.32.0rc1.json")
    outputs, asked = iter([SimpleNamespace(**load(answer)) for answer in answers]), []

    def generate(prompt, parameters):
        asked.append((prompt["prompt"], parameters["extra_args"]["sde_window_range"]))
        return [next(outputs)]

    engine = VllmOmniEngine(generate, settings, parameters=dict)
    rollout = engine.sample(PROMPTS, windows, seed=1)
    assert asked == [(PROMPTS[0], (0, 2)), (PROMPTS[1], (1, 3))]
    check_log_probs(rollout, settings)
    assert "prev_sample_mean" not in rollout.data
    with pytest.raises(ValueError, match="windows without holes"):
        engine.sample(PROMPTS, torch.tensor([[0, 2], [1, 3]]), seed=1)


def change(response, field, convert):
    """Replace a tensor of a response of SGLang."""
    place = response
    for name in field[:-1]:
        place = place[name]
    data = load(place[field[-1]]["data"])
    place[field[-1]]["data"] = save({name: convert(value).contiguous() for name, value in data.items()})


@pytest.mark.parametrize(
    ("field", "convert", "message"),
    [
        (("rollout_log_probs",), lambda x: 32 * x, "is no mean of the step's log-density"),
        (("rollout_log_probs",), lambda x: x + 1, "is no mean of the step's log-density"),
        (("rollout_log_probs",), lambda x: torch.nan * x, "is not finite"),
        (("rollout_log_probs",), lambda x: x[:3], r"of \(4, 4, 3, 4\) steps"),
        (("dit_trajectory", "sigmas"), lambda x: x**2, "expected 4 steps and the trainer's sigmas"),
        (("rollout_debug_tensors", "rollout_prev_sample_means"), lambda x: x[..., :2], "do not fit latents"),
    ],
)
def test_answers_that_do_not_fit_are_refused(field, convert, message):
    answers, windows, settings = recorded("sglang_diffusion_0.5.23.json")
    parsed = [unpack(answer) for answer in answers]
    for (response,) in parsed:
        change(response, field, convert)
    with pytest.raises(EngineAnswerError, match=message):
        read_rollouts(parsed, windows, settings)


def test_answers_without_a_field_are_refused():
    answers, windows, settings = recorded("sglang_diffusion_0.5.23.json")
    parsed = [unpack(answer) for answer in answers]
    parsed[1][0]["dit_trajectory"] = None
    with pytest.raises(EngineAnswerError, match=r"picture 1 is no answer of /rollout/generate"):
        read_rollouts(parsed, windows, settings)

    # Older servers send the tensors in base64.
    for name in ("latents", "sigmas"):
        tensor = parsed[0][0]["dit_trajectory"][name]
        tensor["data"] = base64.b64encode(tensor["data"]).decode()
    assert read_rollouts(parsed[:1], windows[:1], settings).data["latents"].shape == (1, 3, 2, 4, 4)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"trajectory_log_probs": None}, "is no output of a pipeline with log-probs"),
        ({"trajectory_timesteps": torch.tensor([[900.0, 800.0]])}, "expected .* of steps .* in the trainer's schedule"),
        ({"trajectory_latents": torch.zeros(1, 2, 2, 4, 4)}, "do not fit 2 windows of 2 steps"),
        ({"trajectory_log_probs": torch.tensor([[9.0, 9.0]])}, "is no mean of the step's log-density"),
        ({"error": "out of memory"}, "picture 0 failed: out of memory"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(changed, message):
    answers, windows, settings = recorded("vllm_omni_0.32.0rc1.json")
    outputs = [SimpleNamespace(**{**load(answer), **changed}) for answer in answers]
    with pytest.raises(EngineAnswerError, match=message):
        read_outputs(outputs, windows, settings)


@pytest.mark.parametrize("sigmas", [[1.0, 0.5], [0.5, 1.0, 0.0], [1.2, 0.0], [0.0]])
def test_settings_need_a_falling_schedule(sigmas):
    with pytest.raises(ValueError, match="sigmas must fall from at most 1 to 0"):
        DiffusionSettings(sigmas=sigmas, height=8, width=8)


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"\x83\xa1a\x01\xa1b\xff\xa1c\xc0", {"a": 1, "b": -1, "c": None}),
        (b"\x93\xc2\xc3\xca\x3f\x80\x00\x00", [False, True, 1.0]),
        (b"\x92\xcd\x01\x00\xd1\xff\x00", [256, -256]),
        (b"\xdc\x00\x02\xc4\x02hi\xd9\x02hi", [b"hi", "hi"]),
        (b"\xde\x00\x01\x90\x05", "list"),
    ],
)
def test_msgpack_by_hand(data, value):
    if value == "list":  # a list cannot be a key
        with pytest.raises(EngineAnswerError, match="with invalid MessagePack: unhashable"):
            unpack(data)
    else:
        assert unpack(data) == value


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x01\x01", "ends at byte 1 of 2"),
        (b"\x92\x01", "it ends at byte 2"),
        (b"\xdd\xff\xff\xff\xff\x01", "it ends at byte 6"),
        (b"\x91" * 3000 + b"\xc0", "nested too deeply"),
        (b"\xdd\x00\x01\x11\x70" + b"\x90" * 70000, "more lists and maps than the limit"),
        (b"\xd4\x00\x00", "0xd4 is an extension type"),
        (b"\xa1\xff", "with invalid MessagePack"),
        (b"", "it ends at byte 0"),
    ],
)
def test_malformed_msgpack_is_refused(data, message):
    with pytest.raises(EngineAnswerError, match=message):
        parse_msgpack(bytearray(data), None, limit=1 << 20, where="test")
