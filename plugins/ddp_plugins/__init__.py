"""The vLLM plugin that serves pruned checkpoints; README.md has the reading order."""
