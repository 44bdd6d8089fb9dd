"""The correction in compiled C for CPUs, at memory bandwidth.

Installing the package compiles `correction.c` and its headers, if a compiler is present; `library` finds the resulting
libraries. They are optional: without them the correction is slower, but complete.
"""
