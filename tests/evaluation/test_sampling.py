"""The grid of an evaluation checks itself, and a recipe and the command line fill it alike."""

from __future__ import annotations

import argparse

import pytest

from tokendrift_hf.cli.fields import add_options, from_options
from tokendrift_hf.cli.recipe import read_recipe
from tokendrift_hf.evaluation import sampling
from tokendrift_hf.evaluation.sampling import Sampling
from tokendrift_hf.hub import settings_tokendrift
from tokendrift_hf.hub.samplers_tokendrift import SAMPLERS


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_steps", [4, 0], "num_steps=.* whole numbers of at least 1"),
        ("num_steps", [10**9], "num_steps=.* whole numbers of at least 1, at most 1000000"),
        ("num_steps", [], "one or more"),
        ("num_steps", 4, "one or more"),
        ("num_steps", [2.5], "whole numbers"),
        ("num_steps", [True], "whole numbers"),
        ("num_steps", [4, 4], "there twice"),
        ("temperatures", [1.0, -0.1], "sampling_temperatures=.* at least 0"),
        ("temperatures", [float("nan")], "finite"),
        ("temperatures", [float("inf")], "finite"),
        ("temperatures", [1, 1.0], "there twice"),
        ("num_seeds", 0, "num_seeds=0: it must be a whole number of at least 1"),
        ("num_seeds", True, "num_seeds=True"),
        ("num_samples", 2.0, "num_samples=2.0"),
        ("batch_size", None, "sampling_batch_size=None"),
        ("sampler", 3, "sampler=3"),
        ("dtype", "float16", "sampling_dtype='float16' is not known"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_under_the_name_that_users_gave(field, value, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**{field: value})


def test_recipe_and_command_line_fill_it_with_the_same_names_and_defaults(tmp_path):
    given = {"num_steps": "2 4", "sampling_temperatures": "0.5 1", "num_seeds": "2", "num_samples": "5"}
    given |= {"sampler": "confidence", "sampling_batch_size": "3", "sampling_dtype": "bfloat16"}
    path, parser = tmp_path / "recipe.yaml", argparse.ArgumentParser()
    add_options(parser, Sampling)
    for names in ([], list(given)[:3], list(given)):
        lines = [f"{n}: [{given[n].replace(' ', ', ')}]" if " " in given[n] else f"{n}: {given[n]}" for n in names]
        path.write_text("\n".join(["model: x", *lines]))
        flags = [word for name in names for word in (f"--{name}", *given[name].split())]
        dashed = [word.replace("_", "-") if word.startswith("--") else word for word in flags]
        of_recipe = read_recipe(path, {})[0].sampling
        assert of_recipe == from_options(Sampling, parser.parse_args(flags))
        assert of_recipe == from_options(Sampling, parser.parse_args(dashed))
    assert of_recipe == Sampling([2, 4], [0.5, 1.0], 2, 5, "confidence", 3, "bfloat16")


def test_an_evaluation_allows_as_many_steps_as_generate():
    assert sampling.MOST_STEPS == settings_tokendrift.MOST_STEPS


def test_every_sampler_with_steps_can_be_compared_and_no_other():
    for name, sampler in SAMPLERS.items():
        if "num_steps" in sampler.unused:
            with pytest.raises(ValueError, match=f"sampler='{name}' .* has no steps"):
                Sampling(sampler=name).check_steps()
        else:
            Sampling(sampler=name).check_steps()
