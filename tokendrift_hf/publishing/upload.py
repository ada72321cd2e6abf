"""Uploads: the files of a finished model to its repository on the hub, and which ones they are."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.utils import filter_repo_objects
from transformers import TrainingArguments

IGNORED = ["_*", "checkpoint-*"]  # as Trainer.push_to_hub


def files_to_publish(folder: Path) -> dict[str, int]:
    """Name -> size in bytes of what a push of a model's directory uploads."""
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    return {name: sizes[name] for name in filter_repo_objects(sorted(sizes), ignore_patterns=IGNORED)}


def publish(folder: Path, args: TrainingArguments) -> str:
    """Upload a model's directory to `args.hub_model_id`, which is created if need be. Returns its address."""
    api = HfApi(token=args.hub_token)
    repo = api.create_repo(args.hub_model_id, private=args.hub_private_repo, exist_ok=True)
    api.upload_folder(
        repo_id=repo.repo_id,
        folder_path=folder,
        ignore_patterns=IGNORED,
        revision=args.hub_revision,
        commit_message="Refined model, with its results",
    )
    return str(repo)
