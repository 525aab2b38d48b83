"""Answers of the code of before, recorded, and the script that recorded them."""
