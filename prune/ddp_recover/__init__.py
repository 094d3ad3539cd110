"""After pruning: the removed quality recovered and measured, and the model quantized."""
