"""The worst strategy of a run that adapts, by a recursion over the privacy loss."""
