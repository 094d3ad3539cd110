"""Installs what `make install` needs into the environment that runs this file: with uv, which takes
less than a minute, or with pip, if uv cannot be had.

    .venv/bin/python requirements/install.py

uv does not read pip's settings, so the indexes and folders of wheels that pip is configured with
are handed over. Without uv, pip takes about five minutes on two cores. Python writes the bytecode
that uv leaves out when it first imports a module; where PYTHONDONTWRITEBYTECODE forbids that, as in
many images, every process would compile torch anew, so it is written here.
"""

import ast
import compileall
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
# PyPI's plain torch brings gigabytes of CUDA; the CPU build comes from wherever pip finds it, else
# from PyTorch's index
TORCH = ["torch==2.13.0+cpu"]
PYTORCH_INDEX = ["--index-url", "https://download.pytorch.org/whl/cpu"]
ALL = ["-r", "requirements/cpu.txt", "-c", "requirements/constraints.txt"]
# imported by tests of quantize alone, from a folder of its own, because it requires another transformers
QUANTIZE = ["--no-deps", "--upgrade", "--target", ".venv/quantize", "-r", "requirements/quantize.txt"]
UV_NAMES = {  # pip's settings -> uv's, and what stands between several values
    "find-links": ("UV_FIND_LINKS", ","),
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
}
ORDER = ("global", "user", "site", "install", ":env:")  # of pip's settings, the last one counts


def pip(*words: str) -> bool:
    return subprocess.run([sys.executable, "-m", "pip", "install", "-q", *words], cwd=HERE.parent).returncode == 0


def uv_settings() -> dict[str, str]:
    """Return pip's settings as uv's environment variables. What is set for uv stays."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    settings_of_pip = list[tuple[int, str, str]]()
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in ORDER and name in UV_NAMES:
            settings_of_pip.append((ORDER.index(section), name, str(ast.literal_eval(value))))
    settings = dict[str, str]()
    for _, name, value in sorted(settings_of_pip):
        variable, between = UV_NAMES[name]
        there = [part for part in value.split() if is_there(part)]
        if there and variable not in os.environ:
            settings[variable] = between.join(there)
    return settings


def is_there(place: str) -> bool:
    """Tell whether a folder exists, which pip passes over otherwise; True for an address."""
    path = place.removeprefix("file://")
    return not path.startswith("/") or Path(path).exists()


def uv(*words: str) -> bool:
    # pip takes the newest version of all indexes; uv, without the option, that of the first
    command = [
        Path(sysconfig.get_path("scripts"), "uv"),
        "pip",
        "install",
        "-q",
        "--index-strategy",
        "unsafe-best-match",
    ]
    environment = os.environ | uv_settings() | {"VIRTUAL_ENV": sys.prefix}
    return subprocess.run([*command, *words], cwd=HERE.parent, env=environment).returncode == 0


def main() -> None:
    installers = [uv, pip] if pip("uv") else [pip]
    for words, last_resort in ((TORCH, PYTORCH_INDEX), (ALL, []), (QUANTIZE, [])):
        if not any(install(*words) for install in installers) and not (last_resort and pip(*words, *last_resort)):
            sys.exit(f"{' '.join(words)} could not be installed; see the lines above")
    if sys.dont_write_bytecode:
        compileall.compile_dir(sysconfig.get_path("purelib"), quiet=2, workers=0)


if __name__ == "__main__":
    main()
