"""What does a step of mask learning cost, next to a forward, a LoRA step and full fine-tuning?

    python benchmarks/lab/step_cost.py MODEL [--device cuda] [--batch-size 2] [--seq-len 256]
    [--rounds 7] [--threads 1]

Every case lives in a process of its own, loads the same weights and reads the same number of
tokens. In each round every case does one step, so that what else the machine does hits all of them.
Reported are medians over rounds, their spread, ratios paired within rounds with their 95 %
interval, and the peak memory above the loaded model of each process (CPU: resident set, reset after
set-up; GPU: what the allocator gave out). LoRA is peft's, r = 8 on all linear layers, once with
transformers' own loss and attention and once with our chunked head and the attention we choose.
Needs peft. The last line on stdout is JSON.
"""

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

from ddp_benchmarks.protocol import rotated, script_parser
from ddp_prune.core.batches import Batches
from ddp_prune.core.gates import GatedModel
from ddp_prune.core.loss import OutputHead, distill, final_hidden
from ddp_prune.core.passes import fit_attention, peak_bytes, reset_peak
from ddp_prune.core.trainer import Trainer
from ddp_prune.models.loading import load_model
from ddp_prune.models.source import open_source
from ddp_prune.pools import make_checked_pools
from ddp_prune.recipe import Recipe
from ddp_prune.run import Run
from ddp_vllm.intervals import judge, ratio_text, spread
from study import add_batch_options, gate, print_result

Step = Callable[[], Any]
GOALS = [  # (what, numerator, denominator, at most)
    ("gated body, forward and backward, to its forward", "gated body", "body", 2.1),
    ("distilled step to a full forward", "distilled step", "forward", 2.6),
    ("distilled step, half of the gates closed, to all open", "distilled step, half closed", "distilled step", None),
    ("distilled step to a LoRA step", "distilled step", "LoRA step", 0.9),
    (
        "distilled step to a LoRA step with our head and attention",
        "distilled step",
        "LoRA step, our head and attention",
        None,
    ),
    ("distilled step to full fine-tuning", "distilled step", "full fine-tuning", None),
    ("head, time", "head", "naive head", None),
]
HEAD_MEMORY_GOAL = 1 / 8


class Bench:
    """The model, the tokens and the cases of one process."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.device = arguments, torch.device(arguments.device)
        self.source = open_source(arguments.model)
        self.model = load_model(self.source, arguments.dtype).to(self.device)
        shape = (8 * arguments.batch_size, arguments.seq_len)
        generator = torch.Generator().manual_seed(0)
        self.blocks = torch.randint(0, self.source.config["vocab_size"], shape, generator=generator)
        self.tokens = self.blocks[: arguments.batch_size].to(self.device)
        self.labels = self.tokens[:, 1:].reshape(-1)
        self.head = OutputHead.of(self.model)

    def gated(self) -> GatedModel:
        fit_attention(self.model, self.arguments.seq_len, self.device)
        return gate(self.model, self.source)

    def body(self) -> Step:
        fit_attention(self.model, self.arguments.seq_len, self.device)
        return torch.no_grad()(lambda: final_hidden(self.model, self.tokens))

    def forward(self) -> Step:
        return torch.no_grad()(lambda: self.model(self.tokens, labels=self.tokens, use_cache=False).loss)

    def gated_body(self) -> Step:
        gated = self.gated()
        gradient = torch.randn_like(final_hidden(self.model, self.tokens))

        def step() -> None:
            shapes = gated.shapes.items()
            leaves = {kind: torch.ones(shape, device=self.device, requires_grad=True) for kind, shape in shapes}
            squares = {kind: torch.zeros(shape, device=self.device) for kind, shape in shapes}
            with gated.masks(leaves, squares):
                final_hidden(self.model, self.tokens).backward(gradient)

        return step

    def trainer(self, *, distillation: float = 2.0, cached: bool = False, open_share: float = 1.0) -> Step:
        from accelerate import Accelerator

        recipe = Recipe(
            model=self.arguments.model, sparsity=0.5, steps=100_000, polish=0.0, distillation=distillation,
            batch_size=self.arguments.batch_size, seq_len=self.arguments.seq_len,
            micro_batch_size=self.arguments.batch_size,
        )  # fmt: skip
        accelerator = Accelerator(cpu=self.device.type == "cpu")
        _, pools = make_checked_pools(recipe, self.source, self.source.shapes)
        batches, run = Batches(self.blocks, recipe, accelerator), Run.alone(recipe)
        trainer = Trainer(self.gated(), batches, run, pools, accelerator)
        shapes = trainer.gates.support
        trainer.gates.support = {k: (torch.rand(z.shape) < open_share).to(self.device) for k, z in shapes.items()}
        if trainer.teacher:
            trainer.teacher.cache = {} if cached else None
            for start in range(0, len(self.blocks) if cached else 0, recipe.batch_size):
                numbers = list(range(start, start + recipe.batch_size))
                trainer.teacher.hidden(self.blocks[numbers].to(self.device), numbers)
        numbers_of_steps = iter(range(1000, 100_000))
        return lambda: trainer.step(next(numbers_of_steps))

    def lora(self, *, own_head: bool) -> Step:
        from peft import LoraConfig, get_peft_model

        if own_head:
            fit_attention(self.model, self.arguments.seq_len, self.device)
        self.model = get_peft_model(self.model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
        return self._weights_step(own_head=own_head)

    def fine_tuning(self) -> Step:
        self.model.requires_grad_(True)
        return self._weights_step(own_head=False)

    def _weights_step(self, *, own_head: bool) -> Step:
        self.model.train()
        optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-5)

        def step() -> None:
            if own_head:
                base = self.model.get_base_model()
                hidden = final_hidden(base, self.tokens)
                loss, _ = distill(hidden, None, self.head, self.labels, 0.0)
            else:
                loss = self.model(self.tokens, labels=self.tokens, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def heads(self, *, naive: bool) -> Step:
        """Cross-entropy and distillation with their gradient, from hidden states, in chunks or
        written down plainly."""
        weight = self.head.weight
        student, teacher = (
            torch.randn(len(self.labels), weight.shape[1], device=self.device, dtype=weight.dtype) for _ in range(2)
        )
        student.requires_grad_()

        def step() -> None:
            student.grad = None
            if not naive:
                distill(student, teacher, self.head, self.labels, 2.0)[0].backward()
                return
            log_p = (student @ weight.t()).float().log_softmax(-1)
            log_t = (teacher @ weight.t()).float().log_softmax(-1)
            divergence = torch.nn.functional.kl_div(log_p, log_t, log_target=True, reduction="batchmean")
            (torch.nn.functional.nll_loss(log_p, self.labels) + 2.0 * divergence).backward()

        return step


CASES: dict[str, Callable[[Bench], Step]] = {  # each returns a function that does one step
    "body": Bench.body,
    "forward": Bench.forward,
    "gated body": Bench.gated_body,
    "masked step": partial(Bench.trainer, distillation=0.0),
    "distilled step": Bench.trainer,
    "distilled step, half closed": partial(Bench.trainer, open_share=0.5),  # nothing is cut anew
    "distilled step, cached teacher": partial(Bench.trainer, cached=True),
    "LoRA step": partial(Bench.lora, own_head=False),
    "LoRA step, our head and attention": partial(Bench.lora, own_head=True),
    "full fine-tuning": Bench.fine_tuning,
    "head": partial(Bench.heads, naive=False),
    "naive head": partial(Bench.heads, naive=True),
}


def work(connection: Connection, name: str, arguments: argparse.Namespace) -> None:
    """Measure one case in its own process: take a step for every True that is received, and send
    its measurements."""
    torch.set_num_threads(arguments.threads)
    step = CASES[name](Bench(arguments))
    device = torch.device(arguments.device)
    base = reset_peak(device)
    # the first one chooses kernels and makes optimizer states; its time does not count, its memory
    # does
    step()
    connection.send("ready")
    while connection.recv():
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        if arguments.device != "cpu":
            torch.cuda.synchronize()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        peak = peak_bytes(device)
        connection.send({"seconds": wall, "cpu_seconds": cpu, "peak": peak, "above": peak - base})


def measure(arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Return the measurements of every case, one a round."""
    cases = arguments.cases.split(";") if arguments.cases else list(CASES)
    # of the processes to come
    os.environ |= {"OMP_NUM_THREADS": str(arguments.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for together in [[case] for case in cases] if arguments.one_at_a_time else [cases]:
        workers = {name: start(name, arguments) for name in together}
        for turn in range(arguments.rounds):
            for name in rotated(together, turn):
                connection = workers[name][1]
                connection.send(True)
                measured[name].append(connection.recv())
        for process, connection in workers.values():
            connection.send(False)
            process.join()
    return measured


def start(name: str, arguments: argparse.Namespace) -> tuple[SpawnProcess, Connection]:
    """Start the process of a case, and return it when it has loaded its model and done a step."""
    context = multiprocessing.get_context("spawn")
    connection, of_worker = context.Pipe()
    process = context.Process(target=work, args=(of_worker, name, arguments), daemon=True)
    process.start()
    of_worker.close()
    try:
        connection.recv()
    except EOFError:
        raise SystemExit(f"{name} did not start") from None
    return process, connection


def verdicts(measured: dict[str, list[dict[str, float]]], clock: str) -> list[dict[str, Any]]:
    """Return the ratio of times with its interval, and the goal for it."""
    answers = []
    for what, above, below, goal in GOALS:
        if {above, below} <= measured.keys():
            before, after = ([row[clock] for row in measured[name]] for name in (below, above))
            ratio = judge(before, after).to_json()
            answers.append({"what": what, "goal": goal} | {key: ratio[key] for key in ("ratio", "low", "high")})
    if {"head", "naive head"} <= measured.keys():
        peak, naive = (max(1, *(row["above"] for row in measured[name])) for name in ("head", "naive head"))
        memory = {"what": "head, memory", "goal": HEAD_MEMORY_GOAL, "ratio": peak / naive, "low": None, "high": None}
        answers.append(memory)
    return answers


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("model", help="folder or hub name")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    add_batch_options(parser)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cases", help=f"some of them, with ; between: {'; '.join(CASES)}")
    parser.add_argument("--one-at-a-time", action="store_true", help="for models that fit only once; not interleaved")
    parser.add_argument("--clock", choices=("seconds", "cpu_seconds"), default="seconds", help="which one ratios use")
    arguments = parser.parse_args()
    measured = measure(arguments)
    for name, rounds in measured.items():
        times = spread([row[arguments.clock] for row in rounds])
        print(
            f"{name:32s} {times['median']:8.3f} s  ({times['lowest']:.3f} to {times['highest']:.3f})  "
            f"peak {max(row['peak'] for row in rounds) / 2**20:8.0f} MiB, "
            f"{max(row['above'] for row in rounds) / 2**20:7.0f} above the model"
        )
    answers = verdicts(measured, arguments.clock)
    for answer in answers:
        goal = "" if answer["goal"] is None else f"  goal {answer['goal']:.3g}"
        print(f"{answer['what']:50s} {ratio_text(answer)}{goal}")
    print_result(__doc__, arguments, threads=arguments.threads, verdicts=answers, rounds=measured)


if __name__ == "__main__":
    main()
