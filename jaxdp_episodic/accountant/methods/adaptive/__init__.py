"""The worst strategy of a run that adapts: a recursion over the privacy loss."""
