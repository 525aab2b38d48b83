"""The command line: questions in files, answers as tables or JSON; training runs.

A command is a dataclass of its options, derived from `command.Command`, whose method
``run`` returns the exit code. `program.COMMANDS` lists them.
"""

from jaxdp_episodic.tools.cli.process import keep_compiled_kernels, use_all_cores
from jaxdp_episodic.tools.cli.program import main, run

__all__ = ["keep_compiled_kernels", "main", "run", "use_all_cores"]
