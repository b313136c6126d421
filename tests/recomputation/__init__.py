"""The tables of docs/results.md computed a second time by JSON, numpy and scipy, with nothing of `paper` or `fedauc`.

records.py      the records of a run, found by the options that a table asks for
differences.py  AUC from ranks, and DeLong's paired test with its interval
tables.py       the cells of every table
effects.py      what the figures say of I, M and K
page.py         every table of the page
sentences.py    every sentence of the page that has numbers, and the comparison with the page
"""
