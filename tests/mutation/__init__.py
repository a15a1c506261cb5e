"""Small faults, planted one at a time in a copy of the package: do the tests notice?

`faults` finds the places where one can be planted and draws among them by a seed, `reach` runs the
tests once and remembers which of them came by which line, and `trial` runs those tests with one
fault in place. ``make mutants`` is all three.
"""
