"""Fuzzing: strategies of broken input, and the readers that must survive it."""
