"""What a run costs: by NumPy, and by JAX where it compiles; without Flax."""
