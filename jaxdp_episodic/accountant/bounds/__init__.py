"""Theorems that stand alone: no run of steps uses them."""
