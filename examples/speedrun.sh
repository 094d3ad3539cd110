#!/usr/bin/env bash
# The whole story of ddp-vllm: prune a small chat model, look at it, measure it, serve it, and carry it elsewhere.
#
#     bash examples/speedrun.sh            # in a clone, after `make install` and `. .venv/bin/activate`
#
# It uses SmolLM2-135M and two CPU cores. On a GPU, set MODEL and CHATS to your own, STEPS to 1000 and SMALL to nothing.
# An error is one line with its remedy. If the script is interrupted, run it again: it resumes.
set -euo pipefail

OUT=${OUT:-speedrun}
STEPS=${STEPS:-60}
MODEL=${MODEL:-$(python benchmarks/fetch.py smollm2-135m)} # a folder or a Hub name
CHATS=${CHATS:-$(python benchmarks/fetch.py sharegpt)}     # a JSONL file, one conversation per line
SMALL=${SMALL---batch-size 1 --seq-len 1024}
TEST_LINES=${TEST_LINES:-200}                  # conversations that no model is trained on
mkdir -p "$OUT"
head -n "-$TEST_LINES" "$CHATS" > "$OUT/train.jsonl"
tail -n "$TEST_LINES" "$CHATS" > "$OUT/test.jsonl"
TEXT=$OUT/train.jsonl

step() { printf '\n=== %s\n' "$*"; }

step "1. Estimate. Nothing is trained: what would be removed, in what memory and time?"
# Add --on 2xh100-80gb to estimate for GPUs that you do not have here.
# shellcheck disable=SC2086
ddp-vllm prune "$MODEL" --sparsity 0.2 --data "$TEXT" --steps "$STEPS" $SMALL -o "$OUT/pruned" --dry-run

step "2. Prune. Gates of the least important heads and channels close; the remaining weights are distilled."
# Prefer --speedup 1.25: it costs less quality at equal speed. It is left out here because timing the model first takes
# 14 minutes on two cores. --minutes 60 trains for an hour instead of a number of steps.
# shellcheck disable=SC2086
[ -e "$OUT/pruned/config.json" ] ||
    ddp-vllm prune "$MODEL" --sparsity 0.2 --data "$TEXT" --steps "$STEPS" $SMALL -o "$OUT/pruned"

step "3. Look. The report also shows ten answers of the dense and the pruned model: $OUT/pruned/report.html"
ddp-vllm inspect "$OUT/pruned"

step "4. Is it still good? Perplexity, KL divergence and top-1 agreement on text of your users."
# For accuracy on tasks: ddp-vllm eval "$OUT/pruned" --against "$MODEL"
ddp-vllm eval "$OUT/pruned" --text "$OUT/test.jsonl"

step "5. Is it faster? Decode steps in real vLLM; the models take turns, and the interval says how sure the ratio is."
ddp-vllm bench steps --dense "$MODEL" --pruned "$OUT/pruned" --concurrency 8 --context-length 512 --rounds 3 \
    -o "$OUT/steps.json" --overwrite

step "6. Recover. If it is not good enough, distill it for longer; widths and speed stay the same."
[ -e "$OUT/recovered/config.json" ] ||
    ddp-vllm recover "$OUT/pruned" --minutes "${RECOVER_MINUTES:-2}" -o "$OUT/recovered"

step "7. Carry it elsewhere: one file for llama.cpp (Llama, SmolLM2, Mistral, Qwen2)."
ddp-vllm export "$OUT/recovered" --outtype q8_0 -o "$OUT/recovered.gguf" --overwrite

cat << END

=== 8. Serve it. These commands do not end, so run them yourself:

    vllm serve $OUT/recovered                              # on a CPU add --max-model-len 2048 --enforce-eager
    curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
        -d '{"model": "$OUT/recovered", "prompt": "The three primary colours are", "max_tokens": 24}'
    llama-server -m $OUT/recovered.gguf                    # the same model without Python

    ddp-vllm quantize $OUT/recovered --scheme W8A8 -o $OUT/small      # in an environment of its own
    ddp-vllm push $OUT/recovered OWNER/NAME --license apache-2.0      # publish it
END
