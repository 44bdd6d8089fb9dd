"""`rollcorr demo`: three short stories with policies that are tables, so that they need no model and take seconds.

stories        a healthy run; a fault, found and fixed; a stale sampler with and without correction
demo_screen    the stories on a terminal
"""
