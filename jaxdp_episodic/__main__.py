"""``python -m jaxdp_episodic``: the command line."""

from jaxdp_episodic.tools.cli import main

if __name__ == "__main__":
    main()
