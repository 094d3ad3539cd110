"""The verbs as functions, and the examples, on a tiny model."""

import io
import re
import shutil
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from commands import quick_commands
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import ddp_vllm
from ddp_vllm.errors import SettingError
from ddp_vllm.masks import MASKS_FILE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_pictures")]
ROOT = Path(__file__).parents[2]
TINY: dict[str, Any] = {"steps": 6, "batch_size": 2, "seq_len": 16, "heldout_blocks": 4, "train": "masks"}


@pytest.fixture(scope="module")
def made(tiny_model: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[ddp_vllm.Checkpoint]:
    """A pruned, a recovered and a cut model, by functions that print nothing."""
    root = tmp_path_factory.mktemp("made")
    with quick_commands(), redirect_stdout(io.StringIO()) as printed:
        data = [tiny_text, str(tiny_text)]
        pruned = ddp_vllm.prune(tiny_model, sparsity=0.4, output=root / "pruned", data=data, **TINY)
        recovered = ddp_vllm.recover(pruned.folder, output=root / "recovered", tokens=64)
        again = ddp_vllm.apply(str(tiny_model), pruned.folder / MASKS_FILE, output=str(root / "again"))
    assert printed.getvalue() == "" and pruned.folder == root / "pruned"
    return [pruned, recovered, again]


def test_a_model_goes_through_all_functions_without_a_word(
    made: list[ddp_vllm.Checkpoint], tiny_model: Path, tiny_text: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    pruned, recovered, again = made
    assert recovered.layers == pruned.layers and "recovered" in recovered.provenance["perplexity"]
    assert again.layers == ddp_vllm.read(str(pruned.folder)).layers == pruned.layers
    sizes = {"sparsity": [0.2, 0.4], "output": tmp_path / "sizes", "data": tiny_text, **TINY}
    with pytest.raises(SettingError, match="2 sizes are given, but prune makes one; prune_sizes"):
        ddp_vllm.prune(tiny_model, **sizes)
    with pytest.raises(SettingError, match="sparsity is an empty list"):
        ddp_vllm.prune_sizes(tiny_model, **sizes | {"sparsity": []})
    small, large = ddp_vllm.prune_sizes(tiny_model, **sizes)
    assert small.num_parameters > large.num_parameters and large.folder.name == "sparsity-0.4"
    recipe = ddp_vllm.Recipe(model="another", sparsity=0.3, data=f"{tiny_text},{tiny_text}", **TINY)
    with_file = ddp_vllm.prune(tiny_model, recipe=recipe, output=tmp_path / "recipe", sparsity=0.4)
    assert with_file.layers == pruned.layers and with_file.provenance["recipe"] == pruned.provenance["recipe"]
    plan = ddp_vllm.plan(tiny_model, recipe=recipe, output=tmp_path / "planned")
    (removed,) = plan.removed
    assert removed and f"= {removed:.1%} of the model" in "\n".join(plan.lines) and plan.peak_bytes
    facts = ddp_vllm.inspect(pruned.folder)
    assert facts["parameters"] == pruned.num_parameters and facts["recipe"]["steps"] == 6 and len(facts["layers"]) == 3
    assert ddp_vllm.report(pruned.folder, output=tmp_path / "page") == tmp_path / "page" / "report.html"
    page = ddp_vllm.compare([pruned.folder, recovered.folder], output=tmp_path / "compare.html")
    assert len(page.pruned) == 2 and (tmp_path / "compare.md").exists()
    assert capsys.readouterr().out == ""


def test_a_name_that_is_not_public_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'prnue'"):
        ddp_vllm.prnue  # noqa: B018


def test_what_is_published_says_nothing_of_this_machine(
    made: list[ddp_vllm.Checkpoint], tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    """Nor does what was recovered or cut again; here the dense model and the text are found all the same."""
    pruned, _, again = made
    ddp_vllm.report(again.folder)
    for checkpoint in made:
        for file in filter(Path.is_file, checkpoint.folder.rglob("*")):
            for place in (tiny_model.parent, tiny_text.parent, pruned.folder.parent):
                assert str(place).encode() not in file.read_bytes(), file
        assert checkpoint.provenance["recipe"]["model"] == tiny_model.name
        assert checkpoint.provenance["recipe"]["data"] == f"{tiny_text.name},{tiny_text.name}"
    assert ddp_vllm.compare([again.folder], output=tmp_path / "page.html").dense.facts.model == str(tiny_model)
    masks, moved = pruned.folder / MASKS_FILE, shutil.copytree(pruned.folder, tmp_path / "moved")  # to another machine
    with safe_open(masks, framework="numpy") as opened:
        said = dict(opened.metadata())
    save_file({**load_file(masks), "attn.extra": load_file(masks)["attn.z"]}, moved / masks.name, said)
    with pytest.raises(SettingError, match="not a folder here; pass its folder"):
        ddp_vllm.recover(moved, output=tmp_path / "other", tokens=64)


BARE = """
import sys
class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
from ddp_vllm.cli import main
main(sys.argv[1:])
"""


def test_the_pages_need_no_extra(
    made: list[ddp_vllm.Checkpoint], tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    """With none of the packages that extras bring; other verbs say which extra they need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [each for packages in project["optional-dependencies"].values() for each in packages]
    packages = {re.split(r"[^\w-]", each)[0].replace("-", "_") for each in extras}

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", BARE.format(packages=packages), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    result = run("compare", made[0].folder)
    assert result.returncode == 0, result.stderr
    result = run("report", made[0].folder, "-o", tmp_path / "page")
    assert result.returncode == 0 and (tmp_path / "page" / "report.html").exists(), result.stderr
    result = run("prune", tiny_model, "--data", tiny_text, "--sparsity", "0.2", "-o", "out")
    remedy = 'is not installed; pip install ".[prune]" in a clone of ddp-vllm\n'
    assert result.returncode == 1 and result.stderr.endswith(remedy)
