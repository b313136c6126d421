"""One file per contender, each with `main(work, answer_requests)`: get ready, then `answer_requests(run)`.

`run(rounds)` runs rounds 0, 1, … from the work's start and returns the final flat weights. Files import their library
at the top, so that a missing one ends the worker before it is ready.
"""
