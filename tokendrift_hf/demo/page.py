"""The page: models write side by side, step by step. The only file that knows gradio."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from importlib.resources import files

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported

try:
    import gradio as gr
    import matplotlib  # noqa: F401 -- of the frontier
except ModuleNotFoundError as error:
    raise ImportError(f'The demo needs {error.name}: pip install "tokendrift-hf[demo]".') from error

from .columns import BASE, REFINED, Column, Columns
from .frontier import POINTS, Results, frontier, points_of, remark
from .markup import about_markdown, column_html, legend_html, status_html
from .request import GAP_TOKENS, Request

logger = logging.getLogger(__name__)

TITLE = "TokenDrift, step by step"
WAITING = 32  # requests in the queue, beyond which the page says that it is busy
PAUSE, PAUSES = 0.15, 3.0  # seconds after a draft, so that eyes can follow, and seconds of them in a run at most
FAILED = "Something went wrong on the server. Its terminal has the details, and your settings are still here."


class Page:
    """The components of the page and what its buttons do.

    All that belongs to a visitor is in his own `gr.State` or in the run that he has started.

    Args:
        columns: the models.
        names: title of a column -> name of its model, for people.
        results: of a results.json, None where there is none.

    Attributes:
        blocks: the gradio app.
    """

    def __init__(self, columns: Columns, names: Mapping[str, str], results: Results | None = None):
        self.columns, self.names, self.results = columns, names, results
        with gr.Blocks(title=TITLE, analytics_enabled=False) as self.blocks:
            self.last, self.points = gr.State(None), gr.State([])
            gr.Markdown(f"# {TITLE}\n{self._introduction()}")
            with gr.Tab("Side by side" if self._has_pair else "Write"):
                self._controls()
                with gr.Row(equal_height=False):
                    self.shown = {title: self._column(title) for title in columns.models}
            with gr.Tab("Models"):
                gr.Markdown(about_markdown(columns, names))
            with gr.Tab("Frontier"):
                self.remark = gr.Markdown(remark(results, []))
                self.plot = gr.Plot(self._plot([]), show_label=False, container=False, visible=results is not None)
            self._events()

    @property
    def _has_pair(self) -> bool:
        return BASE in self.columns.models

    def _introduction(self) -> str:
        largest = max(model.num_parameters() for model in self.columns.models.values())
        size = f"{largest / 1e6:,.0f} million" if largest >= 1e6 else f"{largest:,}"
        who = "A base model and its refinement write" if self._has_pair else "A diffusion language model writes"
        return (
            f"{who} from the same noise, many tokens of the whole text at a time. With {size} parameters it is a small "
            "language model: expect fragments in the style of its training text, and no facts."
        )

    def _controls(self) -> None:
        limits, narrow = self.columns.limits, {"min_width": 150}
        self.prompt = gr.Textbox(
            label="Prompt (optional)",
            info=f"Text to continue, or text with gaps to fill: [gap 12] for 12 tokens, [gap] for {GAP_TOKENS}.",
            lines=1,
            max_lines=6,
            elem_id="prompt",
        )
        with gr.Row():
            self.steps = self._slider("Steps", 1, limits.num_steps, min(8, limits.num_steps))
            self.temperature = self._slider("Temperature", 0, 2, 1, step=0.01)
            self.seed = self._slider("Seed", 0, 999, 0)
            self.samples = self._slider("Texts", 1, limits.num_samples, 1)
            self.sampler = gr.Dropdown(
                self.columns.samplers, value="ancestral", label="Sampler", elem_id="sampler", **narrow
            )
        with gr.Row():
            self.start = gr.Button("Write", variant="primary", elem_id="write", **narrow)
            self.stop = gr.Button("Stop", interactive=False, elem_id="stop", **narrow)
        self.status = gr.HTML(status_html("Choose, and press Write."), elem_id="status", elem_classes="td-flat")
        gr.HTML(legend_html(), elem_classes="td-flat")

    def _slider(self, label: str, least: int, most: int, value: int, step: float = 1) -> gr.Slider:
        shape = {"label": label, "elem_id": label.lower(), "buttons": [], "min_width": 150}
        slider = gr.Slider(least, most, value, step=step, **shape)
        slider.preprocess = lambda value: (
            value
        )  # `Request.check` says in the page's words what gradio refuses in its own
        return slider

    def _column(self, title: str) -> gr.HTML:
        with gr.Column(min_width=300):
            shown = gr.HTML(self._html(title, None), elem_id=title.lower(), elem_classes="td-flat")
            if title == BASE:
                label = "Write again at the refined model's entropy"
                self.match = gr.Button(label, interactive=False, size="sm", elem_id="match")
        return shown

    def _events(self) -> None:
        asked = [self.prompt, self.samples, self.steps, self.temperature, self.seed, self.sampler]
        outputs = [self.status, *self.shown.values(), self.start, self.stop, self.last, self.points]
        outputs += [self.plot, self.remark, *([self.match] if self._has_pair else [])]
        # One run at a time: the second visitor waits, and the seconds of the first mean something.
        shared = {"concurrency_id": "models", "concurrency_limit": 1, "outputs": outputs}
        shared |= {"show_progress": "minimal", "show_progress_on": self.status, "api_visibility": "private"}
        runs = [
            gr.on([self.start.click, self.prompt.submit], self.write, inputs=[*asked, self.last, self.points], **shared)
        ]
        if self._has_pair:
            runs.append(self.match.click(self.write_matched, inputs=[self.last, self.points], **shared))
        self.stop.click(
            lambda: self._idle("Stopped."),
            outputs=[self.status, self.start, self.stop],
            cancels=runs,
            queue=False,
            api_visibility="private",
        )

    def write(self, prompt, samples, steps, temperature, seed, sampler, last, points) -> Iterator[dict]:
        """All columns write what the controls ask for."""
        request = Request(prompt or "", samples, steps, temperature, seed, sampler)
        yield from self._guarded(self._write(request, points), last, "Writing …")

    def write_matched(self, last, points) -> Iterator[dict]:
        """The base writes again, at the refined model's entropy."""
        yield from self._guarded(self._write_matched(last, points), last, "Looking for the base's temperature …")

    def _guarded(self, run: Iterator[dict], last: tuple | None, text: str) -> Iterator[dict]:
        """The run between a busy and an idle page. Whatever goes wrong becomes a sentence on the page."""
        busy = {self.status: status_html(text), self.start: gr.update(interactive=False)}
        yield busy | {self.stop: gr.update(interactive=True)} | self._matching(False)
        try:
            yield from run
        except ValueError as error:
            yield self._idle(str(error), wrong=True) | self._matching(last is not None)
        except Exception:
            logger.exception("A request failed")
            yield self._idle(FAILED, wrong=True)

    def _write(self, request: Request, points: list[dict]) -> Iterator[dict]:
        columns: dict[str, Column] = {}
        with closing(self.columns.write(request)) as drafts:
            for now in drafts:
                yield {
                    self.shown[title]: self._html(title, now[title])
                    for title in now
                    if now[title] is not columns.get(title)
                }
                columns = now
                time.sleep(min(PAUSE, PAUSES / self.columns.num_drafts(request)) / len(columns))
        entropies = {title: column.entropy for title, column in columns.items()}
        yield self._done(request, columns, points, "Done.") | {self.last: (request, entropies)}

    def _write_matched(self, last: tuple | None, points: list[dict]) -> Iterator[dict]:
        if last is None:  # the page was open for so long that the server has forgotten it
            raise ValueError("There is no text of yours any more. Write again first.")
        (request, entropies), match, at = last, None, ""
        with closing(self.columns.match(request, entropies[REFINED])) as attempts:
            for match in attempts:
                at = f"T = {match.request.temperature:g}"
                if match.column is None:
                    yield {self.status: status_html(f"Looking for the base's temperature: {at} …")}
                else:
                    yield {self.shown[BASE]: self._html(BASE, match.column)}
        text = f"At {at} the base has the entropy of the refined model."
        if not match.reached:
            text = f"No temperature tried gives the base that entropy. {at} comes nearest."
        yield self._done(match.request, {BASE: match.column}, points, text)

    def _html(self, title: str, column: Column | None) -> str:
        return column_html(title, self.names[title], column, self.columns.tokenizer)

    def _done(self, request: Request, columns: Mapping[str, Column], points: list[dict], text: str) -> dict:
        updates = self._idle(text) | self._matching(True)
        if self.results is not None:
            points = [*points, *points_of(request, columns)][-POINTS:]
            updates |= {self.points: points, self.plot: self._plot(points)}
            updates[self.remark] = remark(self.results, points)
        return updates

    def _idle(self, text: str, wrong: bool = False) -> dict:
        status = status_html(text, wrong)
        return {self.status: status, self.start: gr.update(interactive=True), self.stop: gr.update(interactive=False)}

    def _matching(self, possible: bool) -> dict:
        return {self.match: gr.update(interactive=possible)} if self._has_pair else {}

    def _plot(self, points: list[dict]):
        return None if self.results is None else frontier(self.results, points)

    def launch(self, host: str | None, port: int | None) -> str:
        """Serve the page in the background and return its address.

        Nothing is fetched from elsewhere, recorded, shared or uploaded.

        Args:
            host, port: to listen at. None: those in gradio's environment variables, which a Space sets, else 127.0.0.1
                and the first free port from 7860.

        Raises:
            OSError: the port is taken.
        """
        style, script = ((files(__package__) / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
        theme = gr.themes.Base(font=("system-ui", "sans-serif"), font_mono=("ui-monospace", "monospace"))
        theme.set(block_info_text_color="*neutral_600", block_info_text_color_dark="*neutral_300")
        self.blocks.queue(max_size=WAITING, api_open=False)  # nobody passes by those who wait
        _, url, _ = self.blocks.launch(
            server_name=host,
            server_port=port,
            theme=theme,
            css=style,
            js=script,
            footer_links=[],
            share=False,
            run_history=False,
            enable_monitoring=False,
            ssr_mode=False,
            pwa=False,
            mcp_server=False,
            max_file_size=1,
            quiet=True,
            prevent_thread_lock=True,
        )
        return url

    def wait(self) -> None:
        """Until the server ends."""
        self.blocks.block_thread()
