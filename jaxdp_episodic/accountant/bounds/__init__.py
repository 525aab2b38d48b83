"""Theorems that stand alone: no run of steps uses them.

Arguments of the wrong type raise `TypeError`, values out of range, shapes that do not
broadcast and unknown names `ValueError`; functions name what they refuse besides.
"""
