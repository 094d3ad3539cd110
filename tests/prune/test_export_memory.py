"""Export reads, cuts and writes tensor by tensor: what it holds is a shard, not the model."""

import subprocess
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parent.parent.parent
SHARD_BYTES = 20_000_000
MEASURE = """
import sys, threading, time
from pathlib import Path

import torch
from ddp_models import writing
from ddp_prune import export
from ddp_vllm.families import unit_shapes
from ddp_models.source import open_source

def own():  # bytes of this process's own memory; of the mapped files only pages in use are in memory, and can go
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

def watch():
    while not done.is_set():
        most[0] = max(most[0], own())
        time.sleep(0.001)

def run(model, output):
    source = open_source(model)
    gates = {kind: torch.rand(shape) + 0.5 for kind, shape in unit_shapes(source.sizes, "kv-group").items()}
    export.export(source, gates, Path(output), head_unit="kv-group", provenance={})

writing.MAX_SHARD_BYTES = int(sys.argv[4])
run(sys.argv[1], sys.argv[3] + "-tiny")  # imports what it needs
began, done = own(), threading.Event()
most = [began]
watcher = threading.Thread(target=watch)
watcher.start()
run(sys.argv[2], sys.argv[3])
done.set()
watcher.join()
print(most[0] - began)
"""


def test_export_holds_a_shard_whatever_the_model(tiny_model: Path, tmp_path: Path) -> None:
    """Nothing is cut here, only folded, so all of the model passes through."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=1024, intermediate_size=4096, num_hidden_layers=10, num_attention_heads=16,
        num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu").to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    model.save_pretrained(tmp_path / "dense", max_shard_size="50MB")
    assert len(list((tmp_path / "dense").glob("*.safetensors"))) > 5
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert num_bytes > 300_000_000
    arguments = [str(tiny_model), str(tmp_path / "dense"), str(tmp_path / "out"), str(SHARD_BYTES)]
    environment = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'prune'}", "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",  # what is freed is given back, so the heap's holes are not counted
    }  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stderr
    held = int(result.stdout)
    largest = 4096 * 1024
    # a shard, and of the largest matrix: as read, folded in float32, and rounded
    assert SHARD_BYTES / 2 < held < 1.5 * SHARD_BYTES + (2 + 4 + 4 + 2) * largest, f"{held:,} bytes held"
    assert held < num_bytes / 3
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 10
