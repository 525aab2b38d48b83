"""``python -m jaxdp_episodic.cli``: the command line."""

from jaxdp_episodic.cli import main

if __name__ == "__main__":
    main()
