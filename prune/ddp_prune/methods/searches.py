"""What learns masks on frozen weights: the paper's search, ours, and ours with one part changed.

Each takes the steps of the recipe; a step is a forward pass of the dense model, and one of the gated model and back.
"""

from ddp_prune.methods.method import Search

PAPER, OURS = "arXiv:2603.08065", "ddp-vllm"
PAPERS = Search(source=PAPER, settings={"controller": "alm", "polish": 0.0})
PAPERS_POLISHED = Search(source=f"{PAPER}, then our polish", settings={"controller": "alm"})


def ours(*, suits: str = "all", **settings: object) -> Search:
    """Return our search with other settings."""
    source = ", ".join([OURS, *(f"{name} {value}" for name, value in settings.items())])
    return Search(source=source, settings={"controller": "gradual", **settings}, suits=suits)
