"""The arrows of the house: which package may import which, and which heavy libraries each may load."""

import ast
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
# package -> the others it may import; the ground floor is for all
ARROWS = {
    "ddp_benchmarks": {"ddp_prune"},  # its room `text` alone, so that both read the same chats
}
TABLE = ROOT / "ddp_vllm" / "api.py"  # the one file of the ground floor that names the packages above it
HEAVY = ("torch", "vllm", "transformers", "datasets", "accelerate", "lm_eval", "matplotlib", "rich", "numpy")
LIGHT = {  # code -> the libraries that it must not load
    "from ddp_vllm.cli import main; main(['--help'], standalone_mode=False)": HEAVY,
    "import ddp_vllm; ddp_vllm.prune": (*HEAVY, "click"),
    "import ddp_benchmarks.verbs": HEAVY,
    "import ddp_vllm.conversion.verb": ("torch", "vllm", "transformers", "matplotlib", "rich"),
    "import ddp_plugins.register": ("torch", "vllm", "transformers"),
}


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (level, module) of every import of a file, those inside functions included; level 0 is absolute."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or ""


def _strings(path: Path) -> Iterator[str]:
    """Yield the string constants of a file, those within code that a string holds included, without docstrings."""
    nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def _named(path: Path) -> set[str]:
    """Return the packages of ours that a file imports or names in a string, as `importlib` takes them."""
    imported = {module.partition(".")[0] for level, module in _imports(path) if level == 0}
    return (imported | {name for text in _strings(path) for name in re.findall(r"\w+", text)}) & set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_itself_and_the_ground_floor_only(room: str) -> None:
    files = sorted(ROOMS[room].rglob("*.py"))
    assert files
    for file in files:
        if file != TABLE:
            assert _named(file) <= {"ddp_vllm", room} | ARROWS.get(room, set()), f"{file.relative_to(ROOT)}"
    without_verbs = {"ddp_plugins"}
    assert _named(TABLE) == set(ROOMS) - without_verbs


BELOW: dict[str, tuple[Path, str, tuple[str, ...], tuple[str, ...]]] = {
    # part -> its folder and files, modules of ours that it does not import, and exceptions from these
    "what a checkpoint is": (
        ROOMS["ddp_vllm"], "*.py", ("ddp_vllm.pages", "ddp_vllm.gguf", "ddp_vllm.hub", "ddp_vllm.conversion"), ()
    ),
    "prune": (ROOMS["ddp_prune"], "**/*.py", ("ddp_vllm.pages.report", "ddp_vllm.pages.pictures"), ()),
    "core": (  # knows settings and steps as plain values, and no files, commands or memory
        ROOMS["ddp_prune"] / "core", "*.py", ("ddp_prune",),
        ("ddp_prune.core", "ddp_prune.recipe", "ddp_prune.run", "ddp_prune.settings"),
    ),
    "text": (ROOMS["ddp_prune"] / "text", "*.py", ("ddp_prune",), ("ddp_prune.text",)),
    "models": (
        ROOMS["ddp_prune"] / "models", "*.py", ("ddp_prune",),
        ("ddp_prune.models", "ddp_prune.core", "ddp_prune.text", "ddp_prune.settings"),
    ),
    "benchmarks": (ROOMS["ddp_benchmarks"], "**/*.py", ("ddp_prune",), ("ddp_prune.text",)),
}  # fmt: skip


@pytest.mark.parametrize("part", BELOW)
def test_what_lies_below_imports_nothing_above(part: str) -> None:
    folder, pattern, above, allowed = BELOW[part]
    for file in set(folder.glob(pattern)) - {TABLE}:
        imported = {module for _, module in _imports(file) if module.startswith(above)}
        assert not {module for module in imported if not module.startswith(allowed or ("none",))}, file


def test_one_file_of_the_tests_names_the_inside_of_prune() -> None:
    """Tests of `recover`, on a GPU and of the night name it too."""
    tests, others = ROOT / "tests", ("seams.py", "recover", "gpu", "nightly", "test_house.py")
    for file in tests.rglob("*.py"):
        named = [*(module for _, module in _imports(file)), *_strings(file)]
        if file.relative_to(tests).parts[0] not in others:
            assert not [name for name in named if name.startswith("ddp_prune.")], file


def test_travelling_files_import_nothing_of_ours_but_each_other() -> None:
    folder = ROOMS["ddp_vllm"] / "remote_code"
    siblings = {file.stem for file in folder.glob("*.py")}
    imports = {file.stem: list(_imports(file)) for file in folder.glob("*.py")}
    assert (1, "widths") in imports["configuration_ddp"]  # the walk does see relative imports
    for name, found in imports.items():
        for level, module in found:
            where = f"remote_code/{name}.py imports {'.' * level}{module}"
            assert level <= 1 and not module.startswith(tuple(ROOMS)), where
            assert level == 0 or module in siblings, where
    torch_free = {module.partition(".")[0] for name in ("tensors", "files", "widths") for _, module in imports[name]}
    assert torch_free <= set(sys.stdlib_module_names) | {"tensors", "files"}


@pytest.mark.parametrize("code", LIGHT)
def test_nothing_heavy_is_loaded_before_it_is_used(code: str) -> None:
    code = f"import sys; {code}; print('LOADED', *sorted(sys.modules.keys() & {{*{LIGHT[code]!r}}}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.splitlines()[-1].split() == ["LOADED"]
