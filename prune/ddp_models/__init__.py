"""Language models: find, check, load, evaluate and write them. Nothing here knows of gates or budgets."""
