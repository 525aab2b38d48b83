"""One mechanism a file: its dominating pair, moments and loss distribution."""
