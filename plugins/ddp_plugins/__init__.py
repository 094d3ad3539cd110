"""What vLLM loads to serve pruned checkpoints; README.md has the reading order."""
