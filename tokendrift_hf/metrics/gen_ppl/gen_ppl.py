"""Generative perplexity of text under an autoregressive judge, with the statistics that keep it honest.

Self-contained: `evaluate.load("<folder>/gen_ppl")` copies this one file, so it imports no other file of the package and
writes one import per line (`evaluate` finds them with a regular expression).
"""

from __future__ import annotations

import collections
import hashlib
import importlib.metadata
import importlib.util
import math
import re
import warnings
from pathlib import Path

import datasets
import evaluate
import numpy as np
import torch
import transformers

_DESCRIPTION = """
Generative perplexity: exp of the token-weighted mean negative log-likelihood of generated text under a judge model
(GPT-2 Large in most papers), as in the evaluation code of MDLM (arXiv:2406.07524) and DUO (arXiv:2506.10892).
It is returned together with its standard error, token entropy, diversity, flags for collapsed text, and all settings.
"""

_KWARGS_DESCRIPTION = """
Args:
    predictions: list of `str`, or token ids (list of lists, or a [N, L] array or tensor). Ids are decoded by
        `tokenizer`; without it they must be ids of the judge and are scored as they are. Ids outside the vocabulary
        are left out and counted.
    model_id (`str`): Hub id or folder of the judge. This and all that follows can also be given to `evaluate.load`.
    model_revision (`str`): revision of the judge on the Hub.
    model, model_tokenizer: an already loaded judge instead of `model_id`; it stays on its device, in its dtype.
    tokenizer: tokenizer of the generating model (object, Hub id or folder), for decoding and for entropy.
    batch_size (`int`, default 8): windows per call of the judge. Does not change the result.
    device (`str`): where to load the judge. Default: CUDA, else MPS, else CPU.
    dtype (`str`, default "float32"): "float32", "bfloat16" or "float16", whatever dtype the checkpoint is stored in.
    mode (`str`, default "reference"): which tokens count, see the README: "reference", "reference_padded",
        "first_document" or "all_tokens".
    max_length (`int`): longer texts are cut to this many judge tokens. Default: the judge's window. If it exceeds the
        window, a text is scored in consecutive windows that do not see each other.
    per_sample (`bool`, default False): add the values of every sample under the key "per_sample".
    mauve_references: real texts or ids, in the form of predictions but as many as you like: adds MAUVE against them
        (`pip install mauve-text`), on the judge's last hidden state at the end of a text.
    mauve_settings (`dict`): keywords of `mauve.compute_mauve` that replace its defaults, such as num_buckets.
Returns:
    dict of plain Python values (see README.md beside this file for every key).
Raises:
    ValueError: for no predictions, no judge, a judge without tokenizer, bad settings, too few texts for MAUVE.
    ImportError: for mauve_references without mauve-text.
Examples:
    >>> import evaluate
    >>> gen_ppl = evaluate.load("gen_ppl")
    >>> record = gen_ppl.compute(predictions=["It rained all day.", "The train left."], model_id="gpt2-large")
"""

MODES = ("reference", "reference_padded", "first_document", "all_tokens")
SETTINGS = {
    "model_id": None,
    "model_revision": None,
    "model": None,
    "model_tokenizer": None,
    "tokenizer": None,
    "batch_size": 8,
    "device": None,
    "dtype": "float32",
    "mode": "reference",
    "max_length": None,
    "per_sample": False,
    "mauve_references": None,
    "mauve_settings": {},
}
VERSION = 2  # of the definition: raised when a value can change
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FEW_SAMPLES = 64
# Defaults of mauve-text 0.4, written out because every one of them decides the value.
MAUVE = {
    "num_buckets": "auto",
    "pca_max_data": -1,
    "kmeans_explained_var": 0.9,
    "kmeans_num_redo": 5,
    "kmeans_max_iter": 500,
    "divergence_curve_discretization_size": 25,
    "mauve_scaling_factor": 5,
    "seed": 25,
}
FEW_FOR_MAUVE = 1000
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w+|[^\w\s]+")  # one CJK character is one word
DEFAULT_WINDOW = 1024  # of GPT-2; for judges whose config names no maximal length


class Judge:
    """The scoring model with its tokenizer.

    Attributes: model, tokenizer, name (id or path), revision (commit, "sha256:..." of local weights, or None),
    dtype (name), vocab_size, window (int, longest input), bos_id and eos_id (int or None), adds_bos and adds_eos
    (whether the tokenizer puts them around a text by itself).
    """

    def __init__(self, model, tokenizer, revision=None):
        self.model, self.tokenizer = model, tokenizer
        self.name = model.config._name_or_path or type(model).__name__
        # Without tokenizer files transformers 5 builds an empty tokenizer instead of failing.
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise ValueError(
                f"The tokenizer of the judge {self.name!r} knows special tokens only, so its files are missing. "
                "Save the tokenizer beside the model or pass `model_tokenizer`."
            )
        self.revision = revision or getattr(model.config, "_commit_hash", None)
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.vocab_size = model.get_input_embeddings().num_embeddings
        self.window = getattr(model.config, "max_position_embeddings", None) or DEFAULT_WINDOW
        eos_id = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else model.config.eos_token_id
        self.eos_id = eos_id[0] if isinstance(eos_id, list) else eos_id
        self.bos_id = Roles(tokenizer).bos[1]
        added = tokenizer("")["input_ids"]
        self.adds_bos = added[:1] == [self.bos_id]
        self.adds_eos = added[self.adds_bos :] == [self.eos_id]

    @classmethod
    def load(cls, model_id, revision, tokenizer, device, dtype):
        """Load a judge for scoring. The arguments are those of `GenPPL`."""
        try:
            if tokenizer is None or isinstance(tokenizer, str):
                tokenizer = transformers.AutoTokenizer.from_pretrained(
                    tokenizer or model_id, revision=revision, trust_remote_code=False
                )
            model = transformers.AutoModelForCausalLM.from_pretrained(
                model_id, revision=revision, dtype=dtype, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            reason = str(error).partition("\n")[0]  # what follows is a list of some hundred architectures
            if "trust_remote_code" in str(error):
                reason = (
                    "It comes with code of its own, which is never run here. Take another judge, or load this one "
                    "yourself and pass it as `model` and `model_tokenizer` of GenPPL."
                )
            raise ValueError(
                f"The judge {model_id!r} cannot be loaded. It takes an autoregressive model of transformers, and its "
                f"tokenizer beside it or in `model_tokenizer`. {reason}"
            ) from error
        return cls(model.to(device).eval(), tokenizer, revision=files_digest(model_id))

    def read(self, texts: list[str], opened: list[bool]) -> list[list[int]]:
        """Ids of the texts, those of `opened` with bos in front. Neither it nor eos at the end is there twice."""
        rows = self.tokenizer(texts, verbose=False)["input_ids"]
        for i, row in enumerate(rows):
            if opened[i] and self.bos_id is not None and not self.adds_bos:
                row = [self.bos_id, *row]
            rows[i] = row[:-1] if self.adds_eos and row[-2:] == [self.eos_id] * 2 else row
        low, high = min((min(row) for row in rows if row), default=0), max((max(row) for row in rows if row), default=0)
        if low < 0 or high >= self.vocab_size:
            raise ValueError(
                f"The judge's tokenizer gives ids from {low} to {high}, but the vocabulary of the judge has "
                f"{self.vocab_size} entries. Pass the tokenizer of the judge as `model_tokenizer`."
            )
        return rows

    @torch.no_grad()
    def _batches(self, network, rows: list[list[int]], batch_size: int):
        """Yield positions in `rows`, their ids [b, L] and the output of `network` on them. Empty rows are left out.

        Rows of similar length share a batch. Padding is on the right of a causal model, hence without influence.
        """
        order = sorted((i for i in range(len(rows)) if rows[i]), key=lambda i: -len(rows[i]))
        batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
        device, was_training = self.model.device, self.model.training
        self.model.eval()
        for batch in evaluate.utils.logging.tqdm(batches, desc="Gen.-PPL", unit="batch", delay=5, leave=False):
            lengths = torch.tensor([len(rows[i]) for i in batch])
            ids = torch.zeros(len(batch), lengths[0], dtype=torch.long)
            mask = torch.arange(lengths[0]) < lengths[:, None]
            ids[mask] = torch.tensor([token for i in batch for token in rows[i]])
            ids, mask = ids.to(device), mask.long().to(device)
            with torch.autocast(device.type, enabled=False):  # the record promises the judge's own dtype
                yield batch, ids, network(input_ids=ids, attention_mask=mask, use_cache=False)
        self.model.train(was_training)

    def nll(self, windows: list[list[int]], batch_size: int) -> list[torch.Tensor]:
        """Negative log-likelihood in nats of tokens 2, 3, ... of every window, float64 [len - 1] each."""
        results: list[torch.Tensor] = [torch.zeros(0, dtype=torch.float64)] * len(windows)
        for batch, ids, output in self._batches(self.model, windows, batch_size):
            for row, i in enumerate(batch):  # one row at a time: [L, V] in float32 is large enough
                length = len(windows[i])
                scores = output.logits[row, : length - 1].float()
                loss = torch.nn.functional.cross_entropy(scores, ids[row, 1:length], reduction="none")
                results[i] = loss.cpu().double()
        return results

    def features(self, rows: list[list[int]], batch_size: int) -> np.ndarray:
        """The last hidden state at the last token of every row, float32 [N, d], as in MAUVE (arXiv:2102.01454)."""
        found = {}
        for batch, _, output in self._batches(self.model.base_model, rows, batch_size):
            for row, i in enumerate(batch):
                found[i] = output.last_hidden_state[row, len(rows[i]) - 1].float().cpu().numpy()
        return np.array([found[i] for i in sorted(found)])


def files_digest(model_id: str) -> str | None:
    """Digest of the weights in a local folder as "sha256:...", None for a Hub id (which has a commit instead)."""
    files = sorted(Path(model_id).glob("*.safetensors"))
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        with open(file, "rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return f"sha256:{digest.hexdigest()}"


def token_weights(ids: list[int], eos_id: int | None, mode: str) -> torch.Tensor:
    """Which tokens of a window count: float64 [len - 1] of 0 and 1, for tokens 2, 3, ... (the first has no prediction).

    The reference modes count every non-EOS token and the first EOS of the window, as the metrics of kuleshov-group/mdlm
    and s-sahoo/duo do. An EOS at position 0, with which packed training rows begin, is that first one.
    """
    if mode.startswith("reference"):
        is_eos = torch.tensor(ids, dtype=torch.long) == (-1 if eos_id is None else eos_id)
        return (~is_eos | (is_eos.cumsum(0) == 1))[1:].double()
    return torch.ones(max(len(ids) - 1, 0), dtype=torch.float64)


def first_document(ids: list[int], eos_id: int | None) -> list[int]:
    """The ids from the last leading EOS to the first EOS after text, both included."""
    start = next((i for i, token in enumerate(ids) if token != eos_id), len(ids))
    end = next((i for i in range(start, len(ids)) if ids[i] == eos_id), len(ids))
    return ids[max(start - 1, 0) : end + 1]


def score(judge: Judge, rows: list[list[int]], mode: str, batch_size: int) -> tuple[list[float], list[int]]:
    """For each row of judge ids its negative log-likelihood in nats and the number of tokens that it is over.

    Raises:
        ValueError: a likelihood is not finite.
    """
    if mode == "first_document":
        rows = [first_document(row, judge.eos_id) for row in rows]
    elif mode == "reference_padded" and judge.eos_id is not None:
        longest = max(map(len, rows))
        rows = [row + [judge.eos_id] * (len(row) < longest) for row in rows]
    windows, owner = [], []
    for i, row in enumerate(rows):
        for start in range(0, len(row), judge.window):
            windows.append(row[start : start + judge.window])
            owner.append(i)
    nll, num_tokens = [0.0] * len(rows), [0] * len(rows)
    for i, window, loss in zip(owner, windows, judge.nll(windows, batch_size), strict=True):
        weights = token_weights(window, judge.eos_id, mode)
        nll[i] += float((loss * weights).sum())
        num_tokens[i] += int(weights.sum())
    if not all(map(math.isfinite, nll)):
        raise ValueError(f"The judge {judge.name!r} gives non-finite values in {judge.dtype}. Use dtype='float32'.")
    return nll, num_tokens


def unigram_entropy(tokens: list) -> float:
    """Entropy in nats of the empirical distribution of the tokens. 0 for none."""
    counts = np.unique(np.array(tokens), return_counts=True)[1]
    p = counts / max(len(tokens), 1)
    return float(-(p * np.log(p)).sum()) + 0.0  # + 0.0 turns -0.0 into 0.0


def ngram_codes(ids: list[int], n: int) -> np.ndarray:
    """One 64-bit code per run of n ids: equal for equal runs, and different for others but for chance near 1e-6."""
    row = np.array(ids, dtype=np.uint64)
    codes = np.zeros(max(len(row) - n + 1, 0), dtype=np.uint64)
    for i in range(n):
        codes = codes * np.uint64(0x9E3779B97F4A7C15) + row[i : i + len(codes)]
    return codes


def diversity(rows: list[list[int]]) -> dict[str, float]:
    """Statistics of token ids, one list per sample.

    `entropy` is the unigram entropy in nats within a sample, mean over samples (an empty sample has 0).
    `pooled_entropy` is that of all samples together. `distinct_n` is the number of distinct n-grams of the whole set,
    per n-gram. `rep_n` is the share of n-grams of a sample that repeat an earlier one of the same sample, mean over the
    samples that have any.
    """
    result = {
        "entropy": float(np.mean([unigram_entropy(row) for row in rows])),
        "pooled_entropy": unigram_entropy([token for row in rows for token in row]),
    }
    for n in (1, 2, 3):
        codes = np.concatenate([ngram_codes(row, n) for row in rows])
        result[f"distinct_{n}"] = len(np.unique(codes)) / max(len(codes), 1)
    for n in (2, 3, 4):
        repeated = [1 - len(np.unique(codes)) / len(codes) for row in rows if len(codes := ngram_codes(row, n))]
        result[f"rep_{n}"] = float(np.mean(repeated)) if repeated else 0.0
    return result


def perplexity(nll: list[float], num_tokens: list[int]) -> tuple[float | None, float | None]:
    """exp(sum nll / sum num_tokens) over samples, and its standard error.

    The error is that of a ratio of two means (delta method). None for one sample. Both are None if no token counts.
    """
    s, n = np.array(nll), np.array(num_tokens, dtype=np.float64)
    if n.sum() == 0:
        return None, None
    mean = s.sum() / n.sum()
    value = float(np.exp(mean))
    if len(s) == 1:
        return value, None
    variance = len(s) / (len(s) - 1) * ((s - mean * n) ** 2).sum() / n.sum() ** 2
    return value, float(value * np.sqrt(variance))


def mauve(p: np.ndarray, q: np.ndarray, settings: dict) -> dict:
    """MAUVE (arXiv:2102.01454) of features [N, d] of samples and [M, d] of references, and its settings."""
    from mauve import compute_mauve

    used = {**MAUVE, **settings}
    fewest = min(len(p), len(q))
    buckets = max(2, round(fewest / 10)) if used["num_buckets"] == "auto" else used["num_buckets"]
    if fewest < 2 * buckets:
        raise ValueError(
            f"MAUVE in {buckets} clusters needs at least {2 * buckets} samples and references that hold text; found "
            f"{len(p)} and {len(q)}. Give more text, or a smaller num_buckets in mauve_settings."
        )
    curve = compute_mauve(p_features=p, q_features=q, **used | {"num_buckets": buckets}).divergence_curve
    # The area under it. The library sorts the curve before, in an order that is open for ties: 0.5 to 1 for equal sets.
    x, y = curve.T
    value = ((x[:-1] - x[1:]) * (y[:-1] + y[1:])).sum() / 2
    counts = {"num_buckets": buckets, "num_predictions": len(p), "num_references": len(q)}
    used |= counts | {"version": importlib.metadata.version("mauve-text")}
    return {"mauve": float(value), "mauve_settings": used}


def words(text: str) -> list[str]:
    """Words and runs of punctuation. Characters where there are next to no word boundaries."""
    found = _WORD.findall(text)
    return found if sum(map(len, found)) <= 20 * len(found) else [c for c in text if not c.isspace()]


def copied_share(row: list, counts: collections.Counter) -> float:
    """Share of the tokens of a sample that lie in a run of four which `counts` has at least twice."""
    copied = np.zeros(len(row), dtype=bool)
    for i, gram in enumerate(fourgrams(row)):
        if counts[gram] > 1:
            copied[i : i + 4] = True
    return float(copied.mean())


def fourgrams(row: list) -> list[tuple]:
    """Runs of four tokens, the same forwards and backwards, so that a mirrored text counts as a copy."""
    return [min(gram, gram[::-1]) for gram in zip(row, row[1:], row[2:], row[3:], strict=False)]


def repetitive(text: str, ids: list[int]) -> bool:
    """Whether a sample consists of runs that recur in it, in words, in what stands between spaces, or in tokens.

    A text mirrored in one of them is no mirror image in the others. Ids of nearly no entropy are left out: they come
    from a judge that does not know the words.
    """
    views = [words(text), text.split()] + [ids] * (unigram_entropy(ids) > 2)
    return any(copied_share(v, collections.Counter(fourgrams(v))) >= 0.98 for v in views if len(v) >= 20)


def degeneracy(texts: list[str], ids: list[list[int]]) -> list[str]:
    """Why a set of samples is no evidence for a good model, whatever its perplexity. Empty for honest text.

    Repetition is cheap under a judge (arXiv:2606.08417): cycles, mirrored halves, cloned rows, phrase banks. Works on
    words because subword `ids` depend on the tokenizer, and on at most 64 distinct samples because copies between
    samples of real text grow with their number. The README says how the thresholds were found.
    """
    reasons = []
    empty = sum(not text.strip() for text in texts) / len(texts)
    if empty >= 0.5:
        reasons.append(f"empty: {empty:.0%} of the samples hold no text")
    distinct = sorted(
        dict(zip(texts, ids, strict=True)).items()
    )  # sorted: flags must not depend on the order of samples
    if len(texts) > 1 and len(distinct) <= 0.5 * len(texts):
        reasons.append(f"cloned rows: {len(distinct)} distinct samples of {len(texts)}")
    long = [(text, row) for text, row in distinct if len(words(text)) >= 20]
    long = [long[i] for i in np.linspace(0, len(long) - 1, min(len(long), 64)).astype(int)]
    if not long:
        return reasons
    if np.mean([repetitive(text, row) for text, row in long]) >= 1 / 3:
        reasons.append("repetition: at least a third of the samples consist of runs that recur within them")
    rows = [words(text) for text, _ in long]
    if len(rows) >= 4:  # one page of a table or of a reference manual may look like anything
        pooled = collections.Counter(gram for row in rows for gram in fourgrams(row))
        copied = np.mean([copied_share(row, pooled) for row in rows])
        if copied >= 0.9:
            reasons.append(f"phrase bank: {copied:.0%} of the words lie in runs of four that recur in the set")
        spread = np.mean([unigram_entropy(row) / math.log(len(row)) for row in rows])
        if spread <= 0.45:
            reasons.append(f"low entropy: {spread:.0%} of that of a text in which no word recurs")
    return reasons


class Roles:
    """The special tokens of a tokenizer by what they are for, each as (token, id), or (None, None) if it has none.

    Attributes: bos, eos, pad, mask. Where a tokenizer has no bos or eos, its cls or sep stands in, as in the training
    code of MDLM. What is bos or eos is not pad or mask as well.
    """

    def __init__(self, tokenizer):
        def first(*names):
            tokens = [getattr(tokenizer, f"{name}_token", None) for name in names]
            token = next((token for token in tokens if token is not None), None)
            return token, None if token is None else tokenizer.convert_tokens_to_ids(token)

        self.bos, self.eos = first("bos", "cls"), first("eos", "sep")
        pad, mask = first("pad"), first("mask")
        self.pad = (None, None) if pad in (self.bos, self.eos) else pad
        self.mask = (None, None) if mask in (self.bos, self.eos) else mask


def readable(rows: list[list[int]], known, mask_id: int | None = None) -> tuple[list[list[int]], int]:
    """`rows` without the ids that stand for no text, those outside `known` and the mask, and how many these were."""
    kept = [[token for token in row if token in known and token != mask_id] for row in rows]
    return kept, sum(map(len, rows)) - sum(map(len, kept))


def replaced(texts: list[str], replacements: dict) -> list[str]:
    """The texts with every token of `replacements` replaced, in one pass."""
    pattern = "|".join(re.escape(token) for token in replacements if token is not None)
    return [re.sub(pattern, lambda match: replacements[match[0]] or "", text) for text in texts] if pattern else texts


def tokenize(predictions: list, judge: Judge, tokenizer) -> tuple[list[str], list[list[int]], list | None, int]:
    """What the judge reads: the predictions, with special tokens of the model as those of the judge.

    A bos in front becomes one bos of the judge, whether or not the judge's tokenizer adds it by itself. Other bos and
    every eos become those of the judge. Padding, masks and ids outside the vocabulary become nothing, and so does what
    the judge has no token for.

    Args:
        predictions: N strings or N lists of ids, of the judge's vocabulary if `tokenizer` is None.
        tokenizer: of the generating model, if it is known.

    Returns:
        The texts without a bos in front, their ids for the judge, their ids for the generating model (None without a
        tokenizer), and the number of ids that were left out because they stand for no text.
    """
    of_model, of_judge = Roles(judge.tokenizer if tokenizer is None else tokenizer), Roles(judge.tokenizer)
    own_rows, num_left_out = None, 0
    if isinstance(predictions[0], str):
        if tokenizer is not None:
            own_rows = tokenizer(predictions, add_special_tokens=False, verbose=False)["input_ids"]
        texts = replaced(predictions, {of_model.pad[0]: None, of_model.mask[0]: None})
        bos = of_model.bos[0]
        opened = [bos is not None and text.lstrip().startswith(bos) for text in texts]
        texts = [text.lstrip().removeprefix(bos) if o else text for text, o in zip(texts, opened, strict=True)]
    elif tokenizer is None:
        rows, num_left_out = readable(predictions, range(judge.vocab_size))
        return judge.tokenizer.batch_decode(rows, clean_up_tokenization_spaces=False), rows, None, num_left_out
    else:
        own_rows, num_left_out = readable(predictions, set(tokenizer.get_vocab().values()), of_model.mask[1])
        own_rows = [strip(row, of_model.pad[1]) for row in own_rows]
        opened = [row[:1] == [of_model.bos[1]] for row in own_rows]
        rows = [row[1:] if o else row for row, o in zip(own_rows, opened, strict=True)]
        rows = [[token for token in row if token != of_model.pad[1]] for row in rows]
        texts = tokenizer.batch_decode(rows, clean_up_tokenization_spaces=False)
    texts = replaced(texts, {of_model.bos[0]: of_judge.bos[0], of_model.eos[0]: of_judge.eos[0]})
    return texts, judge.read(texts, opened), own_rows, num_left_out


def as_lists(samples, name: str) -> list:
    """Samples with lists in place of arrays and tensors.

    Raises:
        ValueError: they are not all texts, and not all lists of ids.
    """
    if isinstance(samples, str):
        raise ValueError(f"{name} is a single string. Use a list of strings.")
    samples = samples.tolist() if hasattr(samples, "tolist") else samples
    if not isinstance(samples, list | tuple):
        raise ValueError(f"{name} is {samples!r:.60}. Use a list of strings or of lists of ids.")
    samples = [row.tolist() if hasattr(row, "tolist") else row for row in samples]
    for i, row in enumerate(samples):
        ids = isinstance(row, list | tuple) and all(type(token) is int and abs(token) < 2**63 for token in row)
        if not (isinstance(row, str) or ids) or isinstance(row, str) != isinstance(samples[0], str):
            raise ValueError(f"{name}[{i}] is {row!r:.60}. Use strings alone, or lists of whole numbers (ids) alone.")
    return samples


def strip(ids: list[int], pad_id: int | None) -> list[int]:
    """ids without the padding at either end."""
    kept = [i for i, token in enumerate(ids) if token != pad_id]
    return ids[kept[0] : kept[-1] + 1] if kept else []


def reservations(num_samples: int, num_left_out: int, num_truncated: int, max_length: int, similarity: dict) -> list:
    """What a reader of the figure should know, a sentence each."""
    notes = []
    if num_left_out:
        notes.append(f"{num_left_out} ids were left out: masks, or outside the vocabulary of the tokenizer.")
    if num_samples < FEW_SAMPLES:
        notes.append(f"Only {num_samples} samples: look at gen_ppl_se, and use hundreds for a figure to report.")
    if num_truncated:
        notes.append(f"{num_truncated} of {num_samples} samples were cut to max_length = {max_length} judge tokens.")
    if similarity:
        counts = [similarity["mauve_settings"][f"num_{name}"] for name in ("predictions", "references")]
        if min(counts) < FEW_FOR_MAUVE:
            notes.append(f"MAUVE of {counts[0]} samples and {counts[1]} references: its authors ask for thousands.")
    return notes


class GenPPL(evaluate.Metric):
    """Generative perplexity as an `evaluate` metric. The judge stays loaded between computes.

    All settings of `compute` (see its documentation) can be given here instead, which `evaluate.combine` needs.
    """

    def __init__(self, config_name: str | None = None, **kwargs):
        self._settings = {name: kwargs.pop(name, default) for name, default in SETTINGS.items()}
        super().__init__(config_name, **kwargs)
        self._check(self._settings)
        self._judge_key, self._judge = None, None
        self._references: tuple = (None, None, None)  # judge, rows, features

    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="arXiv:2406.07524 (MDLM) and arXiv:2506.10892 (DUO); on gaming the metric: arXiv:2606.08417",
            inputs_description=_KWARGS_DESCRIPTION,
            features=[
                datasets.Features({"predictions": datasets.Value("string")}),
                datasets.Features({"predictions": datasets.Sequence(datasets.Value("int64"))}),
            ],
            codebase_urls=["https://github.com/kuleshov-group/mdlm", "https://github.com/s-sahoo/duo"],
        )

    @staticmethod
    def _check(settings):
        unknown = sorted(set(settings) - set(SETTINGS))
        if unknown:
            raise ValueError(f"Unknown settings {unknown}. Use some of {sorted(SETTINGS)}.")
        if settings["mode"] not in MODES:
            raise ValueError(f"mode is {settings['mode']!r}. Use one of {MODES}.")
        if settings["dtype"] not in tuple(DTYPES):
            raise ValueError(f"dtype is {settings['dtype']!r}. Use one of {tuple(DTYPES)}.")
        for name, smallest in (("batch_size", 1), ("max_length", 2)):
            value = settings[name]
            if (value is not None or name == "batch_size") and (type(value) is not int or value < smallest):
                raise ValueError(f"{name} is {value!r}. Use an integer of at least {smallest}.")
        if not isinstance(settings["mauve_settings"], dict):
            raise ValueError(f"mauve_settings is {settings['mauve_settings']!r}. Use a dict of names and values.")
        for name in ("model_id", "model_revision", "device"):
            if not isinstance(settings[name], str | torch.device | None):
                raise ValueError(f"{name} is {settings[name]!r}. Use its name.")
        for name in ("tokenizer", "model_tokenizer"):
            if not (settings[name] is None or isinstance(settings[name], str) or callable(settings[name])):
                raise ValueError(f"{name} is {settings[name]!r:.60}. Use a tokenizer, or its hub id or folder.")
        references, unknown = settings["mauve_references"], sorted(set(settings["mauve_settings"]) - set(MAUVE))
        if unknown:
            raise ValueError(f"Unknown mauve_settings {unknown}. Use some of {sorted(MAUVE)}.")
        if isinstance(references, str) or references is not None and not getattr(references, "__len__", int)():
            raise ValueError(f"mauve_references is {references!r}. Use a list of texts or of lists of ids.")
        if references is not None and importlib.util.find_spec("mauve") is None:
            raise ImportError('MAUVE needs mauve-text: pip install "tokendrift-hf[mauve]", or pip install mauve-text.')

    def add_batch(self, *, predictions=None, references=None, **kwargs):
        """Add generated texts (list of str) or token ids (lists, array or tensor) to what `compute` will score."""
        predictions = as_lists(predictions, "predictions")
        if not predictions:
            raise ValueError("predictions is empty. Gen.-PPL needs at least one sample (an empty string is one).")
        super().add_batch(predictions=predictions, **kwargs)

    def add(self, *, prediction=None, reference=None, **kwargs):
        """Add one text or list of ids."""
        self.add_batch(predictions=[prediction], **kwargs)

    def compute(self, *, predictions=None, references=None, **kwargs):
        """Score the predictions given here and by `add_batch`. None on all but the main process."""
        if predictions is None and self.writer is None:
            raise ValueError("There is nothing to score. Pass predictions or call add_batch first.")
        self._check({**self._settings, **kwargs})  # before anything is written
        return super().compute(predictions=predictions, **kwargs)

    @property
    def judge(self) -> Judge:
        """The judge that the settings given at construction name, loaded if it is not yet."""
        return self._load_judge(self._settings)

    def _load_judge(self, settings) -> Judge:
        if settings["model"] is not None:
            if not callable(settings["model_tokenizer"]):
                raise ValueError("model is given without model_tokenizer. Pass the judge's tokenizer object as well.")
            return Judge(settings["model"], settings["model_tokenizer"], settings["model_revision"])
        if settings["model_id"] is None:
            raise ValueError('No judge is given. Pass model_id, such as "gpt2-large", or model and model_tokenizer.')
        found = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        device = settings["device"] or found
        key = (settings["model_id"], settings["model_revision"], settings["model_tokenizer"], device, settings["dtype"])
        if key != self._judge_key:
            dtype = DTYPES[settings["dtype"]]
            self._judge = Judge.load(settings["model_id"], settings["model_revision"], key[2], device, dtype)
            self._judge_key = key
        return self._judge

    def _mauve(self, judge: Judge, rows: list[list[int]], tokenizer, settings, max_length) -> dict:
        """MAUVE of the samples' judge ids. The features of the references are kept for the next compute."""
        length = min(max_length, judge.window)
        references = tokenize(as_lists(settings["mauve_references"], "mauve_references"), judge, tokenizer)[1]
        references = [row[:length] for row in references]
        if (judge.model, references) != self._references[:2]:
            self._references = (judge.model, references, judge.features(references, settings["batch_size"]))
        samples = judge.features([row[:length] for row in rows], settings["batch_size"])
        return mauve(samples, self._references[2], settings["mauve_settings"])

    def _compute(self, *, predictions, **kwargs):
        settings = {**self._settings, **kwargs}
        judge = self._load_judge(settings)
        tokenizer = settings["tokenizer"]
        max_length = settings["max_length"] or judge.window
        if isinstance(tokenizer, str):
            tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)

        # The samples as text, as ids of the judge, and as ids of the model if they came so. The judge scores its own.
        texts, judge_rows, own_rows, num_left_out = tokenize(list(predictions), judge, tokenizer)
        cut_rows = [row[:max_length] for row in judge_rows]
        similarity = {}
        if settings["mauve_references"] is not None:
            similarity = self._mauve(judge, cut_rows, tokenizer, settings, max_length)
        nll, num_tokens = score(judge, cut_rows, settings["mode"], settings["batch_size"])

        # Entropy and degeneracy are of the model's ids where there are any: they do not depend on the judge.
        rows = cut_rows if own_rows is None else own_rows
        reasons = degeneracy([text.replace(judge.tokenizer.eos_token or "\n", "\n") for text in texts], rows)
        num_truncated = sum(len(row) > max_length for row in judge_rows)
        notes = reservations(len(texts), num_left_out, num_truncated, max_length, similarity)
        for note in notes + reasons:
            warnings.warn(f"gen_ppl: {note}", stacklevel=2)
        gen_ppl, standard_error = perplexity(nll, num_tokens)
        # Everything that decides the value stands beside it.
        record = {
            "gen_ppl": gen_ppl,
            "gen_ppl_se": standard_error,
            **diversity(rows),
            "entropy_tokenizer": "judge" if own_rows is None else "model",
            "distinct_rows": len(set(texts)) / len(texts),
            "num_samples": len(texts),
            "num_tokens": sum(num_tokens),
            "num_empty": sum(not row for row in judge_rows),
            "num_truncated": num_truncated,
            "num_left_out": num_left_out,
            "degenerate": bool(reasons),
            "degenerate_reasons": reasons,
            "warnings": notes,
            "judge_id": judge.name,
            "judge_revision": judge.revision,
            "mode": settings["mode"],
            "dtype": judge.dtype,
            "max_length": max_length,
            "window": judge.window,
            "versions": {module.__name__: module.__version__ for module in (torch, transformers, datasets, evaluate)}
            | {"gen_ppl": VERSION},
            **similarity,
        }
        if settings["per_sample"]:
            record["per_sample"] = [
                {"nll": nll[i], "num_tokens": num_tokens[i], "entropy": unigram_entropy(rows[i])}
                for i in range(len(texts))
            ]
        return record
