"""Pure algorithms: tensors in, tensors out, in the symbols of the papers. They know no model, no recipe and no file."""
