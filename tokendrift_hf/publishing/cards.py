"""Model cards: what a run did, written beside its weights and uploaded with them."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import asdict, dataclass, field
from enum import Enum
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import PreTrainedModel, TrainingArguments

from .. import __version__
from ..files import write_text
from ..markdown import quoted
from ..models.lora import base_of
from ..objective.objectives import name_of
from .methods import PAPERS, sentences_on

# Licences of the assets, from the table in the paper's appendix.
LICENCES = {
    "kuleshov-group/mdlm-owt": ("apache-2.0", "MDLM checkpoint and code: Apache-2.0"),
    "s-sahoo/duo": ("apache-2.0", "DUO checkpoint and code: Apache-2.0"),
    "Skylion007/openwebtext": ("cc0-1.0", "OpenWebText: CC0-1.0"),
    "gpt2-large": ("mit", "GPT-2 Large, which scored the samples: Modified MIT"),
    "openai-community/gpt2-large": ("mit", "GPT-2 Large, which scored the samples: Modified MIT"),
}
ALIASES = {"openwebtext": "Skylion007/openwebtext"}
OF_ADAPTERS = (
    "r lora_alpha target_modules lora_dropout bias use_dora use_rslora rank_pattern alpha_pattern modules_to_save"
).split()


@dataclass
class Card:
    """The facts on a model card. JSON-serialisable, and free of local paths.

    Attributes:
        kind: template: "full" (all weights refined), "lora" (adapters), "base" (trained on its own likelihood alone).
        model_class: "MDLMForMaskedLM" or "DUOForMaskedLM", or a class of another family.
        auto_class: of another family, the class of transformers that loads it. Empty: it comes with code of its own.
            None: a class of this package.
        repo: hub id of the model. None: not published.
        base: hub id of the model it started from, or the name of a local directory. Empty: made from scratch.
        base_is_local: whether `base` is a directory here.
        base_revision: commit or revision of `base`.
        has_tokenizer: whether a tokenizer lies beside the weights.
        settings: name -> value of every hyperparameter.
        adapters: the same for the adapters.
        data: what it was trained on, under the names of the recipe's fields.
        losses: NELBO in nats per token on held-out text, "before" and "after".
        results: rows of the sampling table for this model: num_steps, temperature, gen_ppl, entropy and their SDs.
        evaluation: judge, sampler, number of samples.
        table: the whole sampling table in Markdown, with the models that it compares with.
    """

    kind: str
    model_class: str
    auto_class: str | None = None
    repo: str | None = None
    base: str = ""
    base_is_local: bool = False
    base_revision: str | None = None
    has_tokenizer: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    adapters: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    results: list[dict] = field(default_factory=list)
    evaluation: dict[str, Any] = field(default_factory=dict)
    table: str = ""

    @classmethod
    def of_run(
        cls, model: PreTrainedModel, args: TrainingArguments, settings: dict[str, Any], *, has_tokenizer: bool
    ) -> Card:
        """What a trainer knows: the model (with adapters or without) before training, its arguments, and those of
        them that decide the result."""
        peft_configs = list(getattr(model, "peft_config", {}).values())
        base = base_of(model)
        name, is_local = _public_name(base.name_or_path or "")
        settings = {name: _json_value(value) for name, value in settings.items()}
        settings["global_batch_size"] = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        adapters = {}
        for config in peft_configs[:1]:
            adapters = {name: _json_value(getattr(config, name)) for name in OF_ADAPTERS if getattr(config, name, None)}
        return cls(
            kind="lora" if peft_configs else "base" if args.objective == "none" else "full",
            model_class=type(base).__name__,
            auto_class=getattr(base, "auto_class", None),
            repo=args.hub_model_id,
            base=name,
            base_is_local=is_local,
            base_revision=getattr(base.config, "_commit_hash", None),
            has_tokenizer=has_tokenizer,
            settings=settings,
            adapters=adapters,
        )

    def describe_data(self, data: dict[str, Any]) -> None:
        """The training text, under the names of the recipe's fields. A path becomes the name of its file."""
        name, is_local = _public_name(ALIASES.get(data["dataset"], data["dataset"]))
        self.data = data | {"dataset": name, "is_local": is_local or name == "documentation"}

    def add_losses(self, before: float | None, after: float | None) -> None:
        """The NELBO on held-out text, in nats per token."""
        self.losses = {name: x for name, x in (("before", before), ("after", after)) if _finite(x)}

    def add_results(self, rows: list, label: str, judge: str, num_samples: int, sampler: str, table: str = "") -> None:
        """The rows of a comparison (`evaluation.comparison.ResultRow`). Those with this label are the model's own."""
        self.results = [asdict(row) for row in rows if row.model == label and _finite(row.gen_ppl)]
        name, is_local = _public_name(judge)
        judge = f"a local model named {name}" if is_local else name
        self.evaluation = {"judge": judge, "num_samples": num_samples, "sampler": sampler}
        self.table = table

    def render(self) -> ModelCard:
        """The card, with its metadata."""
        folder = files(__package__) / "model_cards"
        template = "".join((folder / name).read_text(encoding="utf-8") for name in (f"{self.kind}.md", "rest.md"))
        assets = [self.base, self.data.get("dataset"), self.evaluation.get("judge")]
        return ModelCard.from_template(
            self._metadata(),
            template_str=template,
            card=self,
            quoted=quoted,
            name=self.objective_name,
            method=sentences_on(self.settings),
            paper=PAPERS.get(self.settings.get("objective")),
            title=quoted(self.repo.rpartition("/")[2]) if self.repo else _title(self),
            location=_literal(self.repo or "path/to/this/directory"),
            code=self._code(),
            origin=self._origin(),
            steps=sorted({row["num_steps"] for row in self.results}) or [4, 8, 16],
            licences=list(dict.fromkeys(LICENCES[name][1] for name in assets if name in LICENCES)),
            version=__version__,
        )

    @property
    def objective_name(self) -> str:
        """What people call the objective of the training."""
        return name_of(self.settings.get("objective", "feature"), self.settings.get("mmd_credit", 1))

    def save(self, folder: Path) -> None:
        """Write README.md."""
        write_text(folder / "README.md", str(self.render()))

    def _code(self) -> dict[str, str]:
        """Lines of Python for the template: what is imported, and how a model and the base of adapters are loaded."""
        base = f"path/to/{self.base or 'the-base'}" if self.base_is_local or not self.base else self.base
        base = _literal(base) + (f", revision={_literal(self.base_revision)}" if self.base_revision else "")
        if self.auto_class is None:
            ours = f"from tokendrift_hf import {self.model_class}\nfrom transformers import AutoTokenizer"
            return {
                "imports": ours if self.kind == "lora" else "from transformers import AutoModel, AutoTokenizer",
                "model": "AutoModel.from_pretrained(repo, trust_remote_code=True)",
                "base": f"{self.model_class}.from_pretrained({base})",
            }
        if self.auto_class:
            native = f"from transformers import {self.auto_class}, AutoTokenizer"
            return {
                "imports": f"from tokendrift_hf import as_diffusion\n{native}",
                "model": f"as_diffusion({self.auto_class}.from_pretrained(repo))",
                "base": f"as_diffusion({self.auto_class}.from_pretrained({base}), tokenizer=tokenizer)",
            }
        return {
            "imports": "from tokendrift_hf.models.loading import load_model\nfrom transformers import AutoTokenizer",
            "model": "load_model(repo, trust_remote_code=True)",
            "base": f"load_model({base}, trust_remote_code=True)",
        }

    def _origin(self) -> str:
        if not self.base:
            return "It was not loaded from anywhere, but made in the program that trained it."
        if self.base_is_local:
            return f"It starts from a local checkpoint named {quoted(self.base)}."
        revision = f", revision {quoted(self.base_revision)}" if self.base_revision else ""
        return f"It starts from [{self.base}](https://huggingface.co/{self.base}){revision}."

    def _metadata(self) -> ModelCardData:
        process = "uniform-state-diffusion" if self.model_class.startswith("DUO") else "masked-diffusion"
        tags = ["diffusion-language-model", process]
        tags += ["tokendrift"] if self.objective_name == "TokenDrift" and self.kind != "base" else []
        tags += ["lora"] if self.kind == "lora" else [] if self.auto_class else ["custom_code"]
        optional: dict[str, Any] = {}
        if self.base and not self.base_is_local:
            optional["base_model"] = self.base
            optional["base_model_relation"] = "adapter" if self.kind == "lora" else "finetune"
        if self.base in LICENCES:
            optional["license"] = LICENCES[self.base][0]
        if self.data and not self.data["is_local"]:
            optional["datasets"] = [self.data["dataset"]]
        if self.results:
            optional["model_name"] = self.repo.rpartition("/")[2] if self.repo else _title(self)
            optional["eval_results"] = [result for row in self.results for result in self._eval_results(row)]
        return ModelCardData(
            library_name="peft" if self.kind == "lora" else "transformers",
            tags=tags,
            **optional,
        )

    def _eval_results(self, row: dict) -> list[EvalResult]:
        settings = {name: row[name] for name in ("num_steps", "temperature", "num_seeds")} | self.evaluation
        names = (("gen_ppl", "Gen.-PPL"), ("entropy", "entropy (nats)"))
        return [
            EvalResult(
                task_type="text-generation",
                task_name="Unconditional generation",
                dataset_type="samples",
                dataset_name=f"{self.evaluation['num_samples']} samples a seed",
                dataset_config=f"steps={row['num_steps']},temperature={row['temperature']:g}",
                metric_type=metric,
                metric_name=f"{name} at {row['num_steps']} steps",
                metric_value=row[metric],
                metric_args=settings,
            )
            for metric, name in names
            if _finite(row[metric])
        ]


def _title(card: Card) -> str:
    family = {"MDLMForMaskedLM": "MDLM", "DUOForMaskedLM": "DUO"}.get(card.model_class, card.model_class)
    name = card.objective_name
    return {"full": f"{family} refined with {name}", "lora": f"{name[0].upper()}{name[1:]} adapters for {family}"}.get(
        card.kind, f"{family} diffusion language model"
    )


def _public_name(name: str) -> tuple[str, bool]:
    """What may be told of a model or data set, and whether it is local.

    Only what is a valid id is shown as one. Of a path or an address its last part is told, without what follows a
    question mark, which may be a key.
    """
    try:
        validate_repo_id(name)
        is_local = os.path.exists(name)
    except HFValidationError:
        is_local = bool(name)
    if not is_local:
        return name, False
    path = os.path.realpath(name) if os.path.exists(name) else re.split(r"[?#]", name)[0]
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1].rpartition("@")[2], True


def _literal(text: str) -> str:
    """A string of Python in double quotes, which neither it nor a fence around it can leave."""
    return json.dumps(text).replace("`", r"\u0060")


def _finite(x) -> bool:
    return isinstance(x, (int, float)) and math.isfinite(x)


def _json_value(value):
    """A value that JSON and YAML know."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (set, tuple)):
        return sorted(value)
    return value if isinstance(value, (str, int, float, bool, list, dict, type(None))) else str(value)
