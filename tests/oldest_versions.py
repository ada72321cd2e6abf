"""The tests on the oldest versions that setup.cfg allows. By hand:

    python tests/oldest_versions.py FOLDER [arguments of pytest]

FOLDER gets a virtual environment with every lower bound of install_requires and of the extras pinned, made once. On
Linux the index has torch with CUDA alone. Its wheel (770 MB) is installed without NVIDIA's libraries (3 GB): libraries
with the same symbols, all of which do nothing, stand in for them, and say that there is no device. Needs gcc and nm.
"""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
import venv
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BESIDE_TORCH = ["filelock", "typing-extensions", "networkx", "jinja2", "fsspec", "sympy"]  # what it needs
NO_DEVICE = 100  # cudaErrorNoDevice


def requirements() -> tuple[list[str], list[str]]:
    """The lower bounds as pins, and the names that have none."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    text = "\n".join([setup["options"]["install_requires"], *setup["options.extras_require"].values()])
    lines = [line for line in text.split() if not line.startswith("tokendrift-hf")]
    pins = [re.sub(r">=([^,]+).*", r"==\1", line) for line in lines if ">=" in line]
    return pins, [line for line in lines if ">=" not in line]


def install(python: Path) -> None:
    pins, free = requirements()
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    pip = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    subprocess.run([*pip, "--no-deps", torch], check=True)
    subprocess.run([*pip, *BESIDE_TORCH], check=True)
    packages = Path(
        subprocess.check_output([python, "-c", "import site; print(site.getsitepackages()[0])"]).decode().strip()
    )
    (metadata,) = packages.glob("torch-*.dist-info/METADATA")
    kept = [line for line in metadata.read_text().split("\n") if not re.match(r"Requires-Dist: (nvidia|triton)", line)]
    metadata.write_text("\n".join(kept))
    stand_in_for_cuda(packages / "torch/lib")
    subprocess.run([*pip, *pins, *free], check=True)
    subprocess.run([*pip, "--no-deps", "--editable", ROOT], check=True)  # for its metadata


def stand_in_for_cuda(folder: Path) -> None:
    """Compile the libraries that torch's are linked with and that are not there: each symbol does nothing."""
    there = [path for path in folder.glob("lib*.so*") if not path.is_symlink()]
    needed, symbols = set(), defaultdict(set)
    for path in there:
        dynamic = subprocess.check_output(["readelf", "--dynamic", "--wide", path], text=True)
        needed |= set(re.findall(r"\(NEEDED\).*\[(lib(?:cu|nv|nccl)[\w.-]+)\]", dynamic))
        for line in subprocess.check_output(["nm", "--dynamic", "--undefined-only", path], text=True).splitlines():
            name, _, version = line.split()[-1].partition("@")
            symbols[version].add(name)
    # What has no version may be anywhere.
    symbols[""] -= {line.split()[-1] for path in there for line in _defined(path)}
    symbols[""] = {name for name in symbols[""] if re.match(r"_?_?(cu|nv|nccl)", name)}
    needed -= {path.name for path in there}
    for library in sorted(needed):
        names = symbols[library] | (symbols[""] if library == min(needed) else set())
        code = "".join(
            f"long {name}(void) {{ return {NO_DEVICE if name == 'cudaGetDeviceCount' else 0}; }}\n"
            for name in sorted(names)
        )
        versions = f"{library} {{ global: *; }};"
        (folder / "versions.txt").write_text(versions)
        how = [
            "-shared",
            "-fPIC",
            "-w",
            "-xc",
            "-",
            f"-Wl,-soname,{library}",
            f"-Wl,--version-script={folder}/versions.txt",
        ]
        subprocess.run(["gcc", *how, "-o", folder / library], input=code.encode(), check=True)


def _defined(path: Path) -> list[str]:
    return subprocess.check_output(["nm", "--dynamic", "--defined-only", path], text=True).splitlines()


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    folder = Path(sys.argv[1]).resolve()
    python = folder / "bin/python"
    if not (folder / "complete").is_file():
        venv.create(folder, with_pip=True, clear=True)
        install(python)
        (folder / "complete").touch()
    print(subprocess.check_output([python, "-m", "pip", "freeze"], text=True))
    return subprocess.run([python, "-m", "pytest", *sys.argv[2:]], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
