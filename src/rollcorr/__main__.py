"""`python -m rollcorr`: the command line."""

from rollcorr.cli import main

main()
