"""Every picture."""
