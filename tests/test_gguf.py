"""A folder written as GGUF says in stock llama.cpp what it says in transformers: logits, tokens, chat, text.

Small random models, with every block and width that llama.cpp's graph would trip over, and SmolLM2 with real weights.
"""

import importlib
import json
import shutil
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xllamacpp
from click.testing import Result
from commands import assert_refused, edit_json, invoke, passed
from runs import small_files
from tiny_models import SIZES as TINY
from tiny_models import save_pruned, save_random
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from random_models import train_tokenizer

BYTE_LEVEL = ["gpt-2", "smollm", "qwen2", "llama-bpe"]
VOCABULARY = 320  # rows of the embeddings; the tokenizer has fewer tokens
SIZES: dict[str, Any] = TINY | {
    "vocab_size": VOCABULARY, "hidden_size": 96, "intermediate_size": 72, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 1,
}  # fmt: skip
RAGGED = [
    ([], 17),  # first, without attention: llama.cpp takes the size of a head from here; width odd and below a block
    ([3, 1], 72),  # uneven groups; a width that is no whole blocks
    ([3, 3, 3, 3], 0),  # attention as in the dense model, no MLP
    ([], 0),  # nothing left
    ([], 64),
    ([3, 2, 1], 1),
    ([2], 33),
    ([1], 0),  # last, without MLP: only some of its rows are asked for
]
NOTHING_AT_THE_ENDS = [([], 0), ([2, 2], 40), ([], 0)]
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, tuple[str, list[tuple[list[int], int]], dict[str, Any]]] = {
    "llama": ("Llama", RAGGED, {}),
    "llama, ends empty": ("Llama", NOTHING_AT_THE_ENDS, {}),
    "llama, tied": ("Llama", RAGGED, {"tie_word_embeddings": True}),
    "llama, biases": ("Llama", RAGGED, {"attention_bias": True, "mlp_bias": True}),
    "llama 3": ("Llama", RAGGED, {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", RAGGED, {"sliding_window": None, "rms_norm_eps": 1e-2}),
    "qwen2": ("Qwen2", RAGGED, {}),  # biases on q, k and v
    "qwen2, all layers alike": ("Qwen2", [([3, 3], 40)] * 3, {}),
}
TEXTS = [
    "The quick brown fox, 12345 times; 3.14 and 1000000!",
    "don't DON'T I'LL we've  two   three    spaces ",
    "  leading\n\nlines\r\n\ttabs\t\n   \n end  ",
    "naïve café Größe – 漢字かな交じり文 한국어 مرحبا Привет 🎉👩‍👩‍👧",
    "def f(x):\n    return {'a': [x**2 for _ in range(10)]}\n",
    "<|im_start|>user\nhi<|im_end|> <|im_start|> not ½ ² ٣",
]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What's 2+2?\n  Say it twice. "}]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Server:
    """Stock llama.cpp's server over one file, in this process; attention is computed in float32."""

    def __init__(self, file: Path) -> None:
        params = xllamacpp.CommonParams()
        params.model.path, params.port, params.n_ctx, params.n_parallel, params.warmup = str(file), 0, 512, 1, False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server = xllamacpp.Server(params)

    def ask(self, path: str, **body: Any) -> Any:
        """Return the answer to a request. The API is that of `llama-server`."""
        url, headers = self._server.listening_address + path, {"Content-Type": "application/json"}
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy leads here
        with opener.open(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
            return json.load(answer)


def tokens(server: Server, text: str) -> list[int]:
    return list(server.ask("/tokenize", content=text, add_special=True)["tokens"])


def logprobs(server: Server, prompt: list[int]) -> torch.Tensor:
    """Return the log-probabilities of the whole vocabulary after a prompt.

    The bias, which they do not contain, chooses token 2: of one that is no whole character nothing is said.
    """
    answer = server.ask("/completion", prompt=prompt, n_predict=1, n_probs=VOCABULARY, logit_bias=[[2, 1e4]])
    found = {entry["id"]: entry["logprob"] for entry in answer["completion_probabilities"][0]["top_logprobs"]}
    return torch.tensor([found[token] for token in range(VOCABULARY)])


def save_tokenizer(folder: Path, cuts: pre_tokenizers.PreTokenizer | None = None, *, like_llama3: bool = False) -> Any:
    """Train a byte-level tokenizer that cuts words by `cuts`; like Llama 3's: BOS first, no merges in known words."""
    wrapped = train_tokenizer(
        [*TEXTS, Path(__file__).read_text(encoding="utf-8")], VOCABULARY - 6, ["<|im_start|>", "<|im_end|>"], cuts=cuts,
        ignore_merges=like_llama3, bos_token="<|im_start|>", eos_token="<|im_end|>",
        chat_template="{{ bos_token }}" * like_llama3 + CHATML,
    )  # fmt: skip
    if like_llama3:
        first = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 0)])
        wrapped.backend_tokenizer.post_processor = first
    wrapped.save_pretrained(folder)
    return wrapped


def save_model(folder: Path, family: str, layers: list[tuple[list[int], int]], **settings: Any) -> Any:
    """Write a random pruned model in float32, with a tokenizer."""
    entries = [{"query_heads_per_kv_head": heads, "intermediate_size": width} for heads, width in layers]
    save_tokenizer(folder)
    return save_pruned(folder, family, entries, **SIZES | settings)


def save_dense(folder: Path, model_type: str, **settings: Any) -> Any:
    """Write a random dense model in float32, with a tokenizer."""
    config = AutoConfig.for_model(model_type, **SIZES | {"num_hidden_layers": 2} | settings)
    save_tokenizer(folder)
    return save_random(folder, AutoModelForCausalLM.from_config, config)


def run(folder: Path, *options: str) -> Result:
    return invoke("export", folder, "-o", folder / "model.gguf", *options)


def exported(folder: Path, *options: str) -> Path:
    passed(run(folder, *options))
    return folder / "model.gguf"


@torch.no_grad()
def furthest(model: Any, server: Server) -> float:
    """Return the largest difference of log-probabilities between transformers and llama.cpp, over prompts."""
    differences = []
    for prompt in ([5], list(range(2, 12)), [(7 * i) % 300 for i in range(140)]):
        expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        differences.append((logprobs(server, prompt) - expected).abs().max().item())
    return max(differences)


@pytest.mark.parametrize("case", [*MODELS, "qwen2, dense"])
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    family, layers, settings = MODELS.get(case, ("Qwen2", [([], 0)], {}))
    model = save_model(tmp_path, family, layers, **settings) if case in MODELS else save_dense(tmp_path, "qwen2")
    file = exported(tmp_path, "--outtype", "F32")
    graph = importlib.import_module("gguf").GGUFReader(file).fields["general.architecture"].contents()
    assert graph == ("llama" if len({str(layer) for layer in layers}) == 1 else "deci")
    assert furthest(model, Server(file)) < 1e-3


TOLERANCES = {"F32": 1e-3, "F16": 0.02, "BF16": 0.1, "Q8_0": 0.2}


@pytest.mark.parametrize(("kind", "tolerance"), TOLERANCES.items())
def test_types(kind: str, tolerance: float, tmp_path: Path) -> None:
    """From bfloat16 weights in several files."""
    model = save_model(tmp_path, "Llama", RAGGED)
    model.bfloat16().save_pretrained(tmp_path, max_shard_size="50KB")
    (tmp_path / "model.safetensors").unlink()
    model = type(model).from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert tolerance / 1000 < furthest(model, Server(exported(tmp_path, "--outtype", kind.lower()))) < tolerance


def test_what_is_filled_up_is_said(tmp_path: Path) -> None:
    save_model(tmp_path, "Llama", RAGGED, head_dim=20)
    result = run(tmp_path, "--outtype", "q8_0")
    *notes, written = result.stdout.splitlines()
    assert notes == [
        "zero-padded: 197 MLP channels in 7 layers, because every layer requires 32 or a multiple of 32",
        "zero-padded: 6 query heads in 3 layers, because KV heads of a layer require equally many, and layer 0 one",
        "6 matrices are F16 instead of Q8_0",
    ]
    assert written.startswith("written: ") and result.stderr == ""


def cuts(name: str) -> pre_tokenizers.PreTokenizer:
    """Return what cuts words in the tokenizers that llama.cpp knows under a name."""
    known = importlib.import_module("ddp_vllm.gguf.tokenizer").BYTE_LEVEL
    assert [*known.values()] == BYTE_LEVEL  # another one requires a case
    (rules, _), bytes_alone = next(key for key in known if known[key] == name), pre_tokenizers.ByteLevel
    if rules[-1] == "GPT-2":
        digits = [pre_tokenizers.Digits(individual_digits=True)] * (len(rules) - 1)
        return pre_tokenizers.Sequence([*digits, bytes_alone(add_prefix_space=False)])
    split = pre_tokenizers.Split(Regex(rules[0]), "isolated")
    return pre_tokenizers.Sequence([split, bytes_alone(add_prefix_space=False, use_regex=False)])


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_tokens_and_chat_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    save_model(tmp_path, "Llama", [([3], 32)])
    tokenizer = save_tokenizer(tmp_path, cuts(name), like_llama3=name == "llama-bpe")
    assert_same_tokens(tokenizer, Server(exported(tmp_path)))


def assert_same_tokens(tokenizer: Any, server: Server) -> None:
    for text in TEXTS:
        assert tokens(server, text) == tokenizer(text)["input_ids"], text
    prompt = server.ask("/apply-template", messages=CHAT)["prompt"]
    assert tokens(server, prompt) == tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]


def test_tokens_of_llama_2s_kind(tmp_path: Path) -> None:
    save_model(tmp_path, "Llama", [([3], 32)], vocab_size=900)
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(Path(__file__).read_text(encoding="utf-8").splitlines(), trainer)
    written = json.loads(tokenizer.to_str())
    written["added_tokens"] = written["added_tokens"][:3]  # bytes are ordinary tokens
    tokenizer = Tokenizer.from_str(json.dumps(written))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    wrapped.chat_template = "{{ bos_token }}{% for message in messages %}[{{ message['content'] }}]</s>{% endfor %}"
    wrapped.save_pretrained(tmp_path)
    assert_same_tokens(wrapped, Server(exported(tmp_path)))
    edit_json(tmp_path / "tokenizer_config.json", tokenizer_class="LlamaTokenizer")
    assert "a space before text that begins with one, or that follows a special" in run(tmp_path, "--overwrite").stdout
    loaded, server = AutoTokenizer.from_pretrained(tmp_path), Server(tmp_path / "model.gguf")
    for text in TEXTS[:2]:
        assert tokens(server, text) == loaded(text)["input_ids"], text


UNFIT: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3", {}, "norms of queries and keys"),
    ("phi3", {}, "fused projections"),
    ("mistral", {"sliding_window": 100}, "a sliding window of 100 tokens"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "positions of type yarn"),
]


def refused(folder: Path, exit_code: int, *words: str, options: tuple[str, ...] = ()) -> None:
    """Assert that export fails with one line that has all words, and leaves nothing behind."""
    before = sorted(folder.iterdir())
    assert_refused(run(folder, *options), exit_code, *words)
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(("model_type", "settings", "reason"), UNFIT, ids=lambda value: str(value)[:30])
def test_what_the_graph_cannot_hold_is_refused(
    model_type: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    save_dense(tmp_path, model_type, **settings)
    refused(tmp_path, 3, "does not fit llama.cpp: ", reason)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    save_model(folder, "Llama", NOTHING_AT_THE_ENDS)
    return folder


def test_what_is_in_the_way_and_what_is_missing(sound: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sound, tmp_path / "model"))
    words = "q4_k_m is none of f32, f16, bf16, q8_0; export f16", "llama-quantize"
    refused(folder, 2, *words, options=("--outtype", "q4_k_m"))
    (folder / "model.gguf").write_text("mine")
    refused(folder, 5, "exists")
    refused(folder, 5, "did not write it", options=("--overwrite",))
    assert (folder / "model.gguf").read_text() == "mine"
    (folder / "model.gguf").write_text("GGUF, an older one")
    exported(folder, "--overwrite")
    (folder / "model.gguf").unlink()
    with small_files(20_000):
        refused(folder, 5, "cannot be written", "make room")
    for name in (TOKENIZER, "config.json"):
        (folder / name).unlink()
        refused(folder, 3, name)


TOKENIZER = "tokenizer.json"
ANOTHER_FIRST = {
    "type": "TemplateProcessing", "pair": [],
    "single": [{"SpecialToken": {"id": "%", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {"%": {"id": "%", "ids": [5], "tokens": ["%"]}},
}  # fmt: skip
BROKEN: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {  # a file, what is done to it, what is said
    "a number beyond the embeddings": (TOKENIZER, lambda t: t["model"]["vocab"].update({"a": 900}), "has token 900"),
    "a token before every text": (TOKENIZER, lambda t: t.update(post_processor=ANOTHER_FIRST), "adds the tokens [5]"),
    "weights of four bits": (
        "config.json", lambda c: c.update(quantization_config={"quant_method": "gptq"}), "quantized already"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_tokenizer_is_refused(case: str, sound: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sound, tmp_path / "model"))
    (folder / "chat_template.jinja").unlink()
    name, break_it, said = BROKEN[case]
    edit_json(folder / name, break_it)
    refused(folder, 3, said)
