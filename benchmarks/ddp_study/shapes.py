"""What was removed where, of the masks in the cells of a study; figures of sparsity and of scales in arXiv:2603.08065.

Legend: L layers, U units of a layer, E experts.
"""

import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddp_vllm.masks import MASKS_FILE, read_masks_file
from ddp_vllm.pages import pictures
from ddp_vllm.pages.evidence import kept_scales
from ddp_vllm.pages.page import Picture, Section, Table

LABELS = {"attn": "heads", "mlp": "MLP channels", "experts": "expert channels"}
CLAIMS = {  # heading of a number -> what the paper finds of it, as a sentence and as a test
    "removed late − early": ("later layers lose more", lambda value: value > 0),
    "spread of attention ÷ MLP": ("attention more unevenly", lambda value: value > 1),
    "choice × removal": ("experts the more the less they are chosen", lambda value: value < 0),
    "median scale": ("scales lie about 1", lambda value: abs(value - 1) < 0.2),
}


def shapes_of(cells: Sequence[tuple[str, Path]]) -> tuple[str, list[Section]]:
    """Return whether the paper's findings hold, on one line, and a table and pictures; cells: (name, its file).

    Raises: CheckpointError for masks that cannot be read.
    """
    rows: list[dict[str, Any]] = []
    drawn: list[Section] = []
    for label, path in cells:
        tensors, provenance = read_masks_file(path.with_suffix(Path(MASKS_FILE).suffix))
        gates = {name.removesuffix(".gates"): values for name, values in tensors.items() if name.endswith(".gates")}
        chosen = provenance.get("routing", {}).get("chosen", {})
        rows.append({"": label, **numbers_of(gates, np.array(list(chosen.values()), dtype=np.float64))})
        drawn.append(Section(heading=label, pictures=_draw(gates, f"shape-{len(drawn)}")))
    if not rows:
        return "", []
    held = {each: [test(row[each]) for row in rows if each in row] for each, (_, test) in CLAIMS.items()}
    said = [f"{CLAIMS[each][0]} in {sum(found)} of {len(found)} rows" for each, found in held.items() if found]
    shown = [{name: value if name == "" else f"{value:.3g}" for name, value in row.items()} for row in rows]
    remark = "Removed: the share in the later half of the layers less that in the earlier one, over all units. Spread: "
    remark += "the standard deviation of that share over layers. Choice × removal: the correlation of ranks."
    return "; ".join(said), [Section(heading="Numbers", table=Table.of(shown), remark=remark), *drawn]


def numbers_of(gates: dict[str, NDArray[np.float32]], chosen_LE: NDArray[np.float64]) -> dict[str, float]:
    """Return the numbers that `CLAIMS` are about; chosen_LE: how often each expert was, empty if unknown."""
    removed = {kind: (values == 0).reshape(len(values), -1).mean(1) for kind, values in gates.items()}
    share_L = removed.get("experts", removed.get("mlp"))
    assert share_L is not None
    half = len(share_L) // 2
    found = {"removed late − early": float(share_L[-half:].mean() - share_L[:half].mean())} if half else {}
    if "attn" in removed:
        found["spread of attention ÷ MLP"] = float(removed["attn"].std() / max(removed["mlp"].std(), 1e-9))
    if chosen_LE.size and (gates["experts"] == 0).any():
        ranks = [np.argsort(np.argsort(each.ravel())) for each in (chosen_LE, (gates["experts"] == 0).mean(-1))]
        found["choice × removal"] = statistics.correlation(*(each.tolist() for each in ranks))
    scales = np.concatenate([kept_scales(values) for values in gates.values()])
    found["median scale"] = float(np.median(scales))
    found["scales above 1.05"] = float((scales > 1.05).mean())
    return found


def _draw(gates: dict[str, NDArray[np.float32]], name: str) -> list[Picture]:
    """Return a map of heads and the widths of MLPs, or a map of experts; and the scales of what is kept."""
    maps, drawn = {}, []
    if "attn" in gates:
        maps = {"scale": gates["attn"].astype(np.float64)}
    if "experts" in gates:
        maps = {"channels left": (gates["experts"] > 0).sum(-1).astype(np.float64)}
    for label, values_LU in maps.items():
        draw = partial(pictures.draw_heatmaps, values=maps, unit_label="expert" if "experts" in gates else "head")
        title, height = "Experts" if "experts" in gates else "Attention", pictures.height_of_map(values_LU.shape[1])
        caption = f"The stronger the tone, the more of {label}; crossed out: removed."
        drawn.append(pictures.render(draw, name=f"{name}-map", title=title, caption=caption, height=height))
    if "mlp" in gates:
        kept_L = (gates["mlp"] > 0).sum(1).tolist()
        draw = partial(pictures.draw_widths, kept_L=kept_L, dense=gates["mlp"].shape[1])
        caption = "Filled: channels kept. Outline: the dense model's."
        drawn.append(pictures.render(draw, name=f"{name}-widths", title="MLP widths", caption=caption, height=2.5))
    kept = {LABELS[kind]: kept_scales(values) for kind, values in gates.items()}
    draw = partial(pictures.draw_histograms, kept=kept, searched={})
    height = 0.6 + 1.6 * len(kept)
    caption = "Dotted: 1, unscaled."
    drawn.append(pictures.render(draw, name=f"{name}-scales", title="Scales", caption=caption, height=height))
    return drawn
