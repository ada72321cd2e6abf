"""The folder of a Space on the hub, which shows the page of published models to anyone."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from huggingface_hub import SpaceCard, SpaceCardData
from huggingface_hub.utils import validate_repo_id
from packaging.requirements import Requirement

from .frontier import RESULTS, read_results

PACKAGE = Path(__file__).parents[1]
_SHIPPED = (".py", ".md", ".json", ".css", ".js", ".typed")
_CARD = """---
{card_data}
---

# {title}

{models} side by side, step by step: a page of TokenDrift for Hugging Face. Duplicate this Space and change the names in
`app.py` to show your own models. The folder `tokendrift_hf` is the package that draws the page (Apache-2.0).
"""


def space_files(
    model: str, base: str | None = None, *, judge: str | None = None, results: Path | None = None, **more
) -> dict[str, bytes]:
    """Name -> content of every file of the Space.

    The package itself is among them, so what runs there is what runs here, whether an index has it or not.

    Args:
        model, base, judge: hub ids.
        results: a results.json to take along.
        more: further arguments of `make_page`. What is None is left out.

    Raises:
        ValueError: a model is no hub id, or the file of results cannot be read.
        ImportError: the extra `demo`, whose versions the files name, is not installed.
    """
    named = {"base": base, "judge": judge, "results": None if results is None else RESULTS} | more
    named = {name: value for name, value in named.items() if value is not None}
    for name, hub_id in {"model": model, "base": base, "judge": judge, "tokenizer": more.get("tokenizer")}.items():
        if hub_id is not None:
            _check_hub_id(name, hub_id)
    if results is not None:
        read_results(results)
    arguments = ", ".join([repr(model), *(f"{name}={value!r}" for name, value in named.items())])
    app = f"""from tokendrift_hf.demo.serving import make_page

page = make_page({arguments})
page.launch(host=None, port=None)
page.wait()
"""
    files = {"app.py": app, "requirements.txt": "\n".join([*_requirements(), ""]), "README.md": _card(model, base)}
    content = {name: text.encode() for name, text in files.items()}
    if results is not None:
        content[RESULTS] = results.read_bytes()
    for path in sorted(PACKAGE.rglob("*")):
        if path.is_file() and path.suffix in _SHIPPED:
            content[path.relative_to(PACKAGE.parent).as_posix()] = path.read_bytes()
    return content


def write_space(files: dict[str, bytes], folder: Path) -> None:
    """Write the files into a folder that does not exist or is empty.

    Raises:
        ValueError: the folder holds something.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} holds something already, and nothing is overwritten. Name another folder.")
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _check_hub_id(name: str, hub_id: str) -> None:
    try:
        validate_repo_id(hub_id)
        is_local = Path(hub_id).exists()
    except ValueError:
        is_local = True
    if is_local:
        raise ValueError(f"{name} is {hub_id!r}, a local path. A Space loads from the hub: push it, and give its id.")


def _requirements() -> list[str]:
    """What the page needs, as this package declares it. gradio comes with the Space."""
    lines = [Requirement(line) for line in requires("tokendrift-hf") or []]
    extras, needed = ["demo"], set()
    for extra in extras:  # an extra may ask for others of this package, which then join the list
        for line in lines:
            if line.marker is not None and not line.marker.evaluate({"extra": extra}):
                continue
            if line.name == "tokendrift-hf":
                extras += sorted(line.extras - set(extras))
            elif line.name != "gradio":
                needed.add(f"{line.name}{line.specifier}")
    return sorted(needed)


def _card(model: str, base: str | None) -> str:
    try:
        gradio = version("gradio")
    except PackageNotFoundError:
        raise ImportError('A Space runs the gradio installed here: pip install "tokendrift-hf[demo]".') from None
    data = SpaceCardData(
        title=f"TokenDrift: {model.rpartition('/')[2]}",
        sdk="gradio",
        sdk_version=gradio,
        python_version="3.11",
        app_file="app.py",
        license="apache-2.0",
        models=[name for name in (model, base) if name is not None],
        tags=["diffusion-language-model", "tokendrift"],
    )
    names = " and ".join(f"[{name}](https://huggingface.co/{name})" for name in (base, model) if name is not None)
    return str(SpaceCard(_CARD.format(card_data=data.to_yaml(), title=data.title, models=names)))
