"""The correction in compiled C, for CPUs: the twin of `reference` at the speed of memory.

`correction.c` and its headers are compiled when the package is installed, if there is a compiler; `library` finds what
was built. Without it nothing is missing but speed.
"""
