"""Readers and writers of files from outside, with their bounds."""
