"""``python -m jaxdp_episodic.tools.cli``: the command line."""

from jaxdp_episodic.tools.cli import main

if __name__ == "__main__":
    main()
