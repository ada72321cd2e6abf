"""Tasks of lm-evaluation-harness on diffusion models: likelihoods by the NELBO, answers by generate().

    harness = DiffusionLM(model, tokenizer, num_steps=32, sampler="confidence")
    results = lm_eval.simple_evaluate(harness, tasks=["gsm8k"])

Needs the extra `tasks` (lm_eval), so nothing imports this module before tasks are asked for.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

try:
    from lm_eval import simple_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager
except ModuleNotFoundError as error:
    raise ImportError(f'Tasks need {error.name}: pip install "tokendrift-hf[tasks]".') from error

from ..data.chat import chat_ends
from ..data.decoding import ids_to_suppress
from ..data.packing import row_ends
from ..hub.denoiser_tokendrift import index_of
from ..objective.corruption import corrupt
from ..objective.nelbo import row_nelbo
from ..objective.noise import EVALUATE, SMALLEST_TIME, Noise, row_noise

logger = logging.getLogger(__name__)


class DiffusionLM(LM):
    """A diffusion language model as lm-evaluation-harness asks it.

    Args:
        model: of this package, or one that went through `as_diffusion`.
        tokenizer: the model's.
        num_draws: draws of x_t for every likelihood, whose shares of noise are stratified.
        seed: of that noise, and of the samples. A request's noise depends on its place among the requests alone.
        batch_size: rows at a time.
        max_new_tokens: of an answer, where the task does not say it. An answer takes at most half of the model's
            length, and a context that does not fit into the rest loses its beginning, with a warning.
        settings: of `generate()`: num_steps, sampler, temperature, block_length, ...

    Attributes:
        tokens_per_forward: tokens written for each network call so far, a mean over all answers. Before the first it
            is 0.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        num_draws: int = 32,
        seed: int = 0,
        batch_size: int = 16,
        max_new_tokens: int = 256,
        **settings: Any,
    ):
        super().__init__()
        for name, value in (("num_draws", num_draws), ("batch_size", batch_size), ("max_new_tokens", max_new_tokens)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: it must be a whole number of at least 1.")
        self.model, self.tokenizer = model.eval(), tokenizer
        self.num_draws, self.seed, self.batch_size = num_draws, seed, batch_size
        self.max_new_tokens, self.settings = max_new_tokens, settings
        self.first, self.last = row_ends(tokenizer)
        # Where the model keeps the id that ends a row, as BERT does, every row that it has seen ended so.
        self.tail = [self.last] if self.last in getattr(model.process, "kept_ids", ()) else []
        self._written, self._calls = 0.0, 0.0

    @property
    def tokens_per_forward(self) -> float:
        return self._written / self._calls if self._calls else 0.0

    # Likelihoods

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Minus the NELBO of each continuation given its context, and whether greedy decoding in one step gives it."""
        rows = [self._pair(*request.args) for request in requests]
        return list(zip(self._log_likelihoods(rows), self._greedy(rows), strict=True))

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Minus the NELBO of each text, in windows of the model's length that do not see each other."""
        size = self.model.longest - 1 - len(self.tail)
        windows, owners = [], []
        for owner, request in enumerate(requests):
            ids = self._ids(request.args[0])
            for start in range(0, len(ids), size):
                windows.append(([self.first], ids[start : start + size]))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, value in zip(owners, self._log_likelihoods(windows), strict=True):
            totals[owner] += value
        return totals

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of both, split where the context ends in the ids of the whole. The context is cut on the left."""
        blank = len(context) - len(context.rstrip())
        if blank:  # blanks belong to the word that follows them
            context, continuation = context[:-blank], context[-blank:] + continuation
        whole, length = self._ids(context + continuation), len(self._ids(context))
        before, after = whole[:length], whole[length:]
        room = self.model.longest - 1 - len(self.tail)
        after = after[:room]
        return [self.first, *before[max(0, len(before) + len(after) - room) :]], after

    def _batches(self, rows: Sequence[tuple[list[int], list[int]]]) -> Iterator[tuple[range, Tensor, Tensor, Tensor]]:
        """Which rows, their ids [B, L], which positions exist and which are given, not asked for."""
        device = self.model.device
        for start in range(0, len(rows), self.batch_size):
            part = rows[start : start + self.batch_size]
            ids = [torch.tensor([*before, *after, *self.tail]) for before, after in part]
            given = [torch.ones_like(x) for x in ids]
            for mask, (before, after) in zip(given, part, strict=True):
                mask[len(before) : len(before) + len(after)] = 0
            exists = pad_sequence([torch.ones_like(x) for x in ids], batch_first=True)
            ids, given = (pad_sequence(x, batch_first=True) for x in (ids, given))
            yield range(start, start + len(part)), ids.to(device), exists.to(device), given.to(device)

    @torch.no_grad()
    def _log_likelihoods(self, rows: Sequence[tuple[list[int], list[int]]]) -> list[float]:
        estimate = self._nelbo_at_times if self.model.process.mask_id is None else self._nelbo_of_masks
        values = []
        for which, ids, exists, given in self._batches(rows):
            total = torch.zeros(len(ids), dtype=torch.float64)
            for draw in range(self.num_draws):
                noise = row_noise((self.seed, EVALUATE, draw), which, ids.shape[1], self.model.process.vocab_size)
                total += estimate(ids, exists, given, noise, draw).double().cpu()
            values += (-total / self.num_draws).tolist()
        return values

    def _nelbo_of_masks(self, ids: Tensor, exists: Tensor, given: Tensor, noise: Noise, draw: int) -> Tensor:
        """[B]: n / m times the surprise at m of the n asked tokens, which are masked. m is uniform over 1 to n.

        The same bound as with times, whose draws may mask no token, and weigh one by 1/t (LLaDA, arXiv 2502.09992). Of
        one token it is exact.
        """
        process = self.model.process
        asked = (given == 0) & (exists == 1) & process.corruptible(ids)
        n = asked.sum(1)
        share = (noise.time.to(ids.device) + draw) / self.num_draws
        m = torch.minimum((n * share).long() + 1, n)
        order = noise.order.to(ids.device).masked_fill(~asked, -1.0)
        masked = (order.argsort(dim=1, descending=True, stable=True).argsort(dim=1) < m[:, None]) & asked
        positions, valid = index_of(masked)
        hidden, c = self.model(
            input_ids=ids.masked_fill(masked, process.mask_id),
            timesteps=(m / n.clamp_min(1)).float(),
            attention_mask=exists,
            positions=positions,
        ).hidden_states
        log_p = self.model.logits(hidden, c).float().log_softmax(-1)
        surprise = -log_p.gather(-1, ids.gather(1, positions)[..., None])[..., 0].masked_fill(~valid, 0.0)
        return surprise.sum(1) * n / m.clamp_min(1)

    def _nelbo_at_times(self, ids: Tensor, exists: Tensor, given: Tensor, noise: Noise, draw: int) -> Tensor:
        """[B]: the NELBO at one time of each row, one of `num_draws` strata."""
        t = SMALLEST_TIME + (1 - SMALLEST_TIME) * (noise.time + draw) / self.num_draws
        inputs = {"input_ids": ids, "attention_mask": exists, "prompt_mask": given}
        batch = corrupt(self.model.process, inputs, noise, t)
        logits = self.model(input_ids=batch.x_t, timesteps=batch.t, attention_mask=exists).logits
        return row_nelbo(self.model.process, logits, batch)[0]

    @torch.no_grad()
    def _greedy(self, rows: Sequence[tuple[list[int], list[int]]]) -> list[bool]:
        """Whether the likeliest tokens, all predicted at once, are the continuation. A model without a mask: never."""
        mask_id, same = self.model.process.mask_id, []
        if mask_id is None:
            return [False] * len(rows)
        for _, ids, exists, given in self._batches(rows):
            asked = (given == 0) & (exists == 1)
            times = torch.ones(len(ids), device=ids.device)
            x_t = ids.masked_fill(asked, mask_id)
            best = self.model(input_ids=x_t, timesteps=times, attention_mask=exists).logits.argmax(-1)
            same += ((best == ids) | ~asked).all(1).tolist()
        return same

    # Answers

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """What `generate()` writes after each context, up to the first of the strings that end an answer."""
        alike = defaultdict(list)  # requests of one length and temperature go together
        for place, request in enumerate(requests):
            wishes = request.args[1]
            alike[self._length(wishes), self._temperature(wishes)].append(place)
        answers = [""] * len(requests)
        for (length, temperature), places in alike.items():
            for start in range(0, len(places), self.batch_size):
                part = places[start : start + self.batch_size]
                contexts = [requests[place].args[0] for place in part]
                for place, text in zip(part, self._answers(contexts, length, temperature, part), strict=True):
                    answers[place] = _up_to(text, requests[place].args[1].get("until"))
        return answers

    def _length(self, wishes: dict) -> int:
        wanted = wishes.get("max_gen_toks") or wishes.get("max_new_tokens") or self.max_new_tokens
        return min(int(wanted), self.model.longest // 2)

    def _temperature(self, wishes: dict) -> float | None:
        """Our own setting first, then the task's. do_sample: false is greedy, as in transformers."""
        if "temperature" in self.settings:
            return None
        return 0.0 if wishes.get("do_sample") is False else wishes.get("temperature")

    def _answers(self, contexts: list[str], length: int, temperature: float | None, places: list[int]) -> list[str]:
        room = self.model.longest - length - 1
        ids = [self._ids(context) for context in contexts]
        longest = max(map(len, ids))
        if longest > room:
            logger.warning(
                f"A context of {longest} tokens loses its beginning: with {length} for the answer, the model takes "
                f"{room}."
            )
        rows = [torch.tensor([self.first, *context[-room:]]) for context in ids]
        settings = self.settings | ({} if temperature is None else {"temperature": float(temperature)})
        output = self.model.generate(
            pad_sequence(rows, batch_first=True),
            attention_mask=pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
            max_new_tokens=length,
            trim_eos=True,
            eos_token_id=chat_ends(self.tokenizer),
            generator=[torch.Generator().manual_seed(2**32 * self.seed + place) for place in places],
            suppress_tokens=ids_to_suppress(self.model, self.tokenizer),
            return_dict_in_generate=True,
            **settings,
        )
        texts = []
        for ids, row, end in zip(output.sequences, rows, output.lengths.tolist(), strict=True):
            texts.append(self.tokenizer.decode(ids[len(row) : end], skip_special_tokens=True))
            self._written += end - len(row)
        self._calls += float(output.calls_per_row.sum())
        return texts

    # Chat templates

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )


def _up_to(text: str, until: str | list[str] | None) -> str:
    """A text up to the first of the strings that end it."""
    for end in [until] if isinstance(until, str) else until or ():
        text = text.split(end)[0] if end else text
    return text


def find_tasks(tasks: list[str], folder: str | None = None) -> TaskManager:
    """The index that `simple_evaluate` reads tasks from: of the folder alone, if that has them all.

    lm_eval's own index lists more than ten thousand tasks and takes ten seconds to read.

    Raises:
        ValueError: a task is in neither.
    """
    manager = TaskManager(include_path=folder, include_defaults=False)
    if folder is None or not set(tasks) <= set(manager.all_tasks):
        manager = TaskManager(include_path=folder)
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        places = "lm_eval" if folder is None else f"lm_eval and {folder}"
        raise ValueError(f"{places} have no task {', '.join(unknown)}. `lm_eval ls tasks` lists those of lm_eval.")
    return manager


def evaluate_tasks(model: DiffusionLM, tasks: list, **options: Any) -> dict[str, dict[str, Any]]:
    """Task -> its metrics as lm_eval names them, with `tokens_per_forward` where answers were written.

    Args:
        model: the model.
        tasks: names that lm_eval knows.
        options: of `lm_eval.simple_evaluate`: limit, num_fewshot, apply_chat_template, task_manager, ...
    """
    results = {}
    for task in tasks:
        model._written = model._calls = 0.0
        measured = simple_evaluate(model, tasks=[task], **{"bootstrap_iters": 0, "log_samples": False} | options)
        for name, metrics in measured["results"].items():
            results[name] = {key: value for key, value in metrics.items() if isinstance(value, (int, float))}
            if model.tokens_per_forward:
                results[name]["tokens_per_forward"] = model.tokens_per_forward
    return results
