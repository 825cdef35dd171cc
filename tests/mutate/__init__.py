"""Whether the tests notice what they are there for: known lines of the code are broken, one at a
time, and for each of them a test has to fail.

``python -m tests.mutate`` runs them all; ``python -m tests.mutate offers`` those whose file or text
has the word in it.
"""
