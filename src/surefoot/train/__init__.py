"""Training of drafters: texts by the target itself, recipes, export."""
