"""The command line; the table in `flags` lists the commands.

Modules that need Flax are imported in the functions that use them: it costs a second,
which bad input and other commands of the same module should not pay.
"""

from jaxdp_episodic.tools.cli.command import (
    keep_compiled_kernels,
    main,
    run,
    use_all_cores,
)

__all__ = ["keep_compiled_kernels", "main", "run", "use_all_cores"]
