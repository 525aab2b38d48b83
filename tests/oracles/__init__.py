"""Independent oracles: nothing in here imports the library."""
