"""`python -m rollcorr`: the command line."""

from rollcorr.cli.commands import main

main()
