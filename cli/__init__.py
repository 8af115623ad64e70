"""The `lmt` command line. A command parses its arguments, calls one function, prints, and sets the exit code."""
