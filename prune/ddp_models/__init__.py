"""Language models: find, check, load, evaluate and write them. This package knows nothing of gates
or budgets."""
