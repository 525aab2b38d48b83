"""What people touch: command line, files of questions, sweeps, plans, pictures."""
