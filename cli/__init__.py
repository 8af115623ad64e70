"""The `lmt` command line: parses, calls one function, prints, sets the exit code."""
