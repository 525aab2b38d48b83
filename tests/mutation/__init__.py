"""Faults planted in the real code, and the checks that must detect them."""
