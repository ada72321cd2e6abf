"""Without the libraries of the extras the package imports, trains and samples, and what needs one says so at once."""

from __future__ import annotations

import json

import pytest
from conftest import FIXTURES, run_python

from tokendrift_hf.extras import need

# Finders that see none of the extras' libraries, as where they are not installed.
WITHOUT = """
    import sys
    ABSENT = {"evaluate", "peft", "matplotlib", "gradio", "lm_eval", "mauve"}

    class Without:
        def __init__(self, finder):
            self.finder = finder

        def find_spec(self, name, path=None, target=None):
            return None if name.partition(".")[0] in ABSENT else self.finder.find_spec(name, path, target)

        def __getattr__(self, name):
            return getattr(self.finder, name)

    sys.meta_path[:] = map(Without, sys.meta_path)
    sys.path.insert(0, TESTS)
"""

WORK = """
    import importlib, json, pkgutil
    from pathlib import Path

    import tokendrift_hf
    from toys import make_trainer
    from tokendrift_hf.cli import main
    from tokendrift_hf.models.lora import lora_config
    from tokendrift_hf.models.loading import load_model

    done, here = {}, Path.cwd()

    def attempt(name, call):
        try:
            done[name] = str(call())
        except (ImportError, ValueError) as error:
            done[name] = f"{type(error).__name__}: {error}"

    for module in pkgutil.walk_packages(tokendrift_hf.__path__, "tokendrift_hf.", onerror=lambda name: None):
        attempt(module.name, lambda: importlib.import_module(module.name).__name__)

    trainer = make_trainer(here / "run", save_strategy="steps", save_steps=2)
    done["steps"] = trainer.train().global_step
    done["samples"] = list(trainer.model.generate(num_samples=2, num_steps=1, seed=0).shape)
    done["resumed"] = make_trainer(here / "run", max_steps=4).train(resume_from_checkpoint=True).global_step

    attempt("GenPPL", lambda: tokendrift_hf.GenPPL)
    attempt("lora_config", lora_config)
    attempt("peft_config", lambda: make_trainer(here / "adapted", arguments={"peft_config": object()}))
    attempt("monitor", lambda: make_trainer(here / "watched", gen_ppl_num_steps=[1]))
    (here / "adapters").mkdir()
    (here / "adapters/adapter_config.json").write_text('{"base_model_name_or_path": "run"}')
    attempt("adapters", lambda: load_model("adapters"))

    def command(*words):
        done[" ".join(words[:2])] = main(list(words))

    (here / "r.yaml").write_text(f"model: {TEXT}/base\\ndataset: {TEXT}/corpus.jsonl\\nmax_steps: 1\\nuse_cpu: true\\n")
    command("train", "r.yaml", "--judge", "null", "--output_dir", "plain")
    command("generate", f"{TEXT}/base", "--num_steps", "1")
    scored = ["--judge", f"{TEXT}/judge", "--num_samples", "2", "--num_seeds", "1", "--num_steps", "1"]
    for library in (None, "evaluate"):
        ABSENT.discard(library)
        for words in (["train", "r.yaml", "--output_dir", "scored"], ["evaluate", f"{TEXT}/base"]):
            print("==", words[0], "with", library, file=sys.stderr)
            assert main([*words, *scored]) == 2
    print("== lora", file=sys.stderr)
    assert main(["train", "r.yaml", "--lora", "{r: 2}", "--output_dir", "adapted"]) == 2
    print("== tasks", file=sys.stderr)
    assert main(["train", "r.yaml", "--tasks", "[gsm8k]", "--output_dir", "asked"]) == 2
    print("== demo", file=sys.stderr)
    assert main(["demo", f"{TEXT}/base"]) == 2
    done["written"] = sorted(path.name for path in here.iterdir())
    print("DONE " + json.dumps(done))
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory, text_files) -> str:
    places = f"TESTS, TEXT = {str(FIXTURES.parent)!r}, {str(text_files)!r}"
    code = "\n".join([places, *(_dedented(part) for part in (WITHOUT, WORK))])
    return run_python(code, tmp_path_factory.mktemp("bare"), isolated=False)


def _dedented(text: str) -> str:
    return "\n".join(line.removeprefix("    ") for line in text.splitlines())


@pytest.fixture(scope="module")
def done(output) -> dict:
    return json.loads(next(line for line in output.splitlines() if line.startswith("DONE ")).removeprefix("DONE "))


def test_all_modules_but_those_of_metric_and_page_are_imported(done):
    refused = {name for name, what in done.items() if name.startswith("tokendrift_hf.") and what != name}
    need_extras = {"metrics.gen_ppl", "demo.page", "demo.serving", "evaluation.lm_harness"}
    assert refused == {f"tokendrift_hf.{name}" for name in need_extras}


def test_it_trains_samples_and_resumes(done):
    assert (done["steps"], done["samples"], done["resumed"]) == (3, [2, 16], 4)


def test_the_commands_that_need_none_of_them_work(done):
    assert done["train r.yaml"] == 0
    assert [status for name, status in done.items() if name.startswith("generate ")] == [0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("GenPPL", 'Gen.-PPL needs evaluate: pip install "tokendrift-hf[eval]".'),
        ("lora_config", 'LoRA needs peft: pip install "tokendrift-hf[peft]".'),
        ("peft_config", 'A peft_config needs peft: pip install "tokendrift-hf[peft]".'),
        ("monitor", 'dynamics.png needs matplotlib: pip install "tokendrift-hf[eval]".'),
        ("adapters", 'adapters holds LoRA adapters, and loading them needs peft: pip install "tokendrift-hf[peft]".'),
        ("tokendrift_hf.evaluation.lm_harness", 'Tasks need lm_eval: pip install "tokendrift-hf[tasks]".'),
        ("tokendrift_hf.demo.page", 'The demo needs gradio: pip install "tokendrift-hf[demo]".'),
    ],
)
def test_what_needs_one_says_which_and_how_to_get_it(done, name, message):
    assert done[name] == f"ImportError: {message}"


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("train with None", 'tokendrift train: Gen.-PPL needs evaluate: pip install "tokendrift-hf[eval]".'),
        ("evaluate with None", 'tokendrift evaluate: plot.png needs matplotlib: pip install "tokendrift-hf[eval]".'),
        ("train with evaluate", 'tokendrift train: plot.png needs matplotlib: pip install "tokendrift-hf[eval]".'),
        (
            "evaluate with evaluate",
            'tokendrift evaluate: plot.png needs matplotlib: pip install "tokendrift-hf[eval]".',
        ),
        ("tasks", 'tokendrift train: The field tasks needs lm_eval: pip install "tokendrift-hf[tasks]".'),
        ("lora", 'tokendrift train: LoRA needs peft: pip install "tokendrift-hf[peft]".'),
        ("demo", 'tokendrift demo: The demo needs gradio: pip install "tokendrift-hf[demo]".'),
    ],
)
def test_commands_are_refused_before_any_work(output, done, part, message):
    said = output.partition(f"== {part}\n")[2].partition("\n==")[0]
    assert message in said.splitlines()
    assert set(done["written"]) - {"hf", "watched"} == {"adapters", "plain", "r.yaml", "run"}


def test_need_names_what_is_missing():
    need("json", "x", "This")
    with pytest.raises(ImportError, match=r'^This needs no_such_library: pip install "tokendrift-hf\[x\]".$'):
        need("no_such_library", "x", "This")
