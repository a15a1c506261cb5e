"""The command line: words and tables at the edge of the library."""
