"""What prune and recover do, in the order data flows, and the whole job of prune: text → tokens →
masks → widths → checkpoint."""

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from accelerate.utils import set_seed
from rich.console import Console
from torch import Tensor

from ddp_prune.core.budget import Pool
from ddp_prune.core.gates import GatedModel
from ddp_prune.core.learn import Learned, learn
from ddp_prune.core.loss import perplexity_of
from ddp_prune.core.processes import main_process_first, raise_on_all_ranks
from ddp_prune.core.weights import UpdatedWeights
from ddp_prune.devices import describe_device, explained, finish_run, make_accelerator, start_tracker
from ddp_prune.export import export, layer_widths
from ddp_prune.models.evaluation import Evaluation, bos_warning, reference_of
from ddp_prune.models.loading import check_sharding
from ddp_prune.models.source import Source
from ddp_prune.pools import find_model, head_unit_of, latency_profile, pools_of_sizes
from ddp_prune.recipe import Recipe
from ddp_prune.resolve import Loaded, load_trained, resolve_runs, too_large
from ddp_prune.run import Run
from ddp_prune.run_folder import RunFolder, inputs_of
from ddp_prune.settings import TrainingSettings
from ddp_prune.text.blocks import Blocks, check_vocabulary, check_watched, load_blocks, select_loss_mask
from ddp_prune.text.rows import sources_of
from ddp_prune.text.tokens import load_tokenizer
from ddp_vllm.checkpoint import Checkpoint, read_checkpoint
from ddp_vllm.costs import table_note
from ddp_vllm.errors import ModelError, Printer, TextError
from ddp_vllm.intervals import mean_loss, t_quantile
from ddp_vllm.latency import Measure, Profile, predicted_latency
from ddp_vllm.masks import METRICS_FILE
from ddp_vllm.names import bare_name
from ddp_vllm.output import check_output
from ddp_vllm.pages.progress import StepProgress
from ddp_vllm.pages.written import print_written, write_pages
from ddp_vllm.proof import Reference

NOTICEABLE = 1.01  # times a perplexity; below it, training the weights changed nothing to speak of


class Command(NamedTuple):
    """What a job is told besides its recipes."""

    output: Path
    overwrite: bool
    proof: bool
    """Whether the written folder is compared with the model that was measured."""
    tracker: str | None
    """Of accelerate; None: no tracker."""
    console: Console


@contextmanager
def begin_job(
    command: Command, recipes: Sequence[TrainingSettings], folders: Sequence[Path], *, reads: Sequence[str]
) -> Iterator[tuple[RunFolder, Sequence[int]]]:
    """Begin or resume the run of a command, and remove it when the block has written every output.
    Yield it, and the indices of the outputs that are not written yet.

    recipes: one per size. folders: of the written models, one per recipe. reads: models that must not
    be overwritten.
    Raises: as `RunFolder.open`; OutputError if a folder must not be replaced.
    """
    accelerator = make_accelerator(command.output, command.tracker)
    print_line: Printer = command.console.print if accelerator.is_main_process else lambda _: None
    print_line(describe_device(accelerator))
    check_sharding(recipes[0], accelerator.num_processes)
    run_folder = RunFolder(command.output, accelerator, print_line)
    with run_folder.open(recipes, overwrite=command.overwrite):
        num_written = len(run_folder.written(folders))
        is_watched = recipes[0].watch == run_folder.record["recipes"][0].get("watch", "")
        for folder in folders[:num_written]:
            print_line(f"{folder} was written before" + "; eval --text reads what --watch names now" * (not is_watched))
        with raise_on_all_ranks(accelerator):
            for folder in folders[num_written:] if accelerator.is_main_process else ():
                check_output(folder, overwrite=run_folder.record["overwrite"], reads=reads)
        try:
            yield run_folder, range(num_written, len(folders))
        finally:  # also after Ctrl-C, or the tracker would show a run that never ends
            finish_run(accelerator)
        run_folder.remove()
    accelerator.wait_for_everyone()  # the caller reads what the main process wrote


class Text(NamedTuple):
    """Token blocks, int64 [num_blocks, seq_len]."""

    blocks: Blocks
    """To train on, and held out."""
    loss_mask: Tensor | None
    """Of the blocks to train on, bool: tokens that contribute to the cross-entropy; None: all."""
    watched: Mapping[str, Tensor]
    """Of texts that are only evaluated, by name."""

    def identity(self, *sources: Source, profile: Path | None = None) -> dict[str, Any]:
        """Return the identity of text, weights and configs of a run (`inputs_of`). A watched text
        decides nothing."""
        blocks = {"train": self.blocks.train, "heldout": self.blocks.heldout}
        return inputs_of(blocks, [source.folder for source in sources], profile=profile)


def read_text(run: Run[Any], tokenizer: Any, vocabulary: int, watched: Sequence[str], print_line: Printer) -> Text:
    """Read the text for the steps of a run, and the watched texts.

    vocabulary: number of tokens that the model knows. watched: names; those that the recipe does not
    name itself are left out if they cannot be read.
    Raises: TextError as `load_blocks`, or if a watched text holds the same excerpts; ModelError if
        the model does not know a token.
    """
    recipe = run.recipe

    def load(name: str, train_blocks: int, min_train_blocks: int) -> Blocks:
        blocks = load_blocks(
            name, tokenizer, seq_len=recipe.seq_len, train_blocks=train_blocks, heldout_blocks=recipe.heldout_blocks,
            min_train_blocks=min_train_blocks, seed=recipe.seed, text_column=recipe.text_column,
        )  # fmt: skip
        check_vocabulary(blocks, vocabulary, recipe.model)
        return blocks

    blocks, heldout = load(recipe.data, run.steps.last * recipe.batch_size, recipe.batch_size), dict[str, Tensor]()
    for name in watched:
        try:
            if bare_name(name) in map(bare_name, heldout):  # under which results are published
                raise TextError(f"two watched texts are called {bare_name(name)}; rename one")
            other = load(name, 1, 0)
            check_watched(other, name, blocks, recipe.data)
        except TextError as error:
            if recipe.watch:
                raise
            print_line(f"{name} is not watched: {error}")
            continue
        heldout[name] = other.heldout
        for note in other.notes:
            print_line(note)
    return Text(blocks, select_loss_mask(blocks, recipe.learn_from, recipe.data, print_line), heldout)


def prune(recipes: Sequence[Recipe], command: Command, measure: Measure) -> list[Checkpoint]:
    """Prune a model and write the checkpoint to the output; several sizes are written into folders
    inside it.

    recipes: one per size, smallest cut first.
    measure: measures the latency profile that the budget `latency` requires, if there is none yet.
    Returns the written checkpoints. Errors of the user are raised before the model is loaded.
    Raises: a child of DdpError.
    """
    folders = folders_of(recipes, command.output)
    with begin_job(command, recipes, folders, reads=[recipes[0].model]) as (run_folder, left):
        if left:
            _prune(recipes, command, run_folder, left, folders, measure)
    return list(map(read_checkpoint, folders))


def _prune(
    recipes: Sequence[Recipe],
    command: Command,
    run_folder: RunFolder,
    left: Sequence[int],
    folders: Sequence[Path],
    measure: Measure,
) -> None:
    """Resolve the sizes, read the text, and train and write each size that is not written yet."""
    first, accelerator, print_line = recipes[0], run_folder.accelerator, run_folder.print_line
    source = main_process_first(accelerator, find_model, first)
    source.describe_rest(print_line)
    profile = main_process_first(accelerator, latency_profile, first, source, measure)
    pools = pools_of_sizes(recipes, source, profile)
    runs, _, loaded, _ = resolve_runs(recipes, pools, source, run_folder.resolved, accelerator, print_line)
    last, tokenizer = runs[-1], load_tokenizer(source.tokenizer)
    start_tracker(accelerator, "ddp-vllm", last.recipe)
    watched = sources_of(first.watch) if first.watch else []
    text = main_process_first(accelerator, read_text, last, tokenizer, source.vocab_size, watched, print_line)
    announce(last, source, text, print_line)
    inputs = text.identity(source, profile=profile.path if profile else None)
    if run_folder.begin(last.resolved(), inputs, shared_by=accelerator.num_processes if first.shard else 1):
        left = range(len(runs))  # also the sizes that were written from other text or weights
    for number in left:
        run = runs[number]
        for pool in pools[number]:
            print_line(pool.describe())
        run_folder.size, run_folder.search = number, run.steps.search if run is not last else None
        run_folder.before = sum(other.steps.last - other.steps.first for other in runs[:number]) - run.steps.first
        set_seed(first.seed)
        with explained(too_large(run.recipe)):
            model = loaded.pop() if loaded else load_trained(run, source, accelerator)
            result = _learn_size(run, model, pools[number], source, tokenizer, text, run_folder, command)
            del model
        with raise_on_all_ranks(accelerator):
            if accelerator.is_main_process:
                checkpoint = _write(run, pools[number], source, profile, inputs, result, run_folder, folders[number])
                print_written(checkpoint, first.model, command.console)


def folders_of(recipes: Sequence[Recipe], output: Path) -> list[Path]:
    """Return the folder that each size is written to."""
    if len(recipes) == 1:
        return [output]
    return [output / f"{recipe.size_name}-{recipe.size!r}" for recipe in recipes]


def announce(run: Run[Recipe], source: Source, text: Text, print_line: Printer) -> None:
    """Print what a run is about to do, before the model is loaded."""
    recipe, blocks, head_unit = run.recipe, text.blocks, head_unit_of(run.recipe, source)
    passes = run.steps.last * recipe.batch_size / len(blocks.train)
    units = {"attn": head_unit, "mlp": "channel", "experts": "expert channel"}
    unit = head_unit if recipe.whole_experts else units[source.sizes.blocks[0]]
    trained = {"masks": "masks", "lora": "masks and low-rank additions", "weights": "masks and weights"}[run.train]
    print_line(
        f"text: {blocks.num_tokens:,} tokens of {recipe.data}, {blocks.train.numel():,} to train on "
        f"({passes:.2g} passes), {blocks.heldout.numel():,} held out"
    )
    if note := table_note(source.config, source.shapes):
        used, known = len(blocks.train.unique()), source.text_config.get("vocab_size", 0)
        print_line(f"{note}; {used:,} of its {known:,} tokens occur in the text to train on (ddp-vllm trim)")
    print_line(
        f"model: {source.config['model_type']}, {source.sizes.num_layers} layers, unit {unit}; trained: {trained}"
    )


class Result(NamedTuple):
    """What the checkpoint of a size is written from."""

    learned: Learned
    evaluation: dict[str, Any]
    """Perplexity and samples of the dense and the pruned model."""
    transform: UpdatedWeights | None
    """The updated weights; None if only masks were trained."""
    reference: Reference | None
    """Of the pruned model, which the written folder must repeat; None for --no-proof."""


def _learn_size(
    run: Run[Recipe],
    loaded: Loaded,
    pools: Sequence[Pool],
    source: Source,
    tokenizer: Any,
    text: Text,
    run_folder: RunFolder,
    command: Command,
) -> Result:
    """Train gates, and weights too if the run says so, and evaluate the dense and the pruned
    model.

    Raises: ModelError if the dense model cannot read; TrainingError as `take_steps`, or if no
        sequence fits a device.
    """
    recipe, accelerator, print_line = run.recipe, run_folder.accelerator, run_folder.print_line
    heldout, (model, gated, weights, teacher) = text.blocks.heldout, loaded
    assert gated
    training = loaded.training(heldout=heldout, print_line=print_line)
    evaluation = evaluate_dense(model, recipe.model, recipe, text, tokenizer, print_line)
    phase = partial(_phase, run, {pool.name: 1.0 - pool.keep_ratio for pool in pools})
    with StepProgress(command.console, run.steps.last, phase, accelerator.is_main_process) as report:
        learned = learn(
            gated, text.blocks.train, run.schedule, pools, accelerator, run_folder, report, training,
            loss_mask=text.loss_mask,
        )  # fmt: skip
    gates = {kind: values.to(accelerator.device) for kind, values in learned.gates.items()}
    untrained, transform = dict[str, list[float]](), None
    if weights:
        if recipe.distillation > 0:
            dense = gated
            if teacher is not None:
                dense = GatedModel(teacher, source.widths, source.sizes, gated.head_unit)
            with dense.masks(gates), weights.adapters_disabled():
                untrained = evaluation.losses_of(dense.model)
        transform = weights.finish()
    with gated.masks(gates):
        evaluation.evaluate("pruned", model)
        reference = reference_of(model, tokenizer, heldout) if command.proof else None
    warn_of_harm(evaluation, untrained, print_line)
    for name in text.watched:
        print_line(evaluation.summary(name))
    metrics = {"perplexity": evaluation.perplexity(recipe.data), **evaluation.samples()}
    if text.watched:
        metrics["watched"] = {name: evaluation.perplexity(name) for name in text.watched}
    return Result(learned, metrics, transform, reference)


def evaluate_dense(
    model: Any, name: str, recipe: TrainingSettings, text: Text, tokenizer: Any, print_line: Printer
) -> Evaluation:
    """Evaluate the dense model on the held-out and the watched text of a run; print a warning if it
    requires a BOS token that the tokenizer omits.

    name: of the dense model. Raises: ModelError if it cannot read.
    """
    heldout = text.blocks.heldout
    evaluation = Evaluation({recipe.data: heldout, **text.watched}, tokenizer, print_line=print_line)
    evaluation.evaluate("dense", model)
    if not math.isfinite(perplexity := evaluation.perplexity(recipe.data)["dense"]):
        raise ModelError(
            f"{name} has perplexity {perplexity} before pruning; its weights are broken, or dtype is too small"
        )
    if warning := bos_warning(model, recipe.model, tokenizer, heldout):
        print_line(warning)
    return evaluation


def warn_of_harm(evaluation: Evaluation, untrained: Mapping[str, Sequence[float]], print_line: Printer) -> None:
    """Print where perplexity is higher than with the dense model's own weights under these gates:
    noticeably, and in more blocks than chance allows (95 %).

    untrained: the losses of the latter, in nats per token of each block.
    """
    for name, before in untrained.items():
        after, tokens = evaluation.losses[name]["pruned"], evaluation.block_tokens[name]
        rise, error = mean_loss([one - other for one, other in zip(after, before, strict=True)], tokens)
        chance = 0.0 if error is None else t_quantile(len(before) - 1) * error
        if not rise <= max(chance, math.log(NOTICEABLE)):  # not a number is no improvement either
            trained, own = (perplexity_of(losses, tokens) for losses in (after, before))
            print_line(
                f"on {name} training the weights did harm: perplexity {trained:.4g}, {own:.4g} with the dense model's "
                "own weights under the same masks; ddp-vllm apply makes that model from the masks file, and --train "
                "masks trains masks only"
            )


def _phase(run: Run[Recipe], targets: Mapping[str, float], metrics: dict[str, float]) -> tuple[str, str]:
    """Return the phase of a step and the sparsity it reached, for the progress bar."""
    shares = {name.removesuffix("_sparsity"): value for name, value in metrics.items() if name.endswith("_sparsity")}
    goals = {name: f" of {share:.0%}" for name, share in targets.items()}
    sparsity = ", ".join(f"{name} {value:.1%}{goals.get(name, '')}" for name, value in shares.items())
    annealed = f"μ {metrics['mu']:.3f} " if "mu" in metrics else ""
    phase = "search" if metrics["step"] <= run.steps.search else "polish"
    return phase, f"sparsity {sparsity} {annealed}"


def _write(
    run: Run[Recipe],
    pools: Sequence[Pool],
    source: Source,
    profile: Profile | None,
    inputs: Mapping[str, Any],
    result: Result,
    run_folder: RunFolder,
    output: Path,
) -> Checkpoint:
    """Write the checkpoint of a size with its provenance and its report."""
    recipe, learned = run.recipe, result.learned
    provenance: dict[str, Any] = {
        "run_id": run_folder.id,
        "recipe": recipe.to_dict(),
        "run": run.to_dict(),
        "search_steps": run.steps.search,
        "targets": {pool.name: 1.0 - pool.keep_ratio for pool in pools},
        "texts": sources_of(recipe.data),
        "rounding": learned.rounding,
        **({"learning_rate": learned.rate} if learned.rate else {}),
        **learned.routing(source.sizes.routed_layers),
    }
    if profile:
        widths = layer_widths(learned.gates, source.sizes, source.widths)
        provenance |= {"latency": predicted_latency(profile, widths, recipe.workload)}

    def finish(folder: Path, output: Path) -> Checkpoint:
        shutil.copyfile(run_folder.metrics, folder / METRICS_FILE)
        return write_pages(folder, output)

    return export(
        source,
        learned.gates,
        output,
        head_unit=head_unit_of(recipe, source),
        provenance=provenance | result.evaluation | {"fingerprint": inputs},
        scores=learned.scores(),
        overwrite=run_folder.record["overwrite"],
        transform=result.transform,
        reference=result.reference,
        finish=finish,
    )
