"""State to save: tensors of modules and optimizers, extras, generators, and their form."""
