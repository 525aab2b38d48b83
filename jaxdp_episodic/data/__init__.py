"""Data: tables of examples and the units they lie in, and where they come from."""
