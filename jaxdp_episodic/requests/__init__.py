"""Questions in files."""
