"""Small faults, planted one at a time in a copy of the package: do the tests notice?

`faults` finds the places where one can be planted and draws among them by a seed, `reach` finds
out which tests come by which line and remembers it, and `trial` runs those tests with one fault in
place: of its own room first. ``make mutants`` is all three.
"""
