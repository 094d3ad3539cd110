"""How good are the pruned models? Text and questions, all commands at once.

python quality.py OUT.json JOINT MASKS HOME        # HOME has smollm2, heldout and tasks
"""

import json
import subprocess
import sys
from pathlib import Path

from lease import DRY, Results

TASKS = ("arc_easy", "arc_challenge", "hellaswag", "piqa", "winogrande", "openbookqa", "boolq")
QUESTIONS = 4 if DRY else 1000  # of a task
TOKENS = 2048 if DRY else 65_536  # of a text


def main() -> None:
    out, *pruned, home = sys.argv[1:]
    results, dense, running = Results(out), Path(home) / "smollm2", {}
    texts = ",".join(map(str, sorted(Path(home, "heldout").glob("*"))))
    length = ["--max-length", 256] if DRY else []
    for model in map(Path, (str(dense), *pruned)):
        tasks = ["--tasks", ",".join(f"{name}_local" for name in TASKS), "--include-path", f"{home}/tasks"]
        commands = {"tasks": [*tasks, "--limit", QUESTIONS, *length]}
        if model != dense:
            commands["texts"] = ["--text", texts, "--tokens", TOKENS, "--against", dense, *length]
        for kind, options in commands.items():
            folder = Path(home) / "quality" / model.name / kind
            words = map(str, ["eval", model, *options, "--json", "-o", folder])
            log = open(Path(out).with_name(f"{model.name}-{kind}.log"), "w")  # noqa: SIM115
            process = subprocess.Popen([sys.executable, "-m", "ddp_vllm", *words], stdout=subprocess.PIPE, stderr=log)
            running[model.name, kind] = process, log.name
    for (model_name, kind), (process, log_name) in running.items():
        with results.row(model=model_name, kind=kind) as row:
            printed = process.communicate()[0].decode()
            if process.returncode:
                print(Path(log_name).read_text()[-3000:], flush=True)
                raise RuntimeError(f"exit code {process.returncode}")
            row["result"] = json.loads(printed.strip().splitlines()[-1])
    results.finish()


if __name__ == "__main__":
    main()
