"""Language models: find, check, load, evaluate and write them."""
