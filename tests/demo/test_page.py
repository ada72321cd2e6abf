"""The page without a browser: what its buttons send, and what the server gives away."""

from __future__ import annotations

import json
import re
import socket
import threading
import urllib.error
import urllib.request

import pytest
import torch
from conftest import tiny_model

from tokendrift_hf.demo.columns import ALONE, BASE, REFINED, Columns
from tokendrift_hf.demo.page import FAILED, Page
from tokendrift_hf.demo.request import Request

NAMES = {BASE: "owner/base", REFINED: "owner/refined", ALONE: "owner/model"}


@pytest.fixture(scope="module")
def page(text_model) -> Page:
    base, tokenizer = text_model
    refined = tiny_model("mdlm", seed=1, vocab_size=base.config.vocab_size, num_hidden_layers=3)
    return Page(Columns({BASE: base, REFINED: refined}, tokenizer), NAMES)


def write(page: Page, prompt="", samples=1, steps=3, temperature=1, seed=0, sampler="ancestral", last=None):
    return list(page.write(prompt, samples, steps, temperature, seed, sampler, last, []))


def state(page: Page, updates: list[dict]) -> dict:
    """What the components show after all updates."""
    shown = {key: value for update in updates for key, value in update.items()}
    buttons = {name: shown[getattr(page, name)]["interactive"] for name in ("start", "stop", "match")}
    return buttons | {"status": re.sub("<.*?>", "", shown[page.status]), "alert": "alert" in shown[page.status]}


def test_while_writing_only_stop_can_be_pressed_and_afterwards_the_others(page):
    updates = write(page)
    assert state(page, updates[:1]) == {
        "start": False,
        "stop": True,
        "match": False,
        "status": "Writing …",
        "alert": False,
    }
    assert state(page, updates) == {"start": True, "stop": False, "match": True, "status": "Done.", "alert": False}
    assert len(updates) > 2 + 2 * 3, "a draft a step and column"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"steps": 65}, "steps = 65. Give a whole number from 1 to 64."),
        ({"steps": 0}, "steps = 0. Give a whole number from 1 to 64."),
        ({"samples": 100}, "texts = 100. Give a whole number from 1 to 4."),
        ({"seed": "no"}, "seed = no. Give a whole number from 0 to 4294967295."),
        ({"steps": None}, "steps is empty. Give a whole number from 1 to 64."),
        ({"sampler": "greedy"}, "sampler = greedy. Give one of ancestral, psi"),
        ({"prompt": "of " * 99}, "Shorten it."),
    ],
    ids=str,
)
def test_an_impossible_request_that_passes_by_the_sliders_is_a_sentence(page, asked, message):
    shown = state(page, write(page, **asked))
    assert message in shown["status"] and shown["alert"]
    assert shown["start"] and not shown["stop"] and not shown["match"]
    last = (Request(), {BASE: 1.0, REFINED: 1.0})
    assert state(page, write(page, **asked, last=last))["match"], "what was written before is still there"


def test_a_failure_is_logged_and_not_shown(page, monkeypatch, caplog):
    def broken(request):
        raise RuntimeError("details")

    monkeypatch.setattr(page.columns, "write", broken)
    shown = state(page, write(page))
    assert shown["status"] == FAILED and shown["start"]
    assert "details" in caplog.text


def test_a_model_that_fails_in_the_middle_ends_both_columns(page, monkeypatch):
    """What it has written stays, no thread is left behind, and the next request is written as ever."""
    model, calls, before = page.columns.models[REFINED], [], threading.active_count()
    forward = model.forward

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", failing)
    updates = write(page, steps=8)
    shown = state(page, updates)
    assert shown["status"] == FAILED and shown["start"] and not shown["stop"] and not shown["match"]
    assert any(page.shown[REFINED] in update for update in updates), "drafts"
    assert not any(page.last in update for update in updates), "nothing to match"
    assert threading.active_count() == before
    monkeypatch.undo()
    assert state(page, write(page))["status"] == "Done."


def test_what_was_written_is_the_next_steps_state_and_no_attribute_of_the_page(page):
    """The button for equal entropy works on this visitor's last text, and the page remembers none."""
    before = dict(vars(page))
    request, entropies = write(page, prompt="of the", seed=4)[-1][page.last]
    assert request == Request("of the", 1, 3, 1, 4, "ancestral")
    assert set(entropies) == {BASE, REFINED} and all(h > 0 for h in entropies.values())
    assert vars(page) == before
    again = list(page.write_matched((request, entropies), []))
    assert page.shown[BASE] in again[-2] and all(page.shown[REFINED] not in update for update in again)
    assert page.last not in again[-1], "the refined text still belongs to the same request"


def test_a_visitor_whom_the_server_has_forgotten_is_told_to_write_again(page):
    shown = state(page, list(page.write_matched(None, [])))
    assert shown["status"] == "There is no text of yours any more. Write again first."
    assert shown["start"] and not shown["match"]


def test_one_model_alone_has_one_column(text_model):
    page = Page(Columns({ALONE: text_model[0]}, text_model[1]), NAMES)
    updates = write(page)
    assert list(page.shown) == [ALONE] and page.shown[ALONE] in updates[-2]
    assert not hasattr(page, "match")


@pytest.fixture(scope="module")
def url(page):
    yield page.launch("127.0.0.1", None)
    page.blocks.close()


def test_the_server_gives_away_no_more_than_the_page(page, url):
    """No telemetry, no recording, no public endpoint, no upload, no way past the queue; the loopback alone."""
    config = json.loads(urllib.request.urlopen(f"{url}config").read())
    assert config["analytics_enabled"] is False and config["space_id"] is None
    assert all(event["api_visibility"] == "private" for event in config["dependencies"])
    assert page.blocks.share_url is None and page.blocks.run_history is False
    body = (
        b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\n' + b"a" * 100 + b"\r\n--x--\r\n"
    )
    upload = urllib.request.Request(
        f"{url}gradio_api/upload", body, {"Content-Type": "multipart/form-data; boundary=x"}
    )
    with pytest.raises(urllib.error.HTTPError, match="413"):
        urllib.request.urlopen(upload)
    data = {"data": ["", 1, 2, 1, 0, "ancestral", None, None], "fn_index": 0}
    past_the_queue = urllib.request.Request(
        f"{url}gradio_api/run/write", json.dumps(data).encode(), {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(past_the_queue)
    assert page.blocks.server_name == "127.0.0.1"
    others = {entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
    for address in others:
        with pytest.raises(OSError):
            socket.create_connection((address, page.blocks.server_port), timeout=2)


def test_texts_leave_the_global_generator_alone(page):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    write(page)
    assert torch.equal(torch.get_rng_state(), before)
