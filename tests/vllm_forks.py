"""Imports vLLM once and runs scripts in forks of this process: the import alone takes longer than several tiny engines.

Each line on stdin is one request: a script with its arguments, more environment variables, and the files for stdout and
stderr. The answer is the exit code. Nothing that a script started is left running.
"""

import contextlib
import json
import os
import runpy
import signal
import sys

from vllm import LLM  # noqa: F401


def run(words: list[str], environment: dict[str, str], outputs: list[str]) -> None:
    os.setsid()
    for stream, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    os.environ.update(environment)
    sys.argv = words
    sys.path.insert(0, os.path.dirname(words[0]))
    runpy.run_path(words[0], run_name="__main__")


for line in iter(sys.stdin.readline, ""):
    if not (child := os.fork()):
        run(**json.loads(line))
        break
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # workers of an engine that failed
    print(code, flush=True)
