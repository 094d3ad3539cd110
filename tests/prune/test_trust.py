"""No verb runs code that came with a model, and none copies it into its output."""

import ast
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import assert_refused, cases, invoke, passed, write_lines
from lm_eval_tasks import write_tasks
from runs import SMALL, edit_json
from transformers import AutoModelForCausalLM, AutoTokenizer

from ddp_vllm import remote_code
from ddp_vllm.masks import MASKS_FILE, METRICS_FILE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cache", "no_pictures")]
Hostile = Callable[..., tuple[Path, Path, Path]]

ROOT = Path(__file__).parents[2]
CODE = """
import pathlib
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
pathlib.Path({ran!r}).touch()
class Config(LlamaConfig): ...
class Model(LlamaForCausalLM): ...
class Tokenizer(PreTrainedTokenizerFast): ...
def generate(model, *args, **kwargs): raise AssertionError
"""
TEMPLATE = "{{{{ cycler.__init__.__globals__.os.system('touch {ran}') }}}}{{% for m in messages %}}{{{{ m.content }}}}"
TEMPLATE += "{{% endfor %}}"
LOADABLE = ("config", "tokenizer", "generation")
"""Attacks on a model that loads without its code; the others may keep it from being loaded."""
ATTACKS = (*LOADABLE, "tokenizer class", "chat template")


def verbs(dense: Path, pruned: Path, text: Path, output: Path) -> dict[str, list[Any]]:
    """Return a command line of each verb that reads a model, but `bench` and `profile`, which start vLLM."""
    lm_eval = ["--tasks", "piqa_local", "--include-path", output.parent / "tasks", "--limit", "1"]
    lm_eval += ["--max-length", "64", "-o", output]
    return {
        "prune": ["prune", dense, "--sparsity", "0.4", "--data", text, "-o", output, *SMALL],
        "apply": ["apply", dense, "--masks", pruned / MASKS_FILE, "-o", output],
        "recover": [
            *("recover", pruned, "--teacher", dense, "--tokens", "32", "--data", text),
            *("--seq-len", "16", "--batch-size", "2", "-o", output),
        ],
        "quantize": ["quantize", pruned, "--scheme", "W8A8", "-o", output],
        "export": ["export", pruned, "-o", output],
        "push": ["push", pruned, "me/x"],
        "report": ["report", pruned, "-o", output],
        "compare": ["compare", pruned, "--dense", dense, "-o", output.with_suffix(".html")],
        "eval": ["eval", pruned, *lm_eval],
        "eval of a dense model": ["eval", dense, *lm_eval],
    }


VERBS = verbs(Path("."), Path("."), Path("."), Path("/tmp/x")).keys()
WRITING = ("apply", "recover", "quantize", "export", "push", "report")


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    words = " ".join(f"the quick brown fox number {number}" for number in range(30))
    turns = [{"role": "user", "content": words}, {"role": "assistant", "content": words}]
    rows = [{"messages": [{**turn, "content": f"{number} {turn['content']}"} for turn in turns]} for number in range(9)]
    return write_lines(tmp_path / "talks.jsonl", rows)


def test_whoever_reads_a_model_says_that_its_code_is_not_trusted() -> None:
    """Left out, transformers asks on stdin for 15 s. The proof trusts a folder that it wrote, with code of ours."""
    rooms = ("ddp_vllm", "prune", "plugins", "benchmarks")
    files = [file for room in rooms for file in (ROOT / room).rglob("*.py") if file.name != "read_back.py"]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    loading = [ast.unparse(call) for call in calls if call.func.attr == "from_pretrained"]  # type: ignore[attr-defined]
    loading = [call for call in loading if call.startswith("Auto")]
    assert loading and not [call for call in loading if "trust_remote_code=False" not in call]


FILES = [file for file in Path(remote_code.__file__).parent.glob("*.py") if file.stem != "__init__"]
REFUSING = ("push", "export", "quantize")  # no hub here; no form in GGUF; no llm-compressor here


def make_hostile(folder: Path, attack: str, ran: Path) -> Path:
    """Change one thing of a dense or pruned folder so that whoever trusts it creates the file `ran`."""
    code = CODE.format(ran=str(ran))
    for name in ("evil", "tokenization_evil", *(file.stem for file in FILES if attack == "config")):
        (folder / f"{name}.py").write_text(code)
    if attack == "config":
        edit_json(folder / "config.json", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    elif attack.startswith("tokenizer"):
        stated = {"tokenizer_class": "EvilTokenizer"} if attack == "tokenizer class" else {}
        auto_map = {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}
        edit_json(folder / "tokenizer_config.json", auto_map=auto_map, **stated)
    elif attack == "generation":
        (folder / "custom_generate").mkdir()
        (folder / "custom_generate" / "generate.py").write_text(code)
        edit_json(folder / "generation_config.json", custom_generate=str(folder))
    else:
        (folder / "chat_template.jinja").write_text(TEMPLATE.format(ran=ran))
    return folder


@pytest.fixture
def hostile(tiny_model: Path, pruned: Path, tmp_path: Path) -> Hostile:
    """Make a dense and a pruned folder with some attacks; return them and the file that their code would create."""

    def make(*attacks: str) -> tuple[Path, Path, Path]:
        dense, folder = (
            Path(shutil.copytree(each, tmp_path / name / "model")) for name, each in (("d", tiny_model), ("p", pruned))
        )
        for attack in attacks:
            for each in (dense, folder):
                make_hostile(each, attack, tmp_path / "ran")
        return dense, folder, tmp_path / "ran"

    return make


@pytest.mark.parametrize("verb", cases(VERBS, [verb for verb in VERBS if "eval" not in verb]))
def test_no_verb_runs_code_of_a_model(verb: str, hostile: Hostile, conversations: Path, tmp_path: Path) -> None:
    """The model is read without its code, and the output holds none of it."""
    dense, folder, ran = hostile(*LOADABLE)
    write_tasks(tmp_path / "tasks", "piqa_local")
    result = invoke(*verbs(dense, folder, conversations, tmp_path / "out")[verb])
    assert not ran.exists()
    if verb in REFUSING:
        assert_refused(result, result.exit_code)
    else:
        passed(result)
    for path in (tmp_path / "out").rglob("*.py"):
        assert path.read_bytes() in [file.read_bytes() for file in FILES]
    if (tmp_path / "out" / "config.json").exists():
        assert not (tmp_path / "out" / "custom_generate").exists()
        for name in ("config.json", "tokenizer_config.json"):
            assert "evil" not in (tmp_path / "out" / name).read_text()
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
        AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
        assert not ran.exists()


@pytest.mark.parametrize("attack", ATTACKS[len(LOADABLE) :])
def test_code_of_a_broken_model_is_not_run(attack: str, hostile: Hostile, conversations: Path, tmp_path: Path) -> None:
    dense, folder, ran = hostile(attack)
    result = invoke(*verbs(dense, folder, conversations, tmp_path / "out")["prune"])
    assert not ran.exists()
    if result.exit_code:
        assert_refused(result, result.exit_code)


@pytest.mark.parametrize("verb", cases(WRITING, ("apply", "recover", "export")))
def test_no_verb_follows_a_link_out_of_a_model(verb: str, hostile: Hostile, tiny_text: Path, tmp_path: Path) -> None:
    """Before, `export` wrote a linked chat template into its file, and `recover` and `quantize` copied the metrics."""
    dense, folder, secret = hostile()
    secret.write_text('{"step": 1, "secret": 1}')
    for each in (dense, folder):
        for name in ("chat_template.jinja", METRICS_FILE):
            (each / name).unlink(missing_ok=True)
            (each / name).symlink_to(secret)
    result = invoke(*verbs(dense, folder, tiny_text, tmp_path / "out")[verb])
    assert_refused(result, result.exit_code, "is a link out of the model's folder")
    assert result.exit_code in (3, 7) and not [path for path in tmp_path.glob("out*") if path.is_file()]
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("name", ["model.safetensors", MASKS_FILE])
def test_a_link_out_of_the_folder_is_not_published(name: str, hostile: Hostile, tmp_path: Path) -> None:
    """Neither of the dense model nor the masks."""
    dense, masks, secret = hostile()
    file = (masks if name == MASKS_FILE else dense) / name
    file.parent.mkdir(exist_ok=True)
    file.rename(secret) if file.exists() else secret.mkdir()
    file.symlink_to(secret)
    result = invoke("apply", dense, "--masks", masks / MASKS_FILE, "-o", tmp_path / "out")
    assert_refused(result, 7 if name == MASKS_FILE else 3, name, "link out of the model's folder")
