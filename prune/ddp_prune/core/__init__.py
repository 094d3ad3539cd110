"""The training core: a loaded model, blocks of tokens and budgets in; gates and trained weights out."""
