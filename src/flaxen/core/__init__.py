"""What everything else is made of: trees, products, errors, registries. Imports no other room."""
