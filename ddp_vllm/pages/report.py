"""The report of a checkpoint, `report.html`, which requires no network.

The checkpoint itself has all the data, so the page can be made again wherever the folder is.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta

from ddp_vllm.checkpoint import Checkpoint
from ddp_vllm.errors import CheckpointError, reading
from ddp_vllm.masks import MASKS_FILE, METRICS_FILE, RECOVERY_FILE, read_masks_file
from ddp_vllm.names import bare_name
from ddp_vllm.output import check_file, write_text
from ddp_vllm.pages import pictures
from ddp_vllm.pages.page import HTML, REPORT_FILE, Page, Picture, Section, Table, to_html
from ddp_vllm.pages.summary import answers, dense_name, lead, sections, trained_together
from ddp_vllm.remote_code.files import LARGEST_JSON, parse_json, read_bytes
from ddp_vllm.schema import checked


def write_report(checkpoint: Checkpoint, output: Path, name: str = "") -> Path:
    """Write the report into the file `output`, or into `report.html` of that folder, replacing an
    older one, and return its path.

    name: of the checkpoint, by default that of its folder.

    Raises: CheckpointError as `draw`; OutputError if nothing can be written there.
    """
    file = output if output.suffix == ".html" and not output.is_dir() else output / REPORT_FILE
    check_file(file, overwrite=True, begins=HTML)
    provenance, drawn = checkpoint.provenance, [*draw(checkpoint)]
    *tables, widths = sections(checkpoint)
    folded = [widths]
    if rows := answers(checkpoint.history):
        remark = "The prompts are the same for every model. Answers are greedy, at most 64 tokens."
        table = Table(headings=[*rows[0]], rows=[[*row.values()] for row in rows], is_text=True)
        tables.insert(0, Section(heading="Answers", table=table, remark=remark))
    tables += [Section(heading="Pictures", pictures=drawn)] if drawn else []
    runs = {"Recipe": provenance, "Recipe of the recovery": provenance.get("recovery", {})}
    for heading, run in runs.items():
        if recipe := run.get("recipe"):
            table = Table(headings=["setting", "value"], rows=[*recipe.items()], is_text=True)
            folded.append(Section(heading=heading, table=table, folded=True))
    page = Page(
        title=f"{bare_name(dense_name(checkpoint))}, pruned: {name or checkpoint.folder.resolve().name}",
        lead=[*lead(checkpoint)],
        sections=[*tables, *folded],
        footer=[f"All numbers are from the checkpoint, which ddp-vllm {checkpoint.history.ddp_vllm} wrote."],
    )
    write_text(to_html(page), file)
    return file


def draw(checkpoint: Checkpoint) -> Iterator[Picture]:
    """Draw the kept units and the logged metrics. Raises: CheckpointError if masks or metrics are
    unreadable, or the masks are of other layers or heads."""
    folder, widths, history = checkpoint.folder, checkpoint.widths, checkpoint.history
    dense = widths.dense
    gates = read_masks_file(folder / MASKS_FILE)[0] if (folder / MASKS_FILE).exists() else {}
    if widths.is_family and (heads_LU := gates.get("attn.gates")) is not None:
        units = {dense.num_kv_heads: "KV group", dense.num_query_heads: "query head"}
        fits = heads_LU.shape in [(len(widths.layers), number) for number in units]
        if not (fits and 0 <= heads_LU.min() <= heads_LU.max() < np.inf):
            raise CheckpointError(
                f"{folder}: {MASKS_FILE} and config.json are of different checkpoints, because the heads have other "
                "masks; run ddp-vllm apply again"
            )
        unit = units[heads_LU.shape[1]]
        yield pictures.render(
            pictures.draw_heatmap, name="heads", title=f"Attention: each {unit}",
            caption="Blank: removed. The bar has the scale of each shade.",
            values_LU=heads_LU.astype(np.float64), label="scale", unit_label=unit,
        )  # fmt: skip
    if "mlp" in widths.blocks:
        yield pictures.render(
            pictures.draw_widths, name="widths", title="MLP width of each layer",
            caption=f"Filled: channels kept. Outline: the dense model's {dense.intermediate_size:,}.",
            kept={
                index: layer.intermediate_size
                for index, layer in enumerate(widths.layers)
                if widths.states("mlp", layer)
            },
            dense=dense.intermediate_size,
        )  # fmt: skip
    if "experts" in widths.blocks:
        none = [np.nan] * widths.num_experts
        widths_LE = np.array([layer.expert_intermediate_sizes or none for layer in widths.layers], np.float64)
        blank = "layers without experts, and " if np.isnan(widths_LE).any() else ""
        yield pictures.render(
            pictures.draw_heatmap, name="experts", title="Width of each expert",
            caption=f"Blank: {blank}removed experts. The bar has the width of each shade.",
            values_LU=widths_LE, label="channels kept", unit_label="expert",
        )  # fmt: skip
    if steps := _read_steps(folder / METRICS_FILE):
        after = "the scales and the weights" if trained_together(history) else "only the scales"
        caption = (
            "Losses: each step as a thin line, and a running mean over a twentieth of the steps. At the vertical line "
            f"the kept units are fixed; after it {after} are trained."
        )
        yield pictures.render(
            pictures.draw_curves, name="curves", title="Training", caption=caption, steps=steps,
            targets=history.targets, rounded_after=history.search_steps,
        )  # fmt: skip
    if steps := _read_steps(folder / RECOVERY_FILE):
        caption = "The weights are trained on the dense model's outputs. Each step as a thin line, and a running mean."
        yield pictures.render(
            pictures.draw_curves, name="recovery", title="Recovery", caption=caption, steps=steps, targets={},
            rounded_after=None,
        )  # fmt: skip


def _read_steps(path: Path) -> Sequence[Mapping[str, float]]:
    """Return the logged metrics of each step; none if the file is missing. Raises: CheckpointError."""
    if not path.exists():
        return []
    with reading(path, CheckpointError, "copy the folder again"):
        lines = map(parse_json, read_bytes(path, LARGEST_JSON).splitlines())
        # may be infinite, but are numbers
        steps = checked([*lines], list[dict[str, Annotated[float, Meta(ge=-1e308)]]], path.name)
        return sorted(steps, key=lambda step: step["step"])
