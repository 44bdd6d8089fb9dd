"""`rollcorr demo`: three short examples whose policies are tables, so that they need no model and run in seconds.

stories        a healthy run; a fault, found and fixed; a stale sampler with and without correction
demo_screen    the stories on a terminal
"""
