"""What is known of a pruned checkpoint, in sentences and tables: the terminal, the card and the
report all show these.

`lead` has the sentences to begin with, `sections` the tables.
"""

from collections.abc import Callable, Iterator
from math import exp, inf
from typing import Any

from ddp_vllm.checkpoint import Checkpoint
from ddp_vllm.costs import whole_model
from ddp_vllm.intervals import mean_loss, with_interval
from ddp_vllm.masks import Provenance, Quality, Training, Trimmed
from ddp_vllm.names import bare_name
from ddp_vllm.pages.page import Section, Table
from ddp_vllm.remote_code.widths import LayerWidths
from ddp_vllm.settings import Option
from ddp_vllm.tensor_parallel import tensor_parallel_sizes

Size = tuple[str, int, int]
"""A quantity, its amount in the dense model, its amount in the pruned model."""
Statement = tuple[str, str]
"""(topic, statement)."""
# highest ratio of perplexity, lowest top-1 agreement with the dense model, and what both mean; rules
# of thumb, not measured on answers: SmolLM2 in W8A8 has 1.03 and 91 %
LOSSES = (
    (1.0, 0.9, "no loss on this kind of text; check it on other text: ddp-vllm eval FOLDER --text FILE"),
    (1.05, 0.85, "a small loss; check it on text of your own: ddp-vllm eval FOLDER --text FILE"),
    (1.2, 0.75, "answers may change; read those in report.html, and evaluate tasks before you serve it"),
    (inf, 0.0, "a large loss; train for longer (ddp-vllm recover FOLDER --minutes 60 -o NEW), or remove less"),
)
MIN_AGREEMENT = Option(
    "Lowest accepted top-1 agreement with the dense model. A model that adapted to a text may have a low perplexity "
    "and other answers.", is_fraction=True, shown="as the verdict",
)  # fmt: skip
QUANTIZED = ("quantization", "all figures were measured before quantization")
LONGER = "text in languages or notations that were not counted becomes longer: it is cut into shorter tokens"
CONTEXT_LENGTH = 2048  # for counting FLOPs if the recipe has none

# module type -> kind of unit -> its number in a layer
_UNITS: dict[str, dict[str, Callable[[LayerWidths], int]]] = {
    "attn": {"KV heads": lambda layer: layer.num_kv_heads, "query heads": lambda layer: layer.num_query_heads},
    "mlp": {"MLP channels": lambda layer: layer.intermediate_size},
    "experts": {
        "experts": lambda layer: sum(map(bool, layer.expert_intermediate_sizes or ())),
        "expert channels": lambda layer: sum(layer.expert_intermediate_sizes or ()),
    },
}


def summary(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the data that `inspect --json` prints: widths by layer, sizes, quality, and how the
    checkpoint was made.

    Names are those of the checkpoint's own files.
    """
    made = {key: checkpoint.provenance.get(key) for key in ("recipe", "trimmed", "perplexity", "latency", "recovery")}
    return {
        "name": checkpoint.folder.resolve().name,
        "model_type": checkpoint.config["model_type"],
        "parameters": checkpoint.num_parameters,
        "layers": [layer.to_json() for layer in checkpoint.layers],
        "sizes": [{"what": label, "dense": dense, "pruned": left} for label, dense, left in sizes(checkpoint)],
        "notes": [*routing_notes(checkpoint)],
        **made,
    }


def dense_name(checkpoint: Checkpoint) -> str:
    """Return the name of the model that the checkpoint was pruned from."""
    return checkpoint.history.dense_model or "its dense model"


def lead(checkpoint: Checkpoint) -> Iterator[Statement]:
    """Yield the main statements: a verdict, the removed share, the quality, the speed, how the
    weights were trained."""
    provenance = checkpoint.history
    parameters, _, *cache = footprint(checkpoint)
    if quality := provenance.perplexity:
        yield "verdict", verdict(quality)
    shares = [f"{1 - left / dense:.1%} of the {name}" for name, dense, left in (parameters, *cache) if dense]
    yield "removed", " and ".join(shares)
    if not quality:
        yield "held-out perplexity", "not measured; ddp-vllm eval FOLDER --text FILE measures it"
    else:
        tokens = f"({quality.tokens:,} tokens of {texts_of(provenance.training)})"
        yield "held-out perplexity", f"{perplexities(quality)} {tokens}"
        if earlier := provenance.training.earlier:
            trained = " and ".join(map(tokens_of, earlier))
            yield "note", f"The pruned model of these figures is one that had been recovered, on {trained}."
        if near := fidelity(quality):
            yield "compared with dense", near
        if quality.ratio < 1:
            yield (
                "note",
                f"The {quality.last} model reads this text better than the dense one because it was trained on text of "
                "the same kind: it adapted to that text, so these figures do not show the cost of pruning on other "
                "text.",
            )
    if latency := provenance.latency:
        speed = with_interval(*latency.bounds)
        yield "predicted", f"{speed} the dense model's speed ({latency.workload}; {latency.place})"
    yield "weights", weight_training(provenance)
    if checkpoint.widths.is_quantized:
        yield QUANTIZED
    if trimmed := provenance.trimmed:
        before, after = trimmed.tokens
        note = f"all figures compare with the dense model after its tokens were trimmed from {before:,} to {after:,}"
        yield "vocabulary", f"{note}; what that cost is under Details"
    if experts := provenance.fewer_experts:
        before, after = experts
        note = f"all figures compare with {bare_name(dense_name(checkpoint))}, which has {after} of {before} experts"
        yield "experts", f"{note} per layer; what removing the others cost is stated there"


def trimming(trimmed: Trimmed) -> Iterator[Statement]:
    """Yield what a smaller vocabulary saves and costs."""
    (before, after), (read, rest) = trimmed.tokens, trimmed.read
    yield "tokens", f"{before:,} → {after:,} of {trimmed.name}"
    yield "numbers that a decode step reads", f"{read:,} → {rest:,} ({rest / read - 1:+.0%})"
    for name, values in trimmed.texts.items():
        pairs = (("bits", values.bits), ("tokens", values.tokens))
        changes = (f"{what} per byte {one:.4f} → {two:.4f} ({two / one:.3f}×)" for what, (one, two) in pairs)
        yield f"held-out text of {name}", ", ".join(changes)
    if trimmed.words:
        words = (f"{word} ({one} → {two})" for word, (one, two) in trimmed.words.items())
        yield "words that became longest, in tokens", ", ".join(words)
    yield "note", LONGER


def verdict(quality: Quality) -> str:
    """Return the ratio of perplexity and the top-1 agreement with what the worse of them means and
    what to do next.

    A model that adapted to the text may have a lower perplexity and other answers.
    """
    near = quality.last_agreement
    meaning = next(words for most, least, words in LOSSES if quality.ratio <= most and agrees(quality, least))
    agreement = f", {near.top1:.1%} top-1 agreement" if near else ""
    return f"{quality.ratio:.3f} times the dense model's perplexity{agreement}: {meaning}"


def lowest_agreement(ratio: float | None, passed: float | None) -> float:
    """Return the lowest top-1 agreement that a limit on the ratio of perplexities accepts, unless one
    was passed."""
    if passed is not None or ratio is None:
        return passed or 0.0
    return next(least for most, least, _ in LOSSES if ratio <= most)


def agrees(quality: Quality, least: float) -> bool:
    """Tell whether the top-1 agreement of the last model with the dense one is at least this, or
    unknown."""
    near = quality.last_agreement
    return near is None or near.top1 >= least


def details(checkpoint: Checkpoint) -> Iterator[Statement]:
    """Yield further statements: where the widths are from, how the model can be served, and notes
    on its quality."""
    provenance = checkpoint.history
    yield "read back", provenance.proof.statement
    if trimmed := provenance.trimmed:
        yield from ((f"trimmed: {topic}", text) for topic, text in trimming(trimmed))
    if converted := provenance.converted:
        sizes_of = provenance.applied_to or "its config.json and its widest layers"
        yield "converted", f"widths from the {converted.format} of {converted.source}; dense sizes from {sizes_of}"
    if checkpoint.widths.is_family:
        devices = ", ".join(map(str, tensor_parallel_sizes(checkpoint.config, checkpoint.layers)))
        yield "tensor parallel", f"--tensor-parallel-size {devices} splits every layer without padding"
    yield from (("note", note) for note in routing_notes(checkpoint))


def sections(checkpoint: Checkpoint) -> Iterator[Section]:
    """Yield the tables: sizes, quality on each text, and the widths of the layers."""
    rows = [[label, f"{dense:,}", f"{left:,}", f"{1 - left / dense:.1%}"] for label, dense, left in sizes(checkpoint)]
    yield Section(heading="Size", table=Table(headings=["", "dense", "pruned", "removed"], rows=rows))
    provenance = checkpoint.history
    # what a recovery holds out may have been trained on while pruning, if its texts or settings are others
    who = "the recovery was trained on none of them" if provenance.recovery else "none of them was trained on"
    yield from _quality("Perplexity on held-out text", provenance.perplexity, texts_of(provenance.training), who)
    for name, quality in provenance.training.watched.items():
        yield from _quality(f"Perplexity on {bare_name(name)}", quality, "text that was only evaluated", who)
    known = Table(headings=["about", "statement"], rows=list(details(checkpoint)), is_text=True)
    yield Section(heading="Details", table=known)
    yield Section(heading="Widths, layer by layer", table=width_table(checkpoint), folded=True)


def _quality(heading: str, quality: Quality | None, text: str, who: str) -> Iterator[Section]:
    """Yield a table of perplexities with standard errors over the held-out blocks, for ratios over
    the blocks' differences, if the loss of each block is known."""
    losses = (quality and quality.block_losses) or {}
    if not quality or "dense" not in losses:
        return
    lines: dict[str, list[float]] = {name: losses[name] for name in quality.perplexities if name in losses}
    for name in [*lines][1:]:
        pairs = zip(losses["dense"], losses[name], strict=True)
        lines[f"{name} / dense"] = [after - before for before, after in pairs]
    rows = []
    for label, values in lines.items():
        mean, error = mean_loss(values, quality.block_tokens)
        row = [label, f"{exp(mean):.2f}", "–" if error is None else f"± {exp(mean) * error:.2f}"]
        near = quality.agreement.get(label)
        rows.append([*row, *([f"{near.kl:.3f}", f"{near.top1:.1%}"] if near else ["–", "–"])])
    headings = ["", "perplexity", "standard error", "KL to dense, nats", "top-1 agreement"]
    remark = (
        f"{quality.tokens:,} tokens of {text}, in {len(losses['dense'])} blocks that all models read; {who}. "
        "Errors are standard errors over the blocks; for a ratio, over the blocks' differences."
    )
    yield Section(heading=heading, table=Table(headings=headings, rows=rows), remark=remark)


def sizes(checkpoint: Checkpoint) -> list[Size]:
    """Return all sizes of a model: units, parameters, FLOPs, KV cache."""
    return [*units(checkpoint), *footprint(checkpoint)]


def units(checkpoint: Checkpoint) -> list[Size]:
    """Count each kind of unit that can be pruned in such a model, over all layers."""
    dense, kinds = checkpoint.widths.dense_layers, _kinds(checkpoint)
    return [(label, sum(map(count, dense)), sum(map(count, checkpoint.layers))) for label, count in kinds.items()]


def _kinds(checkpoint: Checkpoint) -> dict[str, Callable[[LayerWidths], int]]:
    """Return each kind of unit that can be pruned in such a model, with its number in a layer."""
    return {label: count for block in checkpoint.widths.blocks for label, count in _UNITS[block].items()}


def footprint(checkpoint: Checkpoint) -> list[Size]:
    """Count the whole model's parameters, and its FLOPs and bytes of KV cache (at 16 bits) per
    token."""
    context = checkpoint.history.recipe.context_length or CONTEXT_LENGTH
    models = (checkpoint.widths.dense_layers, checkpoint.dense_shapes), (checkpoint.layers, checkpoint.shapes)
    labels = {
        "params": "parameters",
        "flops": f"FLOPs per token at {context:,}",
        "kv-bytes": "KV-cache bytes per token",
    }
    if not checkpoint.widths.is_family:  # its cache differs by architecture
        del labels["kv-bytes"]
    counts = list[Size]()
    for budget, label in labels.items():
        dense, left = (round(whole_model(budget, checkpoint.config, *model, context)) for model in models)
        counts.append((label, dense, left))
    return counts


def width_table(checkpoint: Checkpoint) -> Table:
    """Return the kept units of each layer that can be pruned; uneven groups of heads are listed, and
    the last column is the share of the channels."""
    kinds, dense = _kinds(checkpoint), checkpoint.widths.dense
    channels = lambda layer: layer.intermediate_size + sum(layer.expert_intermediate_sizes or ())  # noqa: E731
    rows = []
    for index, (layer, before) in enumerate(zip(checkpoint.layers, checkpoint.widths.dense_layers, strict=True)):
        if channels(before):
            counts = {label: f"{count(layer):,}" if count(layer) else "–" for label, count in kinds.items()}
            if "query heads" in kinds and len({*layer.query_heads_per_kv_head}) > 1:
                counts["query heads"] += f" ({' '.join(map(str, layer.query_heads_per_kv_head))})"
            rows.append([index, *counts.values(), f"{channels(layer) / channels(before):.0%}"])
    headings = [f"{label} of {count(dense):,}" for label, count in kinds.items()]
    return Table(headings=["layer", *headings, "channels left"], rows=rows)


def routing_notes(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a sentence on experts that no token of the text was sent to; none for a dense model."""
    chosen = checkpoint.history.routing.chosen
    idle = [f"{index} ({row.count(0)} of {len(row)})" for index, row in chosen.items() if 0 in row]
    if idle:
        yield (
            f"experts that no token of the text was sent to, in layers {', '.join(idle)}; they were given an average "
            "importance, so other text may need channels that were removed from them"
        )


def trained_together(provenance: Provenance) -> bool:
    """Tell whether the weights were trained together with the masks; a masks file does not hold
    these weights."""
    return provenance.run.train in ("weights", "lora")


def weight_training(provenance: Provenance) -> str:
    """Return in words whether and how the weights were trained."""
    modes = {
        "weights": "trained together with the masks",
        "lora": "the dense model's plus low-rank additions, which were trained together with the masks",
    }
    training = modes.get(provenance.run.train, "frozen while the masks were learned")
    if provenance.converted:
        training = f"those of {provenance.converted.source}, which another tool pruned"
    elif trained_together(provenance) and provenance.applied_to:
        training = "those of the dense model, although the masks were learned together with trained weights"
    if recovery := provenance.recovery:
        for run in (*recovery.earlier, recovery):
            training += f"; then trained on the dense model's outputs, on {tokens_of(run)}"
    return training


def tokens_of(recovery: Training) -> str:
    """Return how many tokens of which texts a recovery was trained on."""
    return f"{recovery.recipe.tokens if recovery.tokens is None else recovery.tokens:,} tokens of {texts_of(recovery)}"


def texts_of(training: Training) -> str:
    """Return the names of the texts of a training, each once and without folders."""
    names = training.texts or ["text of unknown origin"]
    return ", ".join(dict.fromkeys(map(bare_name, names)))


def answers(provenance: Provenance) -> list[dict[str, str]]:
    """Return prompts with the answer of each model, one object per prompt; [] without prompts."""
    training = provenance.training
    columns = {"prompt": training.prompts, **training.answers}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=False)]


def perplexities(quality: Quality) -> str:
    """Return the held-out perplexity of the dense, the pruned and the recovered model."""
    return " → ".join(f"{model} {value:.2f}" for model, value in quality.perplexities.items())


def fidelity(quality: Quality) -> str:
    """Return a phrase on the agreement of a model with the dense one on the same text; "" if it was
    not measured."""
    near = quality.last_agreement
    return f"top-1 agreement {near.top1:.1%} of tokens, KL {near.kl:.3f} nats" if near else ""
