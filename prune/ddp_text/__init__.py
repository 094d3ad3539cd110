"""Text in, blocks of tokens out. This package knows nothing of pruning."""
