"""Items of the guides about trainers, engines and model families; `tests/test_guides.py` runs them."""

import re
from pathlib import Path

from guide_calls import Item

from rollcorr.engines import DiffusionSettings, SglangDiffusionEngine, VllmOmniEngine
from rollcorr.train import load_config
from rollcorr.train.flow_grpo.families import FAMILIES
from rollcorr.train.flow_grpo.sampler import draw_windows
from rollcorr.train.grpo.tasks import overlong_penalty

ROOT = Path(__file__).parents[1]
CLAIMS = ROOT / "experiments" / "mismatch_in_practice" / "claims.md"


def tested(file: str, name: str) -> bool:
    """Whether a test or a case of one is there, for an item that a call of one line cannot run."""
    return name in (ROOT / "tests" / file).read_text(encoding="utf-8")


def judged(number: int) -> bool:
    """Whether the page of the study has a verdict for a claim."""
    rows = re.findall(r"^\| .+ \| \d+ \| (.+) \|$", CLAIMS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [claim for row in rows for claim in row.split(", ")].count(str(number)) == 1


def pictures(*overrides: str) -> object:
    """The rollout options of a run on pictures."""
    return load_config(None, ["recipe=flow_grpo", "rollout.num_steps=8", *overrides]).rollout


def window(*overrides: str, step: int) -> list[int]:
    """The steps of the first picture that have noise, in a training step."""
    return draw_windows(pictures("rollout.sde_window_size=3", *overrides), seed=0, step=step)[0].tolist()


SETTINGS = DiffusionSettings(sigmas=[1.0, 0.5, 0.0], height=16, width=16)
DAPO = ROOT / "examples" / "train" / "dapo.yaml"
SCALE = "claims.md of the study says what its small policies can judge of this training at scale"
NOT_HERE = "make test-verl SOURCES=DIR runs its 21 tests, where DIR holds sources of verl-omni"
TRAINERS = [
    # The study of sampling: figure → claim.
    *[
        Item(f"003:{line}", f"figure {figure}", lambda claim=claim: judged(claim), True, SCALE)
        for figure, line, claim in (("1a", 300, 43), ("1b", 304, 41), ("2b", 318, 45), ("4a", 360, 52), ("5b", 387, 58))
    ],
    Item("003:129-135", "table of corrections", lambda: judged(21)),
    # DAPO, of which the oldest guide names the script.
    Item("000:104", "DAPO example", lambda: load_config(DAPO).algorithm.loss.clip_ratio_high, 0.28),
    Item("000:104", "DAPO: dynamic sampling", lambda: load_config(DAPO).rollout.max_rounds > 1),
    Item("000:104", "DAPO: overlong shaping", lambda: overlong_penalty(18, longest=20, buffer=4), -0.5),
    Item("000:104", "DAPO trains", lambda: tested("train/test_dapo.py", "test_the_example_trains_a_tiny_model")),
    *[
        Item("001:13-17", name, lambda name=name: tested("test_examples.py", f'"{name.replace(" ", "_")}.py": ['))
        for name in ("replay buffer", "behavior cloning", "filtered data")
    ],
    # Pictures.
    Item(
        "004",
        "vllm-omni and SGLang-Diffusion as engines",
        lambda: all(
            tested("engines/test_diffusion_engines.py", f"test_{name}_rollouts_equal_the_trainers_log_probs")
            for name in ("sglang", "vllm_omni")
        ),
    ),
    *[
        Item("004", f"{engine} is an engine", lambda made=made: callable(made().sample))
        for engine, made in (
            ("SGLang-Diffusion", lambda: SglangDiffusionEngine("http://localhost:30000", SETTINGS)),
            ("vLLM-Omni", lambda: VllmOmniEngine(lambda prompt, parameters: [], SETTINGS, parameters=dict)),
        )
    ],
    Item(
        "004",
        "null of pictures from any engine",
        lambda: tested("train/flow_grpo/test_engine_null.py", "test_any_engine_gives_a_null"),
    ),
    Item(
        "004",
        "rollout log in bypass mode",
        lambda: tested("train/flow_grpo/test_fresh_pictures.py", "test_bypass_mode_logs_its_first_scores"),
    ),
    *[
        Item("004", f"family {name}", lambda kind=kind: type(FAMILIES[kind]).__name__, name)
        for name, kind in (
            ("StableDiffusion3", "SD3Transformer2DModel"),
            ("Flux", "FluxTransformer2DModel"),
            ("QwenImage", "QwenImageTransformer2DModel"),
            ("Wan", "WanTransformer3DModel"),
            ("StableDiffusion1", "UNet2DConditionModel"),
        )
    ],
    *[
        Item("004", f"log-probs of {family}", lambda family=family: tested("train/flow_grpo/test_families.py", family))
        for family in ("wan", "sd15")
    ],
    Item(
        "004",
        "family of your own",
        lambda: tested("train/flow_grpo/test_families.py", "test_a_family_of_your_own_trains"),
    ),
    Item("004", "float16 rollouts", lambda: pictures("rollout.dtype=float16").dtype, "float16"),
    Item("004", "fp8 in hardware", None, True, "not run: no device with e4m3 products; the emulated fp8 runs"),
    Item(
        "004",
        "window with holes",
        lambda: window("rollout.sde_window_spacing=2", "rollout.sde_window_range=[1, 6]", step=9),
        [1.0, 3.0, 5.0],
    ),
    *[
        Item(
            "004",
            f"moving window at step {step}",
            lambda step=step: window("rollout.sde_window=moving", "rollout.sde_window_interval=2", step=step),
            steps,
        )
        for step, steps in ((1, [0.0, 1.0, 2.0]), (4, [1.0, 2.0, 3.0]), (99, [4.0, 5.0, 6.0]))
    ],
    Item(
        "004",
        "run_qwen_image_ocr_lora_rollout_corr.sh trains",
        lambda: tested(
            "train/flow_grpo/test_flow_grpo_examples.py", "test_quickstart_of_verl_omni_trains_tiny_qwen_image"
        ),
    ),
    Item("004", "verl-omni as host", reason=NOT_HERE),
]
