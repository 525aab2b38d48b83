"""The questions, and the methods that answer them."""
