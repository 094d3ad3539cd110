"""Text in, blocks of tokens out. Nothing here knows of pruning."""
