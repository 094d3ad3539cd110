"""What learns masks: the paper's search, and ours; a row of a table may change a setting of either.

Each takes the steps of the recipe; a step is a forward pass of the dense model, and one of the gated model and back.
"""

from ddp_study.methods.method import Search

PAPERS = Search(source="arXiv:2603.08065", settings={"controller": "alm", "polish": 0.0})
OURS = Search(source="ddp-vllm", settings={"controller": "gradual"})
