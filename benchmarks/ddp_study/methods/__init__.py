"""The methods that `ddp-vllm study` sets beside each other; one more is a file and a line here."""

from ddp_study.methods import (
    camera,
    depth,
    even_widths,
    fisher,
    flap,
    hard_concrete,
    heapr,
    llm_pruner,
    lorap,
    loraprune,
    magnitude,
    random_order,
    searches,
    slimllm,
    tyr,
    wanda_sp,
    whole_experts,
)
from ddp_study.methods.method import Score, Search

METHODS: dict[str, Score | Search] = {
    "random": random_order.METHOD,
    "magnitude": magnitude.METHOD,
    "wanda-sp": wanda_sp.METHOD,
    "flap": flap.METHOD,
    "llm-pruner": llm_pruner.TAYLOR,
    "llm-pruner-mixed": llm_pruner.MIXED,
    "loraprune": loraprune.METHOD,
    "lorap": lorap.METHOD,
    "slimllm": slimllm.METHOD,
    "tyr": tyr.METHOD,
    "taylor": fisher.TAYLOR,
    "fisher": fisher.FISHER,
    "depth": depth.METHOD,
    "camera": camera.METHOD,
    "heapr": heapr.METHOD,
    "experts-frequency": whole_experts.FREQUENCY,
    "experts-reap": whole_experts.REAP,
    "experts-naee": whole_experts.NAEE,
    "experts-use": whole_experts.USE,
    "even-widths": even_widths.METHOD,
    "hard-concrete": hard_concrete.METHOD,
    "hard-concrete-deterministic": hard_concrete.DETERMINISTIC,
    "paper": searches.PAPERS,
    "ours": searches.OURS,
}
BY_DEFAULT = [name for name in METHODS if not name.startswith(("experts-use", "taylor", "hard"))]
"""Those of the paper's tables 1 to 3."""
