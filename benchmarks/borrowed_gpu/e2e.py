"""How long do decode steps and prefill take in real vLLM with CUDA graphs, dense and pruned?

    python e2e.py MODEL REMOVED OUT.json [--go FILE]

One process per model with dummy weights, which measure speed and not quality. REMOVED: percent; 0
is the stock dense model in stock vLLM. The time of a decode step is the difference between long and
short answers.
"""

import argparse
import random
import time

from lease import DRY, WORK, Results, is_over, synchronize, wait_for
from models import CONFIGS, config_of, write_config

SHORT = 4  # tokens of a short answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=CONFIGS)
    parser.add_argument("removed", type=int)
    parser.add_argument("out")
    parser.add_argument("--go", help="use the GPU when this file exists")
    parser.add_argument("--layers", type=int, default=0, help="of the model; 0: all")
    parser.add_argument("--batches", default="1,2" if DRY else "1,8,32,64,256")
    parser.add_argument("--context", type=int, default=16 if DRY else 128)
    parser.add_argument("--steps", type=int, default=4 if DRY else 48)
    parser.add_argument("--prefill", type=int, default=64 if DRY else 2048)
    parser.add_argument(
        "--compiled", action="store_true", help="vLLM's default: torch.compile and piecewise graphs too"
    )
    args = parser.parse_args()
    folder, batches = WORK / f"{args.model}-{args.removed}", [int(batch) for batch in args.batches.split(",")]
    write_config(args.model, args.removed, args.layers, folder)
    import torch
    from vllm import LLM, SamplingParams

    from ddp_plugins.register import register_models

    register_models()
    longest = max(args.prefill, args.context + SHORT + args.steps) + 64
    options = {
        "dtype": "bfloat16", "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": longest,
        "max_num_seqs": max(batches), "gpu_memory_utilization": 0.9, "enable_prefix_caching": False,
        "max_num_batched_tokens": 8192, "disable_log_stats": True, "seed": 0,
    }  # fmt: skip
    if DRY:
        torch.compiler.set_stance("force_eager")
        options |= {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}
    else:
        graphs = {} if args.compiled else {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        options["compilation_config"] = graphs | {"cudagraph_capture_sizes": batches}
    wait_for(args.go)
    began = time.perf_counter()
    results = Results(args.out, **vars(args))
    engine = LLM(str(folder), **options)
    config, generator = engine.llm_engine.vllm_config, random.Random(0)
    results.save(
        start_seconds=time.perf_counter() - began, decode_ms={}, prefill_ms={},
        cudagraph_mode=str(config.compilation_config.cudagraph_mode), kv_blocks=config.cache_config.num_gpu_blocks,
        gpu_used_gib=0 if DRY else (lambda memory: memory[1] - memory[0])(torch.cuda.mem_get_info()) / 2**30,
    )  # fmt: skip
    vocabulary = config_of(args.model)["vocab_size"]

    def seconds(batch: int, context: int, tokens: int) -> float:
        prompts = [
            {"prompt_token_ids": [generator.randrange(3, vocabulary) for _ in range(context)]} for _ in range(batch)
        ]
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        synchronize()
        began = time.perf_counter()
        engine.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - began

    for batch in batches:
        if not is_over():
            seconds(batch, args.context, SHORT)
            short, long = (
                min(seconds(batch, args.context, SHORT + steps) for _ in range(2)) for steps in (0, args.steps)
            )
            results["decode_ms"][batch] = 1e3 * (long - short) / args.steps
            results.save()
    for batch in (1, 4):
        if not is_over():
            times = [seconds(batch, args.prefill, 1) for _ in range(4)]
            results["prefill_ms"][f"{batch}x{args.prefill}"] = 1e3 * min(times[1:])
    print({name: results[name] for name in ("model", "removed", "decode_ms", "prefill_ms", "start_seconds")})
    results.finish(complete=len(results["decode_ms"]) == len(batches) and len(results["prefill_ms"]) == 2)


if __name__ == "__main__":
    main()
