"""`python -m cli`: the same as `lmt`, for machines where the `lmt` script is not on the path."""

from cli.main import main

main()
