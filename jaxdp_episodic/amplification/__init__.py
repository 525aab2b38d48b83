"""What the draw of the episodes buys: one module per family of theorems."""
