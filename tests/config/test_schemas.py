"""Find the options and their generation; full files, errors, every example file, the migration page."""

import re
from pathlib import Path

import pytest

from rollcorr.config import RolloutCorrectionConfig, SamplingSpec
from rollcorr.config.conversion import convert, converted_document, resolve
from rollcorr.config.documents import load_yaml

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "configs"
FIRST = {"rollout_is_threshold": 2.0, "rollout_is": True, "rollout_is_level": "token", "rollout_is_mode": "truncate"}
SECOND = {"rollout_is": "sequence", "bypass_old_logprob_for_rollout": False, "use_pure_rollout_correction": False}


def became(conversion):
    return {(row.field, row.became) for row in conversion.report}


@pytest.mark.parametrize(
    ("options", "schema"),
    [
        ({"rollout_is": True, "rollout_is_threshold": 2.0}, "2025-10"),
        ({"rollout_is_level": "token"}, "2025-10"),
        ({"rollout_is_mode": "mask"}, "2025-10"),
        ({"rollout_is_veto_threshold": None}, "2025-10"),
        ({"rollout_is_threshold": 2.0, "rollout_is_threshold_lower": None}, "2025-10"),
        ({"algorithm": {"rollout_is_threshold": 2.0}}, "2025-10"),
        ({"bypass_old_logprob_for_rollout": False}, "2025-11"),
        ({"use_pure_rollout_correction": False}, "2025-11"),
        ({"rollout_rs_threshold_lower": None}, "2025-11"),
        ({"rollout_rs": "geometric", "rollout_rs_threshold": 1.001}, "2025-11"),
        ({"rollout_is": "token", "rollout_token_veto_threshold": 1e-4}, "newest"),
        ({"rollout_is_threshold": 2.0}, "newest"),
        ({"algorithm": {"rollout_is": "token"}}, "newest"),
        ({"algorithm": {"rollout_correction": {"rollout_is": None}}}, "newest"),
        ({}, "newest"),
    ],
)
def test_the_generation_is_found_from_its_signs(options, schema):
    assert convert(options).schema == schema


@pytest.mark.parametrize(
    "options",
    [
        {**FIRST, "bypass_mode": False},
        {**FIRST, "rollout_rs": None},
        {**FIRST, "rollout_token_veto_threshold": 1e-4},
        {"rollout_is": "token", "rollout_is_level": "token"},
        {**SECOND, "rollout_is": True},
        {**SECOND, "rollout_rs": "token_k1"},
        {"rollout_rs": "token_k1,sequence", "rollout_rs_threshold": 2.0},
        {"rollout_rs": "sequence", "rollout_rs_threshold": 2.0, "nonfinite": "raise"},
    ],
)
def test_a_mixture_of_generations_is_an_error(options):
    with pytest.raises(ValueError, match="mix generations"):
        convert(options)


def test_flat_options_beside_the_section_are_an_error():
    with pytest.raises(ValueError, match="a mixture"):
        convert({"algorithm": {"rollout_is": True, "rollout_correction": {"rollout_is": "token"}}})


def test_a_schema_asked_for_by_name_decides():
    assert convert({"rollout_is_threshold": 2.0}, schema="2025-10").config == RolloutCorrectionConfig(
        rollout_is="token", apply_is=False
    )
    with pytest.raises(ValueError, match="'bypass_mode' belongs to newest, not to 2025-10"):
        convert({"bypass_mode": True}, schema="2025-10")
    with pytest.raises(ValueError, match="schema must be one of"):
        convert({}, schema="2024")


def test_verl_0_7_is_read_without_schema():
    old = {"rollout_rs": "geometric", "rollout_rs_threshold": 1.001, "bypass_mode": True, "loss_type": "reinforce"}
    assert convert(old).schema == "2025-11"
    assert convert(old).config == RolloutCorrectionConfig.bypass_pg_geo_rs(rs_threshold=1.001)
    with pytest.raises(ValueError, match="say the same thing"):
        convert({**old, "bypass_old_logprob_for_rollout": True})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rollout_iss": "token"}, ValueError, "Did you mean 'rollout_is'? unknown option 'rollout_iss'; valid are"),
        ({"algorithm": {"rollout_corection": {}}}, ValueError, "Did you mean 'rollout_correction'?"),
        ({"algorithm": {"rollout_is_treshold": 2.0}}, ValueError, "Did you mean 'rollout_is_threshold'?"),
        ({"algorithm": {}, "rollout_is": True}, ValueError, "move it to algorithm.rollout_correction"),
        ({**FIRST, "rollout_is_mode": "clip"}, ValueError, "'truncate', 'mask'"),
        ({**FIRST, "rollout_is_level": "word"}, ValueError, "rollout_is_level"),
        ({**FIRST, "rollout_is_threshold": "two"}, ValueError, "rollout_is_threshold must be a number"),
        ({**FIRST, "rollout_is_threshold": True}, TypeError, "bool"),
        ({**FIRST, "rollout_is_mode": "mask", "rollout_is_threshold_lower": 3.0}, ValueError, "swap them"),
        ({**FIRST, "rollout_is_mode": "mask", "rollout_is_threshold_lower": -1.0}, ValueError, "must be > 0"),
        ({**SECOND, "use_pure_rollout_correction": True}, ValueError, "needs bypass_old_logprob_for_rollout: true"),
        ({**SECOND, "bypass_old_logprob_for_rollout": "yes"}, TypeError, "True or False"),
        (
            {"rollout_is_threshold": None, "rollout_rs": "token", "rollout_rs_threshold": None},
            ValueError,
            "both are null",
        ),
        ({"loss_type": "reinforce"}, ValueError, "bypass_mode=True"),
        ({"algorithm": ["rollout_is"]}, TypeError, "algorithm must be a mapping"),
        ([1, 2], TypeError, "the configuration must be a mapping"),
    ],
)
def test_bad_options_say_what_is_wrong(options, error, message):
    with pytest.raises(error) as caught:
        convert(options)
    assert message in str(caught.value)


def verl_file(**rollout):
    return {"algorithm": {"rollout_correction": {"rollout_is": "token"}}, "actor_rollout_ref": {"rollout": rollout}}


def test_unrecorded_log_probs_beside_a_correction_are_an_error_that_names_the_option():
    with pytest.raises(ValueError, match=r"actor_rollout_ref\.rollout\.calculate_log_probs is false"):
        convert(verl_file(calculate_log_probs=False))
    off = {"algorithm": {"rollout_correction": None}, "actor_rollout_ref": {"rollout": {"calculate_log_probs": False}}}
    assert convert(off).config is None


def test_unset_log_prob_recording_is_noted():
    assert any("calculate_log_probs is not set" in note for note in convert(verl_file(temperature=1.0)).notes)


def test_the_rollout_section_becomes_a_sampling_spec():
    conversion = convert(
        verl_file(
            name="vllm",
            calculate_log_probs=True,
            temperature=0.7,
            top_p=0.9,
            top_k=20,
            n=8,
            engine_kwargs={"vllm": {"logprobs_mode": "processed_logprobs"}, "sglang": None},
        )
    )
    assert conversion.sampling == SamplingSpec(
        temperature=0.7, top_p=0.9, top_k=20, logprobs="processed", engine="vllm"
    )
    assert conversion.notes == ()
    assert ("actor_rollout_ref.rollout.logprobs_mode", "sampling.logprobs: processed") in became(conversion)


def test_engine_kwargs_go_over_the_rollout_sections_own_mode():
    rollout = {"logprobs_mode": "processed_logprobs", "calculate_log_probs": True}
    assert convert(verl_file(**rollout)).sampling.logprobs == "processed"
    rollout["engine_kwargs"] = {"vllm": {"logprobs_mode": "raw_logprobs"}}
    assert convert(verl_file(**rollout)).sampling.logprobs == "raw"


def test_sampling_edge_values_are_read_as_their_engines_mean_them():
    conversion = convert(verl_file(name="???", top_k=0, top_p=1, calculate_log_probs=True))
    assert conversion.sampling == SamplingSpec()
    assert convert({"rollout_is": "token"}).sampling is None


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"logprobs_mode": "raw_logits"}, "logits are no log-probs"),
        ({"temperature": -1.0}, "actor_rollout_ref.rollout: temperature"),
        ({"calculate_logprobs": True}, "Did you mean 'calculate_log_probs'?"),
    ],
)
def test_a_bad_rollout_section_is_refused(rollout, message):
    with pytest.raises(ValueError) as caught:
        convert(verl_file(**rollout))
    assert message in str(caught.value)


def test_an_undeclared_logprobs_mode_is_noted_when_it_matters():
    notes = convert(verl_file(temperature=0.7, calculate_log_probs=True)).notes
    assert "does not set logprobs_mode" in notes[0]
    assert convert(verl_file(temperature=1.0, calculate_log_probs=True)).notes == ()


def test_a_section_may_be_a_presets_name():
    conversion = convert({"algorithm": {"rollout_correction": "decoupled_k3_rs"}})
    assert conversion.config == RolloutCorrectionConfig.decoupled_k3_rs()


def test_resolve_takes_configurations_names_and_options_of_any_generation():
    config = RolloutCorrectionConfig.token_is()
    assert resolve(config) is config
    assert resolve("token_is") == resolve({"rollout_is": "token"}) == resolve(FIRST) == config
    assert resolve({**FIRST, "rollout_is_threshold": None}) is None
    assert resolve(None) is None
    with pytest.raises(TypeError, match="got 3 of type int"):
        resolve(3)


def test_omegaconf_mappings_are_read_like_plain_ones():
    omegaconf = pytest.importorskip("omegaconf", reason="omegaconf comes with the extra 'train'")
    raw = verl_file(calculate_log_probs=True, temperature=0.7, logprobs_mode="raw_logprobs")
    assert convert(omegaconf.OmegaConf.create(raw)) == convert(raw)


def test_a_converted_document_keeps_the_rest_and_reads_as_newest():
    raw = {"algorithm": {"gamma": 1.0, **FIRST}, "trainer": {"steps": 3}}
    new = converted_document(raw, convert(raw))
    assert new["trainer"] == {"steps": 3}
    assert new["algorithm"].keys() == {"gamma", "rollout_correction"}
    assert convert(new).config == convert(raw).config
    assert convert(new).schema == "newest"
    assert raw["algorithm"].keys() == {"gamma", *FIRST}


def test_a_section_says_verls_seven_options_and_what_differs_of_ours():
    raw = {"rollout_is": "token", "normalizer": "original"}
    section = converted_document(raw, convert(raw))["algorithm"]["rollout_correction"]
    assert list(section)[:7] == list(RolloutCorrectionConfig().to_dict())[:7]
    assert set(list(section)[7:]) == {"normalizer"}


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_every_example_configuration_is_read_as_its_folder_says(path):
    conversion = convert(load_yaml(path.read_text(encoding="utf-8")))
    newest = path.name.endswith(".newest.yaml") or path.parent.name in ("newest", "diffusion")
    assert conversion.schema == ("newest" if newest else path.parent.name)
    assert (conversion.config is None) == path.name.startswith("off.")


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in sorted(EXAMPLES.rglob("*.yaml"))
        if path.parent.name.startswith("2025") and path.stem.isidentifier()
    ],
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_every_older_example_lies_beside_its_newest_form(path):
    raw = load_yaml(path.read_text(encoding="utf-8"))
    new = load_yaml(path.with_suffix(".newest.yaml").read_text(encoding="utf-8"))
    assert new == converted_document(raw, convert(raw))


def test_the_examples_are_there():
    assert len(list(EXAMPLES.rglob("*.yaml"))) >= 50


def yaml_pairs():
    page = (ROOT / "docs" / "coming_from" / "migration.md").read_text(encoding="utf-8")
    blocks = [load_yaml(block) for block in re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)]
    return list(zip(blocks[::2], blocks[1::2], strict=True))


def test_the_migration_page_inverts_verls_band_as_the_note_says():
    before, after = yaml_pairs()[0]
    (note,) = convert(before).notes
    assert after["algorithm"]["rollout_correction"]["rollout_rs_threshold"] in note
