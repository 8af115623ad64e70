"""`python -m cli`: the same as `lmt`, for machines on which the script is not on the path."""

from cli.main import main

main()
