"""lm-evaluation-harness on diffusion models, on a small local task."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import tiny_model
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from stand_ins import MASK, SEP, SPECIAL, V, decoder, masked_lm, tiny_tokenizer, write_tasks

from tokendrift_hf import as_diffusion
from tokendrift_hf.evaluation.lm_harness import DiffusionLM, evaluate_tasks, find_tasks


def bert():
    return as_diffusion(masked_lm("bert"), **SPECIAL)


def qwen():
    return as_diffusion(decoder("qwen3"), tokenizer=tiny_tokenizer())


def asked(kind: str, *pairs) -> list[Instance]:
    return [Instance(kind, {}, pair, i) for i, pair in enumerate(pairs)]


def exact(own, before: list[int], after: list[int], tail: list[int]) -> float:
    """Minus the NELBO in full, for a continuation of one token: t cancels, and -log p remains."""
    (token,) = after
    with torch.no_grad():
        logits = own(input_ids=torch.tensor([[*before, MASK, *tail]])).logits[0, len(before)]
    return float(logits[4:].double().log_softmax(-1)[token - 4])


def test_the_likelihood_of_one_token_is_that_of_the_familys_model():
    """One draw is enough: a single asked token is always the masked one."""
    model = DiffusionLM(bert(), tiny_tokenizer(), num_draws=1, seed=3)
    ((value, _),) = model.loglikelihood(asked("loglikelihood", ("w5 w6", " w9")))
    assert value == pytest.approx(exact(masked_lm("bert"), [1, 5, 6], [9], [SEP]), rel=1e-5)


def test_the_likelihood_of_two_tokens_is_the_mean_over_all_masks():
    """Both masked half the time, then both surprises; else one of the two, twice its surprise."""
    own = masked_lm("bert")

    def surprises(masked):
        ids = torch.tensor([[1, 5, 9, 10, SEP]])
        ids[0, masked] = MASK
        with torch.no_grad():
            log_p = own(input_ids=ids).logits[0, :, 4:].double().log_softmax(-1)
        return sum(-float(log_p[i, {2: 9, 3: 10}[i] - 4]) for i in masked)

    nelbo = 0.5 * surprises([2, 3]) + 0.25 * (2 * surprises([2]) + 2 * surprises([3]))
    model = DiffusionLM(bert(), tiny_tokenizer(), num_draws=400)
    ((value, _),) = model.loglikelihood(asked("loglikelihood", ("w5", " w9 w10")))
    assert value == pytest.approx(-nelbo, rel=0.02)


def test_a_uniform_model_is_scored_at_times():
    model = tiny_model("duo", vocab_size=V)
    ((value, greedy),) = DiffusionLM(model, tiny_tokenizer(), num_draws=8).loglikelihood(
        asked("loglikelihood", ("w5", " w9 w10"))
    )
    assert value < 0 and math.isfinite(value) and greedy is False


def test_a_model_that_knows_nothing_gives_every_token_alike():
    model = bert()
    with torch.no_grad():
        for parameter in model.cls.predictions.parameters():
            parameter.zero_()
    harness = DiffusionLM(model, tiny_tokenizer(), num_draws=1)
    ((value, _),) = harness.loglikelihood(asked("loglikelihood", ("w5", " w6 w7 w8")))
    assert value == pytest.approx(-3 * math.log(V - 4), rel=1e-5)


def test_likelihoods_do_not_depend_on_the_batch():
    pairs = [("w5 w6", " w9"), ("w7", " w8 w9 w10"), ("", " w5")]
    harnesses = (DiffusionLM(bert(), tiny_tokenizer(), num_draws=4, batch_size=size) for size in (1, 3))
    one, many = (harness.loglikelihood(asked("loglikelihood", *pairs)) for harness in harnesses)
    assert [value for value, _ in one] == pytest.approx([value for value, _ in many], rel=1e-4)
    assert [greedy for _, greedy in one] == [greedy for _, greedy in many]


def test_greedy_is_what_one_step_gives():
    model = bert()
    with torch.no_grad():
        best = int(model(input_ids=torch.tensor([[1, 5, MASK, SEP]])).logits[0, 2].argmax())
    pairs = [("w5", f" w{best}"), ("w5", f" w{4 if best != 4 else 5}")]
    answers = DiffusionLM(model, tiny_tokenizer(), num_draws=1).loglikelihood(asked("loglikelihood", *pairs))
    assert [greedy for _, greedy in answers] == [True, False]


def test_a_context_that_is_too_long_loses_its_beginning():
    long = " ".join(["w5"] * 40)
    ((value, _),) = DiffusionLM(bert(), tiny_tokenizer(), num_draws=1).loglikelihood(
        asked("loglikelihood", (long, " w9"))
    )
    assert math.isfinite(value)


def test_a_long_text_is_scored_in_windows():
    model = DiffusionLM(bert(), tiny_tokenizer(), num_draws=2)
    text = " ".join(f"w{4 + i % 20}" for i in range(30))
    (value,) = model.loglikelihood_rolling(asked("loglikelihood_rolling", (text,)))
    assert value < 0 and math.isfinite(value)


def test_answers_are_those_of_generate_and_end_at_the_wished_string():
    model = qwen()
    harness = DiffusionLM(model, tiny_tokenizer(), num_steps=4, seed=1, batch_size=2)
    wishes = {"until": ["w8"], "max_gen_toks": 6}
    answers = harness.generate_until(asked("generate_until", ("w5 w6", wishes), ("w9", wishes), ("w10 w11", wishes)))
    settings = {"max_new_tokens": 6, "num_steps": 4, "trim_eos": True, "eos_token_id": SEP}
    for place, (context, answer) in enumerate(zip(([5, 6], [9], [10, 11]), answers, strict=True)):
        generator = torch.Generator().manual_seed(2**32 + place)
        ids = torch.tensor([[1, *context]])
        whole = model.generate(ids, generator=generator, **settings)[0, ids.shape[1] :]
        text = tiny_tokenizer().decode(whole, skip_special_tokens=True)
        assert answer == text.split("w8")[0]
    assert 0 < harness.tokens_per_forward <= 6


def test_an_answer_leaves_half_of_the_length_to_its_context_and_a_cut_is_said(caplog):
    harness = DiffusionLM(qwen(), tiny_tokenizer(), num_steps=1)
    wishes = {"until": [], "max_gen_toks": 100}
    (answer,) = harness.generate_until(asked("generate_until", (" ".join(["w5"] * 9), wishes)))
    assert 0 < len(answer.split()) <= harness.model.longest // 2
    message = "A context of 9 tokens loses its beginning: with 8 for the answer, the model takes 7."
    assert message in [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("fields", [{"num_draws": 0}, {"batch_size": 2.5}, {"max_new_tokens": -1}])
def test_impossible_settings_are_refused(fields):
    with pytest.raises(ValueError, match="it must be a whole number of at least 1"):
        DiffusionLM(bert(), tiny_tokenizer(), **fields)


def test_tasks_are_evaluated_offline(tmp_path, monkeypatch):
    """Accuracy, with the tokens per network call where answers were written; the best choice is the likelier one."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # runs pip, for seconds
    write_tasks(tmp_path)
    names, model = ["tiny_choice", "tiny_free"], qwen()
    harness = DiffusionLM(model, tiny_tokenizer(), num_draws=1, num_steps=1)
    results = evaluate_tasks(harness, names, task_manager=find_tasks(names, str(tmp_path)))
    right = 0
    for i in (5, 6, 7):  # the question is "wi wj" with j = i + 1, the choices are "wk" with k = i + 2, and "w4"
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[1, i, i + 1, MASK]])).logits[0, -1]
        right += bool(logits[i + 2] > logits[4])
    assert results["tiny_choice"]["acc,none"] == pytest.approx(right / 3)
    assert "tokens_per_forward" not in results["tiny_choice"]
    assert 0 <= results["tiny_free"]["exact_match,none"] <= 1
    assert results["tiny_free"]["tokens_per_forward"] == 1


def test_a_folder_with_all_tasks_is_indexed_alone(tmp_path):
    write_tasks(tmp_path)
    assert find_tasks(["tiny_free"], str(tmp_path)).all_tasks == ["tiny_choice", "tiny_free"]


def test_a_task_that_nobody_has_is_refused(tmp_path, monkeypatch):
    write_tasks(tmp_path)
    monkeypatch.setattr(
        "tokendrift_hf.evaluation.lm_harness.TaskManager",
        lambda include_path, **_: TaskManager(include_path=include_path, include_defaults=False),
    )
    with pytest.raises(ValueError, match="have no task tiny_fre. `lm_eval ls tasks` lists"):
        find_tasks(["tiny_free", "tiny_fre"], str(tmp_path))
