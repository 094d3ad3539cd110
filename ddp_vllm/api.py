"""The verbs as functions, for Python: what a recipe or a benchmark can set are keywords, what was made is returned.

    import ddp_vllm

    pruned = ddp_vllm.prune("HuggingFaceTB/SmolLM2-135M", sparsity=0.2, output="./pruned")
    print(pruned.num_parameters)

They print nothing unless `verbose` is on, and raise a child of `DdpError` for what a user can mend. The command line
calls the same functions. A part, and torch with it, is imported when one of its functions is called.
"""

import importlib
import os
from collections.abc import Iterable, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_vllm.checkpoint import Checkpoint, read_checkpoint
from ddp_vllm.errors import SettingError, printable
from ddp_vllm.evaluations import default_output
from ddp_vllm.manifest import check_manifest
from ddp_vllm.masks import MASKS_FILE
from ddp_vllm.origins import local_provenance
from ddp_vllm.output import check_file, check_output, clear, is_unfinished
from ddp_vllm.results import results_folder

if TYPE_CHECKING:
    from ddp_vllm.latency import Profile
    from ddp_vllm.pages.measurements import Comparison

PathLike = str | Path


def prune(
    model: PathLike,
    *,
    output: PathLike,
    recipe: PathLike | None = None,
    overwrite: bool = False,
    tracker: str | None = None,
    verbose: bool = False,
    **settings: Any,
) -> Checkpoint:
    """Learn what a model can do without, and write the pruned checkpoint. Interrupted, the same call goes on.

    model: a folder or a hub name. recipe: a TOML file with settings. overwrite: replace an existing pruned folder.
    tracker: log to it too, as `tensorboard`. verbose: print what the command line prints. settings: any field of a
    `Recipe` (`sparsity`, `data`, `steps`, …), which are the options of [`ddp-vllm prune`](commands.md#ddp-vllm-prune).
    """
    recipes = _recipes(model, recipe, settings)
    if len(recipes) > 1:
        raise SettingError(f"{len(recipes)} sizes are given, but prune makes one; prune_sizes makes several")
    return _prune(recipes, Path(output), overwrite=overwrite, tracker=tracker, verbose=verbose)[0]


def prune_sizes(
    model: PathLike,
    *,
    output: PathLike,
    recipe: PathLike | None = None,
    overwrite: bool = False,
    tracker: str | None = None,
    verbose: bool = False,
    **settings: Any,
) -> list[Checkpoint]:
    """Prune to several sizes by one search, such as `sparsity=[0.1, 0.2, 0.3]`, each into a folder inside `output`.

    The arguments are those of `prune`.
    """
    recipes = _recipes(model, recipe, settings)
    return _prune(recipes, Path(output), overwrite=overwrite, tracker=tracker, verbose=verbose)


def plan(model: PathLike, *, output: PathLike = "pruned", recipe: PathLike | None = None, **settings: Any) -> list[str]:
    """Say what `prune` would remove of the whole model, in what memory and time; a line each. Nothing is written."""
    return list(_learning("ddp_prune.plan").plan(_recipes(model, recipe, settings), Path(output)))


def _recipes(model: PathLike, recipe: PathLike | None, settings: dict[str, Any]) -> Any:
    values = _written(settings | {"model": model})
    return _part("ddp_prune.read_recipe").load_recipes(Path(recipe) if recipe else None, values)


def _written(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with every path as its text, as recipes hold them."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}


def _prune(recipes: Any, output: Path, *, overwrite: bool, tracker: str | None, verbose: bool) -> list[Checkpoint]:
    clear(output)
    resumes = output.is_dir() and (recipes[0].recover or len(recipes) > 1 or is_unfinished(output))
    if not resumes:
        check_output(output, overwrite=overwrite)
    run = _learning("ddp_recover.pipeline").prune
    folders = run(
        recipes, output, overwrite=overwrite, tracker=tracker, console=_console(verbose),
        measure=partial(profile, verbose=verbose),
    )  # fmt: skip
    return [read_checkpoint(folder) for folder in folders]


def recover(
    model: PathLike,
    *,
    output: PathLike,
    recipe: PathLike | None = None,
    overwrite: bool = False,
    verbose: bool = False,
    **settings: Any,
) -> Checkpoint:
    """Let the weights of a pruned model learn from the dense one, and write the better model.

    model: a pruned folder. settings: any field of a `RecoveryRecipe` (`minutes`, `data`, `teacher`, …); what is not
    given is as when the masks were learned. The other arguments are those of `prune`.
    """
    output = Path(output)
    clear(output)
    check_output(output, overwrite=overwrite or is_unfinished(output))
    read_checkpoint(Path(model))
    provenance = local_provenance(Path(model) / MASKS_FILE)
    cut_from = {"model": provenance["applied_to"]} if "applied_to" in provenance else {}
    before = provenance.get("recipe", {}) | cut_from
    load = _part("ddp_prune.read_recipe").load_recovery
    found = load(Path(recipe) if recipe else None, _written(settings | {"model": model}), before)
    _learning("ddp_recover.recover").recover_alone(found, output, overwrite=overwrite, console=_console(verbose))
    return read_checkpoint(output)


def apply(
    model: PathLike, masks: PathLike, *, output: PathLike, tp: int = 1, align: int = 1, overwrite: bool = False
) -> Checkpoint:
    """Cut a dense model again from published masks alone; no text and no training needed.

    masks: a `ddp_masks.safetensors`. tp: refuse masks that do not split over this many devices. align: move channels
    until widths are multiples of this.
    """
    output = Path(output)
    check_output(output, overwrite=overwrite)
    _part("ddp_prune.export").apply_masks(str(model), Path(masks), output, tp=tp, align=align, overwrite=overwrite)
    return read_checkpoint(output)


def quantize(model: PathLike, scheme: str, *, output: PathLike, overwrite: bool = False, verbose: bool = False) -> Path:
    """Quantise a pruned or dense folder by llm-compressor, into a folder that vLLM serves as before; return that.

    scheme: `W8A8` (8-bit integers), `FP8` or `W4A16` (4-bit weights). verbose: print which layers a kernel takes more
    slowly because of their widths. The other arguments are those of `prune`.
    """
    part = _part("ddp_recover.quantize")
    part.quantize(Path(model), scheme, Path(output), overwrite=overwrite, say=_say(verbose))
    return Path(output)


def study(
    table: str,
    model: PathLike,
    *,
    output: PathLike,
    test: PathLike,
    sparsity: float | Sequence[float] = (0.2, 0.5),
    seeds: str | Sequence[int] = (0,),
    recipe: PathLike | None = None,
    verbose: bool = False,
    **settings: Any,
) -> Path:
    """Fill a table of the paper for a model, row by row at the same exact budget; return the path of the page.

    table: methods, relaxations, groups, recovery, data, cost, tokens or shapes. output: a folder; an interrupted study
    in it goes on, and what is asked beyond it is filled in. test: a text file to judge by. seeds: they order the text.
    recipe: a TOML file with settings. settings: any field of a `Study` (`methods`, `other_data`, `samples`, `polish`,
    `detokenise`, `test_length`) or of a `Recipe` (`data`, `steps`, …).
    """
    found = _part("ddp_prune.read_recipe").load_recipe
    sizes = tuple(sparsity) if isinstance(sparsity, Sequence) else (sparsity,)
    try:
        orders = tuple(map(int, seeds.split(","))) if isinstance(seeds, str) else tuple(seeds)
    except ValueError:
        raise SettingError(f"seeds is {seeds!r}; give numbers by commas, as 0,1,2") from None
    names = ("methods", "other_data", "samples", "polish", "detokenise", "test_length")
    own = {name: settings.pop(name) for name in names if name in settings}
    if "other_data" in own:
        own["other_data"] = tuple(map(str, own["other_data"]))
    file = Path(recipe) if recipe else None
    for size in sizes:
        base = found(file, _written(settings | {"model": model, "sparsity": size}))
    asked = _learning("ddp_study.study").Study(
        table=table, recipe=base, recipe_file=file, test=Path(test), sparsities=sizes, seeds=orders, **own
    )
    _part("ddp_study.cells").run_study(asked, Path(output), _say(verbose))
    return Path(_part("ddp_study.page").write_study(Path(output), table))


def export_gguf(
    folder: PathLike, *, output: PathLike, type_name: str = "F16", overwrite: bool = False, verbose: bool = False
) -> Path:
    """Write a pruned or dense model as one GGUF file for stock llama.cpp, and return its path.

    type_name: F32, F16, BF16, Q8_0, Q5_1, Q5_0, Q4_1 or Q4_0. verbose: print what was filled up.
    """
    written = Path(output)
    for note in _part("ddp_vllm.gguf_file").write_gguf(Path(folder), written, type_name.upper(), overwrite=overwrite):
        _say(verbose)(note)
    return written


def read(folder: PathLike) -> Checkpoint:
    """Read and check a pruned checkpoint without loading a weight: widths, number of parameters, how it was made."""
    return read_checkpoint(Path(folder))


def inspect(folder: PathLike) -> dict[str, Any]:
    """Return what `ddp-vllm inspect --json` prints of a pruned checkpoint: widths, what is left, quality, recipe."""
    from ddp_vllm.pages.summary import facts

    return facts(read(folder))


def verify(folder: PathLike) -> list[str]:
    """Compare every file of a pruned checkpoint with its SHA-256, check the checkpoint, and return the files' names."""
    hashes = check_manifest(Path(folder))
    read(folder)
    return list(hashes)


def report(folder: PathLike, *, output: PathLike | None = None) -> Path:
    """Draw what was removed from a pruned checkpoint, and return the path of `report.html`.

    output: another folder for it.
    """
    from ddp_vllm.pages.report import write_report

    return write_report(read(folder), Path(output or folder))


def profile(
    model: PathLike,
    *,
    output: PathLike = "machine.json",
    overwrite: bool = False,
    verbose: bool = False,
    **settings: Any,
) -> "Profile":
    """Measure in vLLM what a step of a model costs on this machine by the widths of its layers, for `prune(speedup=…)`.

    settings: any field of `ProfileSettings` (`batches`, `contexts`, `steps`, `rounds`, `engine_arguments`). Returns the
    `Profile` that was written.
    """
    part, output = _part("ddp_benchmarks.profile"), Path(output)
    part.run_profile(part.ProfileSettings(model=str(model), **settings), output, overwrite=overwrite, say=_say(verbose))
    from ddp_vllm.latency import read_profile

    return read_profile(output)


def bench(
    dense: PathLike,
    pruned: PathLike | Sequence[PathLike],
    *,
    output: PathLike | None = None,
    overwrite: bool = False,
    verbose: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Replay ShareGPT prompts through real vLLM with the dense model and pruned ones, which take turns.

    settings: any field of `Settings` (`mode`, `num_prompts`, `pairs`, `engine_arguments`, …). Returns the results as
    they are written to `output`, by default `sharegpt-MODE.json` in the pruned folder; `["verdicts"]` says how much
    faster.
    """
    part = _part("ddp_benchmarks.sharegpt")
    if settings.get("dataset"):
        settings["dataset"] = Path(settings["dataset"])
    chosen = part.Settings(dense=str(dense), pruned=tuple(map(str, _several(pruned))), **settings)
    file = part.results_file(chosen, Path(output) if output else None, overwrite=overwrite)
    return dict(part.run_benchmark(chosen, file, say=_say(verbose)))


def evaluate(
    model: PathLike, *, tasks: str = "paper", output: PathLike | None = None, verbose: bool = False, **settings: Any
) -> dict[str, Any]:
    """Evaluate a model, pruned or dense, on the paper's tasks through lm-eval, and return lm-eval's results.

    tasks: names by commas, or the suites `paper`, `nine`, `llama`. output: a folder, by default `eval` in the model's.
    settings: any field of `EvalSettings` (`limit`, `data`, `backend`, …). `["ddp_vllm"]["mean_accuracy"]` is the mean.
    """
    part, choose = _part("ddp_benchmarks.evaluate"), _part("ddp_benchmarks.tasks").choose_tasks
    folder = Path(output) if output else default_output(str(model))
    data = tuple(map(Path, _several(settings.pop("data", ()))))
    chosen = part.EvalSettings(model=str(model), tasks=choose(tasks), output=folder, data=data, **settings)
    chosen.check()
    with results_folder(folder):
        return dict(part.evaluate(chosen, say=_say(verbose)))


def evaluate_text(
    model: PathLike,
    texts: PathLike | Sequence[PathLike],
    *,
    output: PathLike | None = None,
    verbose: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Compare a model with the dense one on text of your own: perplexity, KL, and how often both agree.

    texts: files or hub datasets, as `prune` takes them. output: a folder, by default `eval` in the model's. settings:
    any field of `FidelitySettings` (`against`, `max_length`, …). `["texts"]` has what was found, text by text.
    """
    part, folder = _learning("ddp_recover.fidelity"), Path(output) if output else default_output(str(model))
    names = tuple(map(str, _several(texts)))
    chosen = part.FidelitySettings(model=str(model), texts=names, **_written(settings))
    chosen.check()
    with results_folder(folder):
        return dict(part.compare_on_text(chosen, folder, say=_say(verbose)))


def compare(
    folders: Iterable[PathLike],
    *,
    output: PathLike = "compare.html",
    results: Iterable[PathLike] = (),
    dense: PathLike | None = None,
    tolerance: float | None = None,
    overwrite: bool = False,
) -> "Comparison":
    """Put quality and speed of pruned checkpoints on one page, in HTML and beside it in Markdown.

    results: files of `bench` and `evaluate` outside the folders, or folders of them. dense: the dense model, by default
    that of the recipe. tolerance: say which model to take if perplexity may be so many times the dense one's. Returns
    the `Comparison`.
    """
    if tolerance is not None and not 0 < tolerance < inf:
        raise SettingError(f"--tolerance {tolerance:g} is no factor of perplexity; give a number above 0, such as 1.05")
    page = Path(output)
    markdown = page.with_suffix(".md")
    if markdown == page:
        raise SettingError(f"{page} is where the Markdown goes; call the page {page.with_suffix('.html')}")
    for path in (page, markdown):
        check_file(path, overwrite=overwrite)
    from ddp_vllm.pages.compare import write_comparison
    from ddp_vllm.pages.measurements import collect

    comparison = collect([*map(Path, folders)], results=[*map(Path, results)], dense=str(dense) if dense else None)
    write_comparison(comparison, page, markdown, tolerance)
    return comparison


def _several(paths: PathLike | Iterable[PathLike]) -> Iterable[PathLike]:
    return (paths,) if isinstance(paths, str | Path) else paths


def _part(module: str) -> Any:
    """Import a module of a part when it is used; the ground floor imports none by name."""
    return importlib.import_module(module)


def _learning(module: str) -> Any:
    # OpenMP threads that spin while they wait slow a step several times over beside another busy process (log 3)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return _part(module)


def _console(verbose: bool) -> Any:
    console = _part("ddp_vllm.pages.terminal").SafeConsole
    return console(quiet=not verbose, soft_wrap=True)  # lines are copied, so never wrapped


def _say(verbose: bool) -> Any:
    return (lambda line: print(printable(line))) if verbose else lambda _line: None
