"""A pruned folder holds all that the dense one had, but weights, code and other formats: so it takes pictures."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from any_families import load
from any_models import UNSERVED, tiny_config, write_model
from commands import invoke, passed
from PIL import Image
from runs import edit_json
from serving import assert_same
from test_convert_stock import cut, zeroed
from test_gguf import save_tokenizer
from tiny_models import edit_weights

from ddp_vllm.model_files import tokenizer_and_config_files
from ddp_vllm.remote_code.configuration_ddp_widths import register_widths

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("short_answers", "no_pictures")]

PROMPT = "<image>the quick brown"
VISION = {
    "hidden_size": 64, "intermediate_size": 96, "image_size": 32, "patch_size": 16, "model_type": "clip_vision_model",
    "num_hidden_layers": 2, "num_attention_heads": 2, "projection_dim": 64,
}  # fmt: skip
COPIED = {
    "anything.yaml": "a: 1", "video_preprocessor_config.json": "{}", "additional_chat_templates/tool.jinja": "{{ x }}"
}  # fmt: skip
LEFT = (
    *("evil.py", "params.json", "consolidated.00.pth", "model.gguf", "pytorch_model.bin", "original/tokenizer.model"),
    *("onnx/config.json", "report.html", "ddp_local.json", "sharegpt-offline.json", ".gitattributes", "tf_model.h5"),
)
CHANGED = {"config.json", "processor_config.json", "tokenizer_config.json", "generation_config.json"}


def llava(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a Llava whose processor requires Pillow alone."""
    tokenizer = save_tokenizer(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    text = tiny_config("MistralConfig", head_dim=32, vocab_size=len(tokenizer))
    config = transformers.LlavaConfig(
        text_config=text.to_dict(), vision_config=VISION, tie_word_embeddings=False,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    pictures = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    sizes = {"patch_size": 16, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    transformers.LlavaProcessor(pictures, tokenizer, image_token="<image>", **sizes).save_pretrained(folder)
    monkeypatch.setitem(UNSERVED, "pictures", lambda: config)
    write_model("pictures", folder)


def answers(folder: Path, picture: Image.Image, model: Any = None) -> dict[str, Any]:
    """Return what transformers answers by the folder's own processor, greedily."""
    register_widths()
    processor = transformers.AutoProcessor.from_pretrained(folder, trust_remote_code=False)
    inputs = processor(text=[PROMPT], images=[picture], return_tensors="pt")
    with torch.no_grad():
        made = (model or load(folder)).generate(
            **inputs, max_new_tokens=8, do_sample=False, eos_token_id=None, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
    tokens = made.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    chosen = [logits[0].log_softmax(-1)[token].item() for logits, token in zip(made.logits, tokens, strict=True)]
    return {"outputs": [{"tokens": tokens, "logprobs": chosen}]}


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_every_verb_copies_what_the_dense_folder_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, tool, text = tmp_path / "dense", tmp_path / "tool", tmp_path / "text.txt"
    llava(dense, monkeypatch)
    text.write_text("the quick brown fox jumps " * 400)
    for name in (*COPIED, *LEFT):
        (dense / name).parent.mkdir(exist_ok=True)
        (dense / name).write_text(COPIED.get(name, "{}"))
    edit_json(dense / "processor_config.json", auto_map={"AutoProcessor": "evil.P"})
    held = {file.relative_to(dense).as_posix() for file in tokenizer_and_config_files(dense)}
    assert held >= {*COPIED, "processor_config.json", "tokenizer.json", "generation_config.json"}
    assert not held & {*LEFT, "model.safetensors"}
    edit, pruned = cut(".1.mlp.", to=50, where="language_model"), tmp_path / "pruned"
    shutil.copytree(dense, tool)
    edit_weights(tool, edit)
    words = ("--sparsity", "0.3", "--steps", "3", "--train", "masks", "--seq-len", "16", "--batch-size", "2")
    commands: dict[str, tuple[Any, ...]] = {
        "pruned": ("prune", dense, "--data", text, *words),
        "recovered": ("recover", pruned, "--teacher", dense, "--tokens", "32", "--data", text, *words[-4:]),
        "converted": ("convert", tool),
    }
    for name, words in commands.items():
        passed(invoke(*words, "-o", tmp_path / name))
        files = {path.relative_to(tmp_path / name).as_posix() for path in (tmp_path / name).rglob("*")}
        assert files >= held and not files & {*LEFT} - {"report.html"}, name
        assert "auto_map" not in (tmp_path / name / "processor_config.json").read_text()
        for file in held - CHANGED:
            assert (tmp_path / name / file).read_bytes() == (dense / file).read_bytes()
    picture = Image.fromarray((np.arange(64 * 64 * 3).reshape(64, 64, 3) % 251).astype("uint8"))
    answer, expected = (answers(tmp_path / "converted", picture, model) for model in (None, zeroed(dense, edit)))
    assert_same(answer, expected)
