"""The columns of the page: the models that write side by side, what each has written, and what it measures."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.decoding import check_one_vocabulary, ids_to_suppress
from ..evaluation.comparison import ENTROPY_CURVE, matching_temperature
from ..hub.samplers_tokendrift import SAMPLERS
from ..training.monitor import mean_entropy
from .request import Limits, Request
from .writer import write_steps

BASE, REFINED, ALONE = "Base", "Refined", "Model"  # titles


@dataclass(frozen=True)
class Column:
    """What a model has written: a draft, or a finished text with its figures.

    Attributes:
        tokens: ids [B, L].
        mask_id: of a masked model, else None.
        confidence: probability of each token under the model's last prediction there, [B, L], nan where none was.
        changed: whether a token differs from the draft before, bool [B, L].
        kept: whether a token is the prompt's, bool [L].
        temperature: at which it was drawn.
        num_steps: steps made so far.
        seconds: in which the model worked.
        calls: of the network, None for a draft, like the next ones.
        entropy: of the tokens of a text, mean over the texts, in nats.
        gen_ppl: the judge's record, None without a judge.
    """

    tokens: torch.Tensor
    mask_id: int | None
    confidence: torch.Tensor
    changed: torch.Tensor
    kept: torch.Tensor
    temperature: float
    num_steps: int
    seconds: float
    calls: int | None = None
    entropy: float | None = None
    gen_ppl: Mapping | None = None


@dataclass(frozen=True)
class Match:
    """The base on its way to another model's entropy.

    Attributes:
        request: the one tried, with its temperature, and in the end the one found.
        column: what the base has written there, None while the temperature is looked for.
        reached: whether a temperature between those tried gives that entropy, else the nearest one is taken.
    """

    request: Request
    column: Column | None = None
    reached: bool = True


class Columns:
    """The models of the page, by the titles of their columns.

    Args:
        models: title -> model, of one tokenizer.
        tokenizer: of the models.
        judge: arguments of `GenPPL` for the model that scores, None for no scores.
        limits: of a request.

    Raises:
        ValueError: models of different tokenizers.
    """

    def __init__(
        self,
        models: Mapping[str, PreTrainedModel],
        tokenizer: PreTrainedTokenizerBase,
        judge: dict | None = None,
        limits: Limits | None = None,
    ):
        self.models, self.tokenizer, self.limits = dict(models), tokenizer, limits or Limits()
        self.metric = None
        if judge is not None:
            from ..metrics import GenPPL  # needs evaluate, an extra

            self.metric = GenPPL(keep_in_memory=True, tokenizer=tokenizer, **judge)
        check_one_vocabulary(models)
        all_masked = all(model.process.mask_id is not None for model in self.models.values())
        self.samplers = [name for name, sampler in SAMPLERS.items() if all_masked or not sampler.needs_mask]
        reserved = {getattr(model.config, "mask_token_id", None) for model in self.models.values()}
        reserved |= {model.process.mask_id for model in self.models.values()}
        self._reserved = (reserved | {tokenizer.mask_token_id}) - {None}
        self.length = min(self.limits.length, *(model.longest for model in self.models.values()))

    def num_drafts(self, request: Request) -> int:
        """About how many drafts a column of this request has."""
        return self.length if "num_steps" in SAMPLERS[request.sampler].unused else request.num_steps

    def write(self, request: Request) -> Iterator[dict[str, Column]]:
        """All models write, taking turns a step at a time. Yields all columns so far after every turn.

        Raises:
            ValueError: the request is not possible. The message is written for the page.
        """
        runs = {title: self.write_one(title, request) for title in self.models}
        columns: dict[str, Column] = {}
        waiting = dict(runs)
        try:
            while waiting:
                for title, run in list(waiting.items()):
                    column = next(run, None)
                    if column is None:
                        del waiting[title]
                        continue
                    columns[title] = column
                    yield dict(columns)
        finally:
            for run in runs.values():
                run.close()

    def write_one(self, title: str, request: Request) -> Iterator[Column]:
        """One model writes: its drafts, and at last the finished text with its figures."""
        model = self.models[title]
        request.check(self.limits, self.samplers)
        ids, kept = request.canvas(self.tokenizer, self.length, self._reserved)
        settings = {"sampler": request.sampler, "num_steps": request.num_steps, "temperature": request.temperature}
        settings = {name: x for name, x in settings.items() if name not in SAMPLERS[request.sampler].unused}
        arguments = {"input_ids": ids, "prompt_mask": kept, "num_samples": request.num_samples, "seed": request.seed}
        arguments |= {"max_length": ids.shape[1], "trim_eos": False, "return_dict_in_generate": True}
        arguments["suppress_tokens"] = ids_to_suppress(model, self.tokenizer)

        mask_id, is_kept = model.process.mask_id, kept[0].bool()
        column, before = None, None
        with closing(write_steps(model, arguments | settings)) as steps:
            for result, seconds in steps:
                if hasattr(result, "sequences"):
                    yield self._finished(column, result, seconds)
                    return
                tokens, confidence = result.tokens.cpu(), result.confidence.float().cpu()
                if before is None:  # at the start all is masks, or else noise, in which no change is worth a mark
                    before = tokens if mask_id is None else torch.full_like(tokens, mask_id)
                changed, before = (tokens != before) & ~is_kept, tokens
                made = (request.temperature, result.step + 1, seconds)
                column = Column(tokens, mask_id, confidence, changed, is_kept, *made)
                yield column

    def match(self, request: Request, entropy: float) -> Iterator[Match]:
        """The base writes again, at the temperature at which its entropy is the one given.

        Lowering the temperature is free and lowers Gen.-PPL and entropy, so this is what a refined model has to beat.

        Args:
            request: what was written before.
            entropy: the other model's, in nats.

        Raises:
            ValueError: a temperature of 0, at which there is nothing to lower.
        """
        if request.temperature == 0:
            raise ValueError("Temperature 0 cannot be lowered. Write at a temperature above 0 first.")
        curve: dict[float, float | None] = {}
        for factor in ENTROPY_CURVE:
            tried = replace(request, temperature=round(factor * request.temperature, 3))
            with closing(self.write_one(BASE, tried)) as drafts:
                for column in drafts:
                    curve[tried.temperature] = column.entropy  # the last one has it
                    yield Match(tried)
        reached = min(curve.values()) <= entropy <= max(curve.values())
        found = replace(request, temperature=round(matching_temperature(curve, entropy), 3))
        with closing(self.write_one(BASE, found)) as drafts:
            for column in drafts:
                yield Match(found, column, reached)

    def _finished(self, column: Column, output, seconds: float) -> Column:
        rows = output.sequences.cpu()
        record = None
        if self.metric is not None:
            with warnings.catch_warnings():  # that the samples are few is known
                warnings.simplefilter("ignore")
                record = self.metric.compute(predictions=rows.tolist())
        figures = {"calls": output.num_forward_calls, "entropy": mean_entropy(rows), "gen_ppl": record}
        return replace(column, tokens=rows, seconds=seconds, **figures)
