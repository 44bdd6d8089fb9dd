"""Items of the guides about trainers, engines and model families; `tests/test_guides.py` runs them."""

from pathlib import Path

from guide_calls import Item

from rollcorr.engines import DiffusionSettings, SglangDiffusionEngine, VllmOmniEngine
from rollcorr.train import load_config
from rollcorr.train.flow_grpo.families import FAMILIES
from rollcorr.train.flow_grpo.sampler import draw_windows
from rollcorr.train.grpo.tasks import overlong_penalty

ROOT = Path(__file__).parents[1]


def tested(file: str, name: str) -> bool:
    """Whether a test or a case of one is there, for an item that a call of one line cannot run."""
    return name in (ROOT / "tests" / file).read_text(encoding="utf-8")


def pictures(*overrides: str) -> object:
    """The rollout options of a run on pictures."""
    return load_config(None, ["recipe=flow_grpo", "rollout.num_steps=8", *overrides]).rollout


def window(*overrides: str, step: int) -> list[int]:
    """The steps of the first picture that have noise, in a training step."""
    return draw_windows(pictures("rollout.sde_window_size=3", *overrides), seed=0, step=step)[0].tolist()


SETTINGS = DiffusionSettings(sigmas=[1.0, 0.5, 0.0], height=16, width=16)
DAPO = ROOT / "examples" / "train" / "dapo.yaml"
LANES = {
    "verl-omni": "make test-verl SOURCES=DIR",
    "older verl": "ROLLCORR_VERL_TESTS=DIR/tests python -m pytest tests/integrations/test_verl_own_tests.py",
}
TRAINERS = [
    Item(
        "000:104",
        "DAPO example",
        lambda: (
            load_config(DAPO).algorithm.loss.clip_ratio_high,
            load_config(DAPO).rollout.max_rounds > 1,
            overlong_penalty(18, longest=20, buffer=4),
            tested("train/test_dapo.py", "test_the_example_trains_a_tiny_model"),
        ),
        (0.28, True, -0.5, True),
    ),
    *[
        Item(f"001:{line}", name, lambda name=name: tested("test_examples.py", f'"{name.replace(" ", "_")}.py": ['))
        for line, name in ((15, "replay buffer"), (16, "behavior cloning"), (17, "filtered data"))
    ],
    # Pictures.
    Item(
        "004:Why",
        "vllm-omni and SGLang-Diffusion as engines",
        lambda: (
            callable(SglangDiffusionEngine("http://localhost:30000", SETTINGS).sample),
            callable(VllmOmniEngine(lambda prompt, parameters: [], SETTINGS, parameters=dict).sample),
            all(
                tested("engines/test_diffusion_engines.py", f"test_{name}_rollouts_equal_the_trainers_log_probs")
                for name in ("sglang", "vllm_omni")
            ),
        ),
        (True, True, True),
    ),
    Item(
        "004:Why",
        "bypass mode reuses the rollout's log-probs",
        lambda: tested("train/flow_grpo/test_fresh_pictures.py", "test_bypass_mode_logs_its_first_scores"),
    ),
    Item("004:Why", "float16 rollouts", lambda: pictures("rollout.dtype=float16").dtype, "float16"),
    Item("004:Why", "fp8 in hardware", None, True, "not run: no device with e4m3 products; the emulated fp8 runs"),
    Item(
        "004:Quickstart",
        "run_qwen_image_ocr_lora_rollout_corr.sh trains",
        lambda: tested(
            "train/flow_grpo/test_flow_grpo_examples.py", "test_quickstart_of_verl_omni_trains_tiny_qwen_image"
        ),
    ),
    Item("004:Plug-in", "verl-omni as host", lane=LANES["verl-omni"]),
    Item("000:723", "verl's test suite of October", lane=LANES["older verl"]),
    Item("001:564", "verl's test suite of November", lane=LANES["older verl"]),
]

# Not in the documents; not counted.
BEYOND = [
    Item(
        "beyond",
        "null of pictures from any engine",
        lambda: tested("train/flow_grpo/test_engine_null.py", "test_any_engine_gives_a_null"),
    ),
    *[
        Item("beyond", f"family {name}", lambda kind=kind: type(FAMILIES[kind]).__name__, name)
        for name, kind in (
            ("StableDiffusion3", "SD3Transformer2DModel"),
            ("Flux", "FluxTransformer2DModel"),
            ("QwenImage", "QwenImageTransformer2DModel"),
            ("Wan", "WanTransformer3DModel"),
            ("StableDiffusion1", "UNet2DConditionModel"),
        )
    ],
    *[
        Item("beyond", f"log-probs of {name}", lambda name=name: tested("train/flow_grpo/test_families.py", name))
        for name in ("wan", "sd15")
    ],
    Item(
        "beyond",
        "family of your own",
        lambda: tested("train/flow_grpo/test_families.py", "test_a_family_of_your_own_trains"),
    ),
    Item(
        "beyond",
        "window with holes",
        lambda: window("rollout.sde_window_spacing=2", "rollout.sde_window_range=[1, 6]", step=9),
        [1.0, 3.0, 5.0],
    ),
    *[
        Item(
            "beyond",
            f"moving window at step {step}",
            lambda step=step: window("rollout.sde_window=moving", "rollout.sde_window_interval=2", step=step),
            steps,
        )
        for step, steps in ((1, [0.0, 1.0, 2.0]), (4, [1.0, 2.0, 3.0]), (99, [4.0, 5.0, 6.0]))
    ],
]
