"""Requests for privacy costs and calibrations, in files.

Doors: `batch`, `request`.
"""
