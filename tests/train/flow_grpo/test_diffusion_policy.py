"""Policies on disk: families of diffusers, adapters, and errors for other directories."""

import json
import shutil

import pytest
import tiny_pipelines
import torch

from rollcorr.train import load_config, train
from rollcorr.train.flow_grpo.diffusion_policy import LoraSettings, load_policy, save_policy
from rollcorr.train.flow_grpo.families import FAMILIES
from rollcorr.train.flow_grpo.family import Condition, Prompts, stack_conditions
from rollcorr.train.flow_grpo.prompts import WordTable, read_prompts
from rollcorr.train.flow_grpo.sampler import RolloutModel, Sampler, make_schedule
from rollcorr.train.steps import shuffled_walk

TEXTS = ["a red circle", "a green square"]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by imports of the pipelines


@pytest.fixture(scope="module", params=list(tiny_pipelines.PIPELINES))
def pipeline(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("pipelines") / request.param
    tiny_pipelines.PIPELINES[request.param](directory)
    return directory


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_policy_draws_what_the_pipeline_of_diffusers_draws(pipeline, guidance):
    """Prompts, schedule, transformer, guidance, unpacking and VAE, from the same noise."""
    from diffusers import DiffusionPipeline

    policy = load_policy(pipeline, height=16)
    model = RolloutModel(policy.transformer, dtype="float32")
    sampler = Sampler(policy=policy, model=model, schedule=make_schedule(policy, 5))
    empty = policy.encoder.encode(["", ""]) if guidance != 1 else None
    prompts = Prompts(policy.encoder.encode(TEXTS), empty, guidance)
    mine = policy.decode(sampler.draw(prompts, seed=3, step=1))

    theirs = DiffusionPipeline.from_pretrained(pipeline)
    theirs.set_progress_bar_config(disable=True)
    scale = {"guidance_scale": guidance}
    if pipeline.name == "qwen":
        scale = {"true_cfg_scale": guidance, "negative_prompt": ["", ""]}
    if pipeline.name == "wan":
        scale["num_frames"] = 1
    expected = theirs(
        TEXTS, latents=sampler._draw_noise(2, 3, 1, "start"), height=16, width=16, num_inference_steps=5,
        output_type="pt", return_dict=False, **scale,
    )[0].view(2, 3, 16, 16)  # fmt: skip
    assert mine.shape == (2, 3, 16, 16)
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_pipeline_trains_and_its_checkpoint_goes_on(pipeline, tmp_path, console, rank):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(TEXTS))
    overrides = [
        "recipe=flow_grpo", f"model.path={pipeline}", f"run_dir={tmp_path / 'run'}", "model.height=16",
        f"prompts.path={prompts}", f"model.lora.rank={rank}", "model.gradient_checkpointing=true",
        "rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.num_steps=3", "reward.name=color",
        "rollout.dtype=float32", "log.tensorboard=false", "log.evaluate=0", "checkpoint.every=0", "steps=1",
    ]  # fmt: skip
    assert train(load_config(None, overrides), console=console).step == 1
    summary = train(load_config(tmp_path / "run/config.yaml", ["resume=true", "steps=2"]), console=console)
    assert (summary.step, summary.skipped_steps) == (2, 0)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["rollout_corr/log_ratio_max"] for row in rows] == [0, 0]  # the same precision on both sides
    assert rows[0]["actor/grad_norm"] > 0


def test_packed_latents_unpack_as_the_pipeline_packs_them():
    from diffusers import FluxPipeline

    picture = torch.arange(2 * 4 * 6 * 8.0).view(2, 4, 6, 8)
    packed = FluxPipeline._pack_latents(picture, 2, 4, 6, 8)
    for name in ("FluxTransformer2DModel", "QwenImageTransformer2DModel"):
        assert torch.equal(FAMILIES[name].unpack(packed, 6, 8), picture)
        assert FAMILIES[name].latent_shape({"in_channels": 16}, 6, 8) == tuple(packed.shape[1:])


def test_a_saved_policy_loads_and_finds_its_frozen_parts(micro_model, tmp_path):
    policy = load_policy(micro_model)
    with torch.no_grad():
        policy.transformer.proj_out.bias.add_(1)
    save_policy(policy, tmp_path / "saved")
    again = load_policy(tmp_path / "saved")
    assert torch.equal(again.transformer.proj_out.bias, policy.transformer.proj_out.bias)
    assert again.base == micro_model
    save_policy(again, tmp_path / "twice")
    assert load_policy(tmp_path / "twice").base == micro_model


def test_saved_adapters_load_exactly(micro_model, tmp_path):
    lora = LoraSettings(rank=2, target_modules=("to_q", "ff.net.2"))
    policy = load_policy(micro_model, lora=lora)
    with torch.no_grad():
        for name, parameter in policy.transformer.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.arange(parameter.numel()).view_as(parameter) * 1e-3)
    save_policy(policy, tmp_path / "saved")
    assert not (tmp_path / "saved" / "transformer").exists()
    again = load_policy(tmp_path / "saved", lora=lora)
    mine, theirs = (p.transformer.state_dict() for p in (policy, again))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    with pytest.raises(ValueError, match=r"holds LoRA adapters; set model.lora.rank"):
        load_policy(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"does not fit model.lora"):
        load_policy(tmp_path / "saved", lora=LoraSettings(rank=4, target_modules=("to_q", "ff.net.2")))


def test_adapters_on_a_trained_transformer_find_it_again(micro_model, tmp_path):
    trained = load_policy(micro_model)
    with torch.no_grad():
        trained.transformer.proj_out.bias.add_(1)
    save_policy(trained, tmp_path / "trained")

    adapted = load_policy(tmp_path / "trained", lora=LoraSettings(rank=2))
    save_policy(adapted, tmp_path / "adapted")
    again = load_policy(tmp_path / "adapted", lora=LoraSettings(rank=2))
    assert torch.equal(again.transformer.proj_out.bias, trained.transformer.proj_out.bias)
    save_policy(again, tmp_path / "twice")
    twice = load_policy(tmp_path / "twice", lora=LoraSettings(rank=2))
    assert torch.equal(twice.transformer.proj_out.bias, trained.transformer.proj_out.bias)

    shutil.rmtree(tmp_path / "trained")
    with pytest.raises(FileNotFoundError, match=r"trained/transformer does not exist, and the adapters of .* sit on"):
        load_policy(tmp_path / "twice", lora=LoraSettings(rank=2))


def test_fresh_adapters_depend_on_the_seed_alone_and_leave_the_global_generator(micro_model):
    state = torch.get_rng_state()
    first, second, other = (load_policy(micro_model, lora=LoraSettings(rank=2), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    name = next(name for name, _ in first.transformer.named_parameters() if "lora_A" in name)
    a, b, c = (policy.transformer.get_parameter(name) for policy in (first, second, other))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


@pytest.mark.parametrize(
    ("break_it", "error", "message"),
    [
        (lambda d: shutil.rmtree(d), FileNotFoundError, "does not exist"),
        (lambda d: shutil.rmtree(d / "scheduler"), FileNotFoundError, "no folder 'scheduler'"),
        (lambda d: (d / "transformer/config.json").unlink(), FileNotFoundError, "config.json does not exist"),
        (lambda d: (d / "word_table.safetensors").unlink(), FileNotFoundError, "cannot read prompts"),
        (lambda d: (d / "word_table.safetensors").write_bytes(b"no"), ValueError, "is no word table"),
        (lambda d: rename_class(d / "transformer/config.json", "UNet"), ValueError, "'UNet' is not supported"),
        (lambda d: rename_class(d / "scheduler/scheduler_config.json", "DDIM"), ValueError, "DDIM is not supported"),
    ],
)
def test_a_directory_that_is_no_policy_is_explained(micro_model, tmp_path, break_it, error, message):
    directory = tmp_path / "model"
    shutil.copytree(micro_model, directory)
    break_it(directory)
    with pytest.raises(error, match=message):
        load_policy(directory)


def rename_class(path, name):
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"_class_name": name}))


def test_sizes_that_do_not_fit_are_explained(micro_model, tmp_path):
    with pytest.raises(ValueError, match="14 × 14 are not divisible by the patch size 4"):
        load_policy(micro_model, height=14).latent_shape  # noqa: B018
    with pytest.raises(ValueError, match="exceed the 16 × 16 of the model's position embedding"):
        load_policy(micro_model, height=32).latent_shape  # noqa: B018
    tiny_pipelines.save_flux(tmp_path / "flux")
    with pytest.raises(ValueError, match=r"no size of its own; set model.height"):
        load_policy(tmp_path / "flux")
    with pytest.raises(ValueError, match="must be divisible by 2"):
        load_policy(tmp_path / "flux", height=15)


def test_adapters_without_a_place_are_explained(micro_model):
    with pytest.raises(ValueError, match=r"model.lora.target_modules=\['nowhere'\]"):
        load_policy(micro_model, lora=LoraSettings(rank=2, target_modules=("nowhere",)))
    with pytest.raises(ValueError, match="nothing would be trained"):
        LoraSettings(rank=2, target_modules=())
    with pytest.raises(ValueError, match="at least 0, got -1"):
        LoraSettings(rank=-1)


def test_words_become_their_vectors_in_order():
    table = WordTable(["a", "red"], torch.tensor([[1.0, 2.0], [3.0, 5.0]]), length=3)
    condition = table.encode(["a red", "Red", ""])
    assert condition.embeds[0].tolist() == [[1, 2], [3, 5], [0, 0]]
    assert condition.pooled.tolist() == [[2, 3.5], [3, 5], [0, 0]]
    with pytest.raises(ValueError, match="does not know 'blue'; it knows a, red"):
        table.encode(["a blue"])
    with pytest.raises(ValueError, match="has 4 words; this model reads 3"):
        table.encode(["a a a red"])


def test_prompts_of_unequal_length_are_padded_and_masked():
    short, long = Condition(torch.ones(1, 2, 3)), Condition(torch.full((1, 4, 3), 2.0), mask=torch.ones(1, 4))
    both = stack_conditions([short, long])
    assert both.embeds[:, :, 0].tolist() == [[1, 1, 0, 0], [2, 2, 2, 2]]
    assert both.mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert stack_conditions([short, short]).mask is None


def test_every_prompt_comes_once_an_epoch_in_an_order_of_its_own():
    def prompts(step):
        return ["abcde"[row] for row in shuffled_walk(5, 3, purpose="prompts", seed=1, step=step)]

    dealt = [text for step in range(5) for text in prompts(step)]
    epochs = [dealt[i : i + 5] for i in range(0, 15, 5)]
    assert all(sorted(epoch) == ["a", "b", "c", "d", "e"] for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert prompts(2) == dealt[6:9]


def test_prompt_files(tmp_path):
    lines, empty = tmp_path / "a.txt", tmp_path / "d.txt"
    lines.write_text("a red circle\n\n  two  \n")
    empty.write_text("\n")
    assert read_prompts(lines) == ["a red circle", "two"]
    with pytest.raises(ValueError, match="holds no prompt"):
        read_prompts(empty)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_prompts(tmp_path / "nowhere.txt")
