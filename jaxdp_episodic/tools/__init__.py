"""What people touch: the command line, questions in files, sweeps, plans, pictures.

What a user can mend is raised with a message that names the argument or the file:
OSError (a file that cannot be read or written), TypeError, ValueError (a value out of
range), NotImplementedError (no theorem covers it) or ImportError (an extra that is not
installed, by name). Commands print it in one line; see `cli.command`.
"""
