"""`python -m rollcorr.cli` is the `rollcorr` command."""

from rollcorr.cli import main

if __name__ == "__main__":
    main()
