"""The page in a real browser, as visitors use it: headless Chromium against a server in this process.

`SCREENSHOT=recipes/quickstart/demo.png python -m pytest tests/demo/test_browser.py -k quickstart` makes the picture of
the README, with `out/quickstart/refined` where there is one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest
from conftest import tiny_model
from toys import record, results

from tokendrift_hf.cli.demo import quickstart
from tokendrift_hf.demo import page as pages
from tokendrift_hf.demo.columns import BASE, REFINED
from tokendrift_hf.demo.request import Request
from tokendrift_hf.demo.serving import make_page

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Without the background requests that a browser makes for itself, so that every request is the page's.
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync""".split()
WINDOW = {"width": 1280, "height": 900}
PATIENCE = 60_000  # milliseconds: other work may keep the cores busy
# Collects what the columns show, one entry a change.
OBSERVE = """
window.drafts = {};
for (const side of ["base", "refined", "model"]) {
  const column = document.getElementById(side);
  if (!column) continue;
  const drafts = window.drafts[side] = [];
  const note = () => {
    const texts = [...column.querySelectorAll(".td-text")].map(text => text.innerText);
    if (texts.join() !== (drafts.at(-1) || []).join()) drafts.push(texts);
  };
  new MutationObserver(note).observe(column, {childList: true, subtree: true, characterData: true});
}
"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no browser: apt-get install chromium")


class Watched:
    """The columns of a page with a record of what was asked of them and how far each run came."""

    def __init__(self, columns):
        self.columns, self.asked, self.steps, self.ended = columns, [], [], []
        self.write_really, columns.write = columns.write, self.write

    def write(self, request: Request):
        self.asked.append(request)
        self.steps.append(0)
        run = self.write_really(request)
        try:
            for columns in run:
                self.steps[-1] += 1
                yield columns
        finally:
            run.close()
            self.ended.append(request)


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def site(text_files, text_model, tmp_path_factory):
    """The page of two tiny models with judge and results; `site.url`, `site.watched`."""
    folder = tmp_path_factory.mktemp("demo")
    refined = tiny_model("mdlm", seed=1, vocab_size=text_model[0].config.vocab_size, num_hidden_layers=3)
    refined.save_pretrained(folder / "refined")
    text_model[1].save_pretrained(folder / "refined")
    records = [
        record(model, 0, 100.0 * t, 2 * t, temperature=t) for model in ("base", "TokenDrift") for t in (0.8, 1.0)
    ]
    (folder / "results.json").write_text(json.dumps(results(records)))
    page = make_page(str(folder / "refined"), str(text_files / "base"), judge=str(text_files / "judge"))
    page.watched = Watched(page.columns)
    page.url = page.launch("127.0.0.1", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "PAUSE", 0)
        yield page
    page.blocks.close()


@pytest.fixture
def slowly(monkeypatch):
    """Every step takes half a second, until the test calls `slowly()`: a run lasts as long as it is looked at."""
    monkeypatch.setattr(pages, "PAUSE", 0.5)
    monkeypatch.setattr(pages, "PAUSES", 999)
    return monkeypatch.undo


class Visitor:
    """A browser of its own on the page."""

    def __init__(self, browser, url: str):
        self.context = browser.new_context(viewport=WINDOW)
        self.context.set_default_timeout(PATIENCE)
        self.tab = self.context.new_page()
        self.requests, self.errors = [], []
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.on("pageerror", lambda error: self.errors.append(str(error)))
        self.tab.goto(url)
        self.tab.locator("#write").wait_for()
        self.tab.wait_for_function(
            "document.querySelectorAll('#base, #refined').length == 2 || document.querySelector('#model')"
        )
        self.tab.evaluate(OBSERVE)

    def set(self, **values) -> None:
        """Type into the number boxes of the sliders."""
        for name, value in values.items():
            box = self.tab.locator(f"#{name} input[type=number]")
            box.fill(str(value))
            box.blur()

    def prompt(self, text: str) -> None:
        self.tab.locator("#prompt textarea").fill(text)

    def forget(self) -> None:
        """Clear what tells of the last run."""
        self.tab.evaluate("document.querySelector('#status p').textContent = ''")
        self.tab.evaluate("for (const drafts of Object.values(window.drafts)) drafts.length = 0")

    @property
    def sent(self) -> int:
        """How many requests to write the page has sent."""
        return sum("/queue/join" in url for url in self.requests)

    def write(self, until: str = "Done.") -> None:
        self.forget()
        self.tab.locator("#write").click()
        self.wait(until)

    def wait(self, status: str) -> None:
        self.tab.wait_for_function("text => document.querySelector('#status').innerText.includes(text)", arg=status)

    @property
    def status(self) -> str:
        return self.tab.locator("#status").inner_text().strip()

    def drafts(self, side: str) -> list[list[str]]:
        return self.tab.evaluate("side => window.drafts[side]", side)

    def figures(self, side: str) -> dict[str, str]:
        cells = self.tab.locator(f"#{side} .td-figures div")
        return dict(cell.split("\n") for cell in cells.all_inner_texts())


@pytest.fixture(scope="module")
def regular(browser, site):
    visitor = Visitor(browser, site.url)
    yield visitor
    visitor.context.close()


@pytest.fixture
def visitor(regular):
    """A visitor who was here before, with everything as at the start but for what was written last."""
    regular.tab.set_viewport_size(WINDOW)
    regular.tab.get_by_role("tab", name="Side by side").click()
    regular.set(steps=8, temperature=1, seed=0, texts=1)
    regular.prompt("")
    regular.forget()
    yield regular
    assert regular.errors == []


def test_at_the_start_there_is_nothing_to_stop_and_nothing_to_match(visitor):
    assert [visitor.tab.locator(f"#{name}").is_enabled() for name in ("write", "stop", "match")] == [True, False, False]


def test_nothing_is_fetched_from_elsewhere(visitor, site):
    """No font, no script, no count of visits: loaded, used, and every tab looked at, all requests are local."""
    visitor.write()
    for name in ("Models", "Frontier"):
        visitor.tab.get_by_role("tab", name=name).click()
    assert len(visitor.requests) > 20
    assert [url for url in visitor.requests if not url.startswith((site.url, "data:", "blob:"))] == []


def test_the_page_says_what_the_models_are_and_that_they_are_small(visitor):
    assert "small language model" in visitor.tab.locator("body").inner_text()
    visitor.tab.get_by_role("tab", name="Models").click()
    text = visitor.tab.get_by_role("tabpanel").filter(has_text="texts of at most 16 tokens").inner_text()
    assert "masked diffusion (MDLMForMaskedLM)" in text and "Do not rely on anything" in text
    assert re.search(r"A request may ask for 4 texts of 16 tokens in 64 steps", text)


def test_both_columns_write_step_by_step_what_the_sliders_say(visitor, site, slowly):
    """Drafts lose their masks before the reader's eyes, and the figures are those of generate()."""
    visitor.set(steps=5, seed=7, texts=2)
    slider = visitor.tab.locator("#temperature input[type=range]")
    slider.focus()
    for _ in range(10):
        slider.press("ArrowLeft")
    visitor.write()
    assert site.watched.asked[-1] == Request("", 2, 5, 0.9, 7, "ancestral")
    tokenizer = site.columns.tokenizer
    for side, title in (("base", BASE), ("refined", REFINED)):
        drafts = visitor.drafts(side)
        masks = [sum(text.count("░") for text in texts) for texts in drafts]
        assert len(drafts) >= 3 and masks == sorted(masks, reverse=True) and masks[0] > masks[-1] == 0, masks
        model = site.columns.models[title]
        output = model.generate(num_samples=2, num_steps=5, temperature=0.9, seed=7, return_dict_in_generate=True)
        shown = [re.sub(r"\s", "", re.sub(r"^\d", "", text)) for text in drafts[-1]]
        expected = [re.sub(r"\s", "", tokenizer.decode(row)) for row in output.sequences]
        assert [text.replace("\ufffd", "") for text in shown] == [text.replace("\ufffd", "") for text in expected]
        figures = visitor.figures(side)
        assert figures["T"] == "0.9" and figures["calls"] == str(output.num_forward_calls)
        assert float(figures["seconds"]) > 0 and float(figures["entropy"]) > 0
        assert float(figures["Gen.-PPL"].split(" ± ")[0]) > 1


def test_keyboard_alone_is_enough(visitor, site):
    """Tab to the prompt, type, Enter writes; every control can be reached in the order of the page."""
    visitor.tab.locator("#prompt textarea").focus()
    visitor.tab.keyboard.type("Return the")
    visitor.tab.keyboard.press("Enter")
    visitor.wait("Done.")
    assert site.watched.asked[-1].prompt == "Return the"
    assert "Return the" in visitor.drafts("refined")[-1][0]
    reached = []
    for _ in range(14):
        visitor.tab.keyboard.press("Tab")
        reached.append(visitor.tab.evaluate("document.activeElement.closest('[id]:not(input)')?.id"))
    order = [
        name for name in dict.fromkeys(reached) if name in ("steps", "temperature", "seed", "texts", "sampler", "write")
    ]
    assert order == ["steps", "temperature", "seed", "texts", "sampler", "write"]


def test_gaps_are_filled_and_the_prompt_is_marked(visitor):
    visitor.prompt("Return [gap 3] of")
    visitor.write()
    kept = visitor.tab.locator("#base .td-kept").all_inner_texts()
    assert kept[1:] == ["Return", " of"]
    assert visitor.drafts("base")[0][0].count("░") <= 3


def test_an_impossible_prompt_is_one_clear_sentence(visitor):
    for prompt, message in (
        ("of " * 40, "tokens of a text here and leaves nothing to write. Shorten it."),
        ("x" * 5000, "The prompt has 5000 characters"),
        ("of [gap 99]", "The prompt takes 101 of the 16 tokens"),
    ):
        visitor.prompt(prompt)
        visitor.write(until=message)
        assert visitor.tab.locator("#status [role=alert]").count() == 1
    visitor.prompt("")
    visitor.write()


def test_prompts_are_text_whatever_they_hold(visitor):
    """Neither HTML nor the templates of the page's own library."""
    hostile = "${7*7}{{x}}<b>"
    visitor.prompt(hostile)
    visitor.write()
    assert hostile in visitor.drafts("base")[-1][0]
    assert visitor.tab.locator("#base b").count() == 0


def test_a_typed_value_that_is_not_possible_is_named_and_stays_to_be_mended(visitor, site):
    """The sliders' number boxes would put the nearest limit in its place without a word."""
    before = len(site.watched.asked)
    for value, message in (("200", "steps = 200"), ("", "steps is empty"), ("8.5", "steps = 8.5")):
        visitor.set(steps=value)
        visitor.write(until=f"{message}. Give a whole number from 1 to 64.")
        assert visitor.tab.locator("#steps input[type=number]").input_value() == value
    assert site.watched.steps[before:] == [0, 0, 0], "nothing was written"
    visitor.set(steps=64)
    visitor.write()
    assert site.watched.asked[-1].num_steps == 64


@pytest.mark.parametrize("selectors", [("#write", "#write"), ("#write", "#match")], ids=" ".join)
def test_two_clicks_in_the_same_instant_write_once(visitor, selectors):
    """Before the page itself knows that a request is under way."""
    visitor.write()
    visitor.forget()
    before = visitor.sent
    visitor.tab.evaluate("buttons => buttons.forEach(name => document.querySelector(name).click())", selectors)
    visitor.wait("Done.")
    assert visitor.sent == before + 1


def test_a_second_click_while_the_first_runs_starts_nothing(visitor, site, slowly):
    before, asked = visitor.sent, len(site.watched.asked)
    visitor.tab.locator("#write").click(click_count=2, delay=50)
    visitor.wait("Writing")
    visitor.tab.wait_for_function("document.querySelector('#write').disabled")
    visitor.tab.locator("#prompt textarea").press("Enter")
    slowly()
    visitor.wait("Done.")
    assert visitor.sent == before + 1 and len(site.watched.asked) == asked + 1


def test_stop_ends_the_work(visitor, site, slowly):
    visitor.set(steps=64)
    visitor.tab.locator("#write").click()
    visitor.wait("Writing")
    visitor.tab.locator("#stop").click()
    visitor.wait("Stopped.")
    until(lambda: len(site.watched.ended) == len(site.watched.asked))
    assert site.watched.steps[-1] < 2 * 64
    slowly()
    visitor.set(steps=2)
    visitor.write()


def test_closing_the_tab_ends_the_work(browser, site, slowly):
    visitor = Visitor(browser, site.url)
    visitor.set(steps=64)
    visitor.tab.locator("#write").click()
    visitor.wait("Writing")
    visitor.context.close()
    until(lambda: len(site.watched.ended) == len(site.watched.asked))
    assert site.watched.steps[-1] < 2 * 64


def test_two_visitors_wait_for_each_other_and_see_their_own_text_alone(browser, visitor, site, slowly):
    second = Visitor(browser, site.url)
    visitor.prompt("Return the")
    second.prompt("If the value")
    visitor.tab.locator("#write").click()
    visitor.wait("Writing")
    second.tab.locator("#write").click()
    second.wait("queue: 1/1")
    assert second.tab.locator("#status .progress-text").is_visible()
    slowly()
    for one, own, other in ((visitor, "Return", "If the"), (second, "If the", "Return")):
        one.wait("Done.")
        texts = [text for side in ("base", "refined") for texts in one.drafts(side) for text in texts]
        assert len(texts) > 1
        assert all(own in text for text in texts)
        assert not any(other in text for text in texts)
    second.context.close()


def test_the_base_writes_again_at_the_refined_models_entropy(visitor):
    visitor.set(steps=2, temperature=0.7)
    visitor.write()
    refined = visitor.figures("refined")
    visitor.tab.locator("#match").click()
    visitor.tab.wait_for_function("/At T = |comes nearest/.test(document.querySelector('#status').innerText)")
    assert f"T = {visitor.figures('base')['T']}" in visitor.status
    assert visitor.figures("refined") == refined, "the other column stays"


def test_the_frontier_gets_the_points_of_what_was_written(visitor):
    visitor.tab.get_by_role("tab", name="Frontier").click()
    panel = visitor.tab.get_by_role("tabpanel").filter(has_text="Further down at equal entropy is better")
    panel.get_by_role("img").first.wait_for()
    before = panel.get_by_role("img").first.get_attribute("src")
    visitor.tab.get_by_role("tab", name="Side by side").click()
    visitor.write()
    visitor.tab.get_by_role("tab", name="Frontier").click()
    assert "far noisier than a line" in panel.inner_text()
    assert panel.get_by_role("img").first.get_attribute("src") != before


def test_a_failure_inside_is_a_sentence_without_its_details(visitor, site, monkeypatch):
    def broken(request):
        raise RuntimeError("/secret/path of another visitor")

    monkeypatch.setattr(site.columns, "write", broken)
    visitor.write(until=pages.FAILED)
    body = visitor.tab.locator("body").inner_text()
    assert "secret" not in body and "RuntimeError" not in body and "Traceback" not in body
    monkeypatch.undo()
    visitor.write()


def test_a_phone_shows_everything_without_scrolling_sideways(visitor):
    visitor.tab.set_viewport_size({"width": 360, "height": 740})
    visitor.write()
    for name in ("Side by side", "Models", "Frontier"):
        visitor.tab.get_by_role("tab", name=name).click()
        assert visitor.tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
    visitor.tab.get_by_role("tab", name="Side by side").click()
    box, label = (visitor.tab.locator(f"#temperature .head {part}").bounding_box() for part in ("input", "label"))
    assert box["y"] < label["y"] + label["height"] and box["x"] >= label["x"] + label["width"], "in one line"
    left, right = (visitor.tab.locator(f"#{side}").bounding_box() for side in ("base", "refined"))
    assert left["width"] > 250 and right["y"] > left["y"] + left["height"], "one column below the other"


def test_the_quickstarts_page_and_its_picture(browser, tmp_path, monkeypatch):
    """What `tokendrift demo` shows without arguments."""
    monkeypatch.chdir(ROOT)
    model, base, judge = quickstart()
    page = make_page(model, base, judge=judge)
    url = page.launch("127.0.0.1", None)
    visitor = Visitor(browser, url)
    visitor.set(seed=1)  # of 0 to 11 the one whose Gen.-PPL lies nearest to that of the README's table
    visitor.write()
    path = tmp_path / "demo.png"
    visitor.tab.screenshot(path=path, full_page=True)
    visitor.context.close()
    page.blocks.close()
    assert 20_000 < path.stat().st_size < 300_000
    if "SCREENSHOT" in os.environ:
        shutil.copy(path, os.environ["SCREENSHOT"])


def until(holds, seconds: float = 30.0) -> None:
    """Wait for something that happens in another thread."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
