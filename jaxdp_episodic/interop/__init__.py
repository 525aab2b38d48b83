"""Other libraries: a module each, which needs the library that it is named after."""
