"""Faults planted in the real code, and the checks that have to notice."""
