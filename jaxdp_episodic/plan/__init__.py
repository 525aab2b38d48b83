"""Which design to run within a budget."""
