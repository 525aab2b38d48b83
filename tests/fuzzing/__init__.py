"""Untrusted input: strategies of broken input, and the readers to survive it."""
