"""The folder of a Space: complete, pushed to a hub on the loopback interface, and started from what arrived there."""

from __future__ import annotations

import json
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from conftest import run_python, start_python
from fakehub import FakeHub
from processes import free_port
from toys import record, results

import tokendrift_hf
from tokendrift_hf.cli import main
from tokendrift_hf.demo.space import space_files, write_space

PACKAGE = Path(tokendrift_hf.__file__).parent


def test_the_folder_holds_an_app_its_requirements_a_card_and_the_package():
    files = space_files("owner/refined", "owner/base", judge="gpt2", max_length=64, max_samples=None)
    assert files["app.py"].decode().splitlines() == [
        "from tokendrift_hf.demo.serving import make_page",
        "",
        "page = make_page('owner/refined', base='owner/base', judge='gpt2', max_length=64)",
        "page.launch(host=None, port=None)",
        "page.wait()",
    ]
    assert {path.relative_to(PACKAGE.parent).as_posix() for path in PACKAGE.rglob("*.py")} <= set(files)
    assert {
        "tokendrift_hf/demo/page.css",
        "tokendrift_hf/demo/page.js",
        "tokendrift_hf/demo/about.md",
        "tokendrift_hf/py.typed",
    } <= set(files)
    assert not [name for name in files if "__pycache__" in name]
    assert sum(map(len, files.values())) < 2e6


def test_the_card_tells_the_hub_how_to_run_it():
    _, front, body = space_files("owner/refined", "owner/base")["README.md"].decode().split("---\n", 2)
    fields = yaml.safe_load(front)
    assert fields["sdk"] == "gradio" and fields["sdk_version"] == version("gradio")
    assert fields["app_file"] == "app.py" and fields["python_version"] == "3.11"
    assert fields["models"] == ["owner/refined", "owner/base"]
    assert "https://huggingface.co/owner/base" in body


def test_requirements_are_those_of_the_package_without_what_the_space_brings(monkeypatch):
    declared = [
        "torch>=2.6",
        "numpy",
        'gradio<7,>=6.31; extra == "demo"',
        'tokendrift-hf[eval]; extra == "demo"',
        'evaluate<0.5,>=0.4.6; extra == "eval"',
        'matplotlib; extra == "eval"',
        'ruff; extra == "test"',
    ]
    monkeypatch.setattr("tokendrift_hf.demo.space.requires", lambda name: declared)
    lines = space_files("owner/model")["requirements.txt"].decode().splitlines()
    assert lines == ["evaluate<0.5,>=0.4.6", "matplotlib", "numpy", "torch>=2.6"]


@pytest.mark.parametrize("name", ["out/quickstart/refined", "/abs/model", "./here", "a/b/c", "has space", ""])
def test_a_local_model_is_refused(name):
    with pytest.raises(ValueError, match="a local path. A Space loads from the hub: push it, and give its id"):
        space_files("owner/model", name)


def test_a_local_tokenizer_is_refused():
    with pytest.raises(ValueError, match="tokenizer is './tokens', a local path"):
        space_files("owner/model", tokenizer="./tokens")


def test_a_folder_that_exists_is_refused_if_it_holds_a_directory_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner/model").mkdir(parents=True)
    with pytest.raises(ValueError, match="model is 'owner/model', a local path"):
        space_files("owner/model")


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds something already, and nothing is overwritten"):
        write_space({"app.py": b""}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


PUSH = """
    from huggingface_hub import HfApi

    api = HfApi()
    for repo, folder, kind in (("base", MODEL, "model"), ("refined", MODEL, "model"), ("page", SPACE, "space")):
        api.create_repo(f"tester/{repo}", repo_type=kind, space_sdk="gradio" if kind == "space" else None)
        api.upload_folder(repo_id=f"tester/{repo}", repo_type=kind, folder_path=folder)
"""


def test_a_pushed_space_starts_from_what_arrived_on_the_hub(text_files, tmp_path, capsys):
    """With nothing of this package installed: the Space brings it, and takes the models from the hub."""
    evaluation, folder = tmp_path / "results.json", tmp_path / "space"
    evaluation.write_text(json.dumps(results([record("base", 0, 9.0, 2.0)])))
    call = ["demo", "tester/refined", "tester/base", "--results", str(evaluation), "--space", str(folder)]
    listed = []
    for more in (["--dry-run"], []):
        assert not folder.exists()
        assert main([*call, *more]) == 0
        listed.append([line for line in capsys.readouterr().out.splitlines() if " bytes  " in line])
    assert len(listed[0]) > 50 and listed[0] == listed[1], "--dry-run lists what is written"
    with FakeHub() as hub:
        names = f"    MODEL, SPACE = {str(text_files / 'base')!r}, {str(folder)!r}\n"
        run_python(names + PUSH, tmp_path / "push", isolated=False, **hub.environment)
        arrived = hub.repos["tester/page"]
        assert {"app.py", "requirements.txt", "README.md", "results.json", "tokendrift_hf/demo/page.py"} <= set(arrived)
        for name, content in arrived.items():
            path = tmp_path / "arrived" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

        port = free_port()
        code = "import runpy, sys\nsys.path.insert(0, '.')\nrunpy.run_path('app.py', run_name='__main__')"
        server = start_python(code, tmp_path / "arrived", GRADIO_SERVER_PORT=str(port), **hub.environment)
        try:
            config = json.loads(fetched(f"http://127.0.0.1:{port}/config", server))
        finally:
            server.terminate()
            server.communicate(timeout=60)
    shown = json.dumps(config["components"])
    assert "tester/refined" in shown and "tester/base" in shown
    assert "Further down at equal entropy is better" in shown


def fetched(url: str, server, seconds: float = 120.0) -> bytes:
    """What the server answers once it is up."""
    end = time.monotonic() + seconds
    while True:
        try:
            return urllib.request.urlopen(url, timeout=10).read()
        except OSError:
            assert server.poll() is None, server.communicate()[0]
            assert time.monotonic() < end, "the server did not start"
            time.sleep(0.1)
