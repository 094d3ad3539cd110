"""Imports vLLM once and runs scripts in forks of this process: the import alone takes longer than several tiny engines.

The argument is the file descriptor of a socket that listens. The workers of pytest share this process: it ends with the
last connection. Each message is one request: a script with its arguments, more environment variables, and the files for
stdout and stderr. The answer is the exit code. Nothing that a script started is left running.
"""

import contextlib
import gc
import inspect
import json
import multiprocessing
import os
import runpy
import selectors
import signal
import socket
import sys

import torch
from vllm import ModelRegistry
from vllm.model_executor.models import llama, mixtral, olmoe, qwen3_moe, transformers
from vllm.platforms import current_platform
from vllm.v1.engine import core
from vllm.v1.engine import utils as engine_processes
from vllm.v1.executor import multiproc_executor
from vllm.v1.sample import sampler
from vllm.v1.worker import gpu_worker

KNOWN = (
    llama.LlamaForCausalLM, mixtral.MixtralForCausalLM, olmoe.OlmoeForCausalLM, qwen3_moe.Qwen3MoeForCausalLM,
    transformers.TransformersForCausalLM, transformers.TransformersMoEForCausalLM,
)  # fmt: skip


def save_time() -> None:
    """Do without what takes longer than tiny models do and has no part in what is tested."""
    torch.compiler.set_stance("force_eager")  # vLLM compiles some functions in its eager mode too
    for known in KNOWN:  # to look at one that it knows by name, vLLM would import itself again in a new process
        ModelRegistry.register_model(known.__name__, known)
    # each engine and worker would import vLLM anew; it does on a CPU for the sake of OpenMP, and forks elsewhere
    for module in (engine_processes, multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")
    # the sampler compiles its count of likelier tokens, for longer than it takes to compile a tiny model
    sampler.batched_count_greater_than = inspect.unwrap(sampler.batched_count_greater_than)
    # each engine would look for Triton's kernels in all modules, to replace them by those of a CPU
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
    # an engine collects garbage eight times, and vLLM's modules each time: they stay frozen, the engine does not
    gc.freeze()
    gc.unfreeze = core.freeze_gc_heap = gpu_worker.freeze_gc_heap = lambda: None


def run(words: list[str], environment: dict[str, str], outputs: list[str]) -> None:
    os.setsid()
    for stream, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.update(environment)
    sys.argv = words
    sys.path.insert(0, os.path.dirname(words[0]))
    runpy.run_path(words[0], run_name="__main__")


def kill(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def serve(listener: socket.socket) -> None:
    selector, running, num_clients = selectors.DefaultSelector(), dict[object, int](), 0
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            client = key.fileobj
            if client is listener:
                num_clients += 1
                selector.register(listener.accept()[0], selectors.EVENT_READ)
            elif key.data:  # a script ended
                child, client = key.data
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                kill(child)  # workers of an engine that failed
                selector.unregister(key.fd)
                os.close(key.fd)
                if running.pop(client, 0):
                    client.send(str(code).encode())
            elif request := client.recv(1 << 20):
                if not (child := os.fork()):
                    return run(**json.loads(request))
                running[client] = child
                selector.register(os.pidfd_open(child), selectors.EVENT_READ, (child, client))
            else:
                num_clients -= 1
                selector.unregister(client)
                client.close()
                if client in running:
                    kill(running.pop(client))
                if not num_clients:
                    os._exit(0)  # which saves the seconds that it would take to end


os.setsid()  # whatever ends pytest ends this by closing its connections
save_time()
serve(socket.socket(fileno=int(sys.argv[1])))
