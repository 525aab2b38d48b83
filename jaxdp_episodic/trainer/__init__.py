"""What is drawn, trained and audited: Flax, Optax, Orbax."""
