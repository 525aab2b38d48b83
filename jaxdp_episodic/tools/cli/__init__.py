"""The command line: questions in files, answers as tables or JSON; training runs.

One module a command: a frozen dataclass, whose fields are the options, with a method
``run`` that returns the exit code. `jaxdp_episodic.tools.cli.program` lists them.
"""

from jaxdp_episodic.tools.cli.process import keep_compiled_kernels, use_all_cores
from jaxdp_episodic.tools.cli.program import main, run

__all__ = ["keep_compiled_kernels", "main", "run", "use_all_cores"]
