"""Other libraries' descriptions and accountants."""
