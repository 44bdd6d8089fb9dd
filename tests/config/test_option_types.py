"""The stub of presets and options, which type checkers read, equals the configuration."""

import ast
import dataclasses
import inspect
from pathlib import Path

import rollcorr.config.option_types as module
from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.presets import PRESETS

STUB = ast.parse(Path(module.__file__).with_suffix(".pyi").read_text(encoding="ascii"))
CLASSES = {node.name: node.body for node in STUB.body if isinstance(node, ast.ClassDef)}


def keys(name):
    return [node.target.id for node in CLASSES[name]]


def test_options_are_the_fields():
    fields = [field.name for field in dataclasses.fields(RolloutCorrectionConfig)]
    assert keys("CorrectionOptions") + keys("ConfigOptions") == fields


def test_names_are_those_of_the_table():
    (names,) = [node.value for node in STUB.body if isinstance(node, ast.AnnAssign)]
    assert ast.literal_eval(names.slice) == tuple(PRESETS)


def test_constructors_have_the_arguments_and_defaults_of_the_table():
    found = {node.name: node.args for node in CLASSES["NamedPresets"]}
    assert list(found) == list(PRESETS)
    for name, arguments in found.items():
        expected = inspect.signature(getattr(RolloutCorrectionConfig, name)).parameters
        assert [argument.arg for argument in arguments.args] == ["cls", *expected]
        assert [ast.literal_eval(value) for value in arguments.defaults] == [one.default for one in expected.values()]
