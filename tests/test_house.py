"""The arrows of the house: which package may import which, which heavy libraries each may load; its installer."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = {  # package -> its folder
    "ddp_vllm": ROOT / "ddp_vllm",
    "ddp_prune": ROOT / "prune" / "ddp_prune",
    "ddp_plugins": ROOT / "plugins" / "ddp_plugins",
    "ddp_benchmarks": ROOT / "benchmarks" / "ddp_benchmarks",
}
TABLE = ROOT / "ddp_vllm" / "api.py"  # the one file of the ground floor that names the packages above it
ABOVE: dict[str, tuple[Path, str, tuple[str, ...], tuple[str, ...]]] = {
    # part -> its folder and files, modules of ours that it does not name, and exceptions from these
    "ground floor": (ROOMS["ddp_vllm"], "**/*.py", ("ddp_prune", "ddp_plugins", "ddp_benchmarks"), ()),
    "what a checkpoint is": (
        ROOMS["ddp_vllm"], "*.py", ("ddp_vllm.pages", "ddp_vllm.gguf", "ddp_vllm.hub", "ddp_vllm.conversion"), ()
    ),
    "plugins": (ROOMS["ddp_plugins"], "**/*.py", ("ddp_prune", "ddp_benchmarks"), ()),
    "benchmarks": (ROOMS["ddp_benchmarks"], "**/*.py", ("ddp_prune", "ddp_plugins"), ("ddp_prune.text",)),
    "prune": (
        ROOMS["ddp_prune"], "**/*.py",
        ("ddp_plugins", "ddp_benchmarks", "ddp_vllm.pages.report", "ddp_vllm.pages.pictures"), (),
    ),
    "core": (ROOMS["ddp_prune"] / "core", "*.py", ("ddp_prune",), ("ddp_prune.core",)),  # no recipes, files or commands
    "text": (ROOMS["ddp_prune"] / "text", "*.py", ("ddp_prune",), ("ddp_prune.text",)),
    "models": (
        ROOMS["ddp_prune"] / "models", "*.py", ("ddp_prune",),
        ("ddp_prune.models", "ddp_prune.core", "ddp_prune.text", "ddp_prune.settings"),
    ),
    "tests": (ROOT / "tests", "**/*.py", ("ddp_prune.",), ()),
}  # fmt: skip
SEES_PRUNE = ("seams.py", "recover", "gpu", "nightly", "test_house.py")  # of the tests
HEAVY = ("torch", "vllm", "transformers", "datasets", "accelerate", "lm_eval", "matplotlib", "rich", "numpy")
LIGHT = {  # code -> the libraries that it must not load
    "import ddp_benchmarks.verbs; from ddp_vllm.cli import main; main(['--help'], standalone_mode=False)": HEAVY,
    "import ddp_vllm; ddp_vllm.prune": (*HEAVY, "click"),
    "import ddp_vllm.conversion.verb, ddp_plugins.register": ("torch", "vllm", "transformers", "matplotlib", "rich"),
}


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (level, module) of every import, those inside functions included; level 0 is absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or ""


def _named(path: Path) -> set[str]:
    """Return the modules of ours that a file imports, or names in a string of code, as `importlib` takes them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = [*ast.walk(tree)]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    strings = [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings]
    texts = [module for level, module in _imports(tree) if level == 0] + [s for s in strings if isinstance(s, str)]
    return {name for text in texts for name in re.findall(rf"\b(?:{'|'.join(ROOMS)})\b[\w.]*", text)}


@pytest.mark.parametrize("part", ABOVE)
def test_what_lies_below_names_nothing_above(part: str) -> None:
    folder, pattern, above, allowed = ABOVE[part]
    files = {file for file in folder.glob(pattern) if file.relative_to(folder).parts[0] not in SEES_PRUNE} - {TABLE}
    assert files
    for file in files:
        named = {name for name in _named(file) if name.startswith(above)}
        assert not {name for name in named if not name.startswith(allowed or ("none",))}, file


def test_the_table_of_verbs_names_the_packages_that_have_some() -> None:
    assert {name.partition(".")[0] for name in _named(TABLE)} == set(ROOMS) - {"ddp_plugins"}


def test_travelling_files_import_nothing_of_ours_but_each_other() -> None:
    files = [*(ROOMS["ddp_vllm"] / "remote_code").glob("*.py")]
    imports = {file.stem: [*_imports(ast.parse(file.read_text(encoding="utf-8")))] for file in files}
    assert (1, "widths") in imports["configuration_ddp"]  # the walk does see relative imports
    for name, modules in imports.items():
        for level, module in modules:
            where = f"remote_code/{name}.py imports {'.' * level}{module}"
            assert level <= 1 and not module.startswith(tuple(ROOMS)), where
            assert level == 0 or module in imports, where
    torch_free = {module.partition(".")[0] for name in ("tensors", "files", "widths") for _, module in imports[name]}
    assert torch_free <= set(sys.stdlib_module_names) | {"tensors", "files"}


@pytest.mark.parametrize("code", LIGHT)
def test_nothing_heavy_is_loaded_before_it_is_used(code: str) -> None:
    code = f"import sys; {code}; print('LOADED', *sorted(sys.modules.keys() & {{*{LIGHT[code]!r}}}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.splitlines()[-1].split() == ["LOADED"]


def test_a_library_that_python_compiles_anew_may_warn_of_its_source(tmp_path: Path) -> None:
    """torchao has a backslash in a docstring: an error in every test wherever no bytecode was kept."""
    (tmp_path / "a_library.py").write_text('"""\\."""\n\n\ndef same(number):\n    return number is 1\n')
    (tmp_path / "test_it.py").write_text(
        "import warnings\n\nimport pytest\n\nimport a_library\n\n\n"
        "def test_others_are_errors() -> None:\n"
        "    with pytest.raises(UserWarning):\n        warnings.warn('ours')\n    assert a_library\n"
    )
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), str(tmp_path)]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout


def test_uv_gets_the_indexes_and_folders_of_pip(tmp_path: Path) -> None:
    """By `make install`. Folders that do not exist are passed over, as pip does; what is set for uv stays."""
    (tmp_path / "wheels").mkdir()
    (tmp_path / "pip.conf").write_text(
        f"[global]\nfind-links = {tmp_path}/wheels\n  {tmp_path}/none\nindex-url = https://global.example/simple\n"
        "extra-index-url = https://one.example/simple https://two.example/simple\n"
    )
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    own = {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "PIP_INDEX_URL": "https://env.example/simple"}
    words = [sys.executable, "-c", "import install, json; print(json.dumps(install.uv_settings()))"]
    printed = subprocess.check_output(
        words, cwd=ROOT / "requirements", env=inherited | own | {"UV_INDEX": "https://mine.example"}
    )
    settings = json.loads(printed)
    assert settings["UV_FIND_LINKS"] == f"{tmp_path}/wheels"
    assert settings["UV_DEFAULT_INDEX"] == "https://env.example/simple"  # the environment before the file
    assert "UV_INDEX" not in settings
    printed = subprocess.check_output(words, cwd=ROOT / "requirements", env=inherited | own)
    assert json.loads(printed)["UV_INDEX"] == "https://one.example/simple https://two.example/simple"
