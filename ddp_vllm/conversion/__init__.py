"""The verb convert: checkpoints that other tools pruned."""
