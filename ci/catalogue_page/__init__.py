"""The behaviour of the programs of ``suites/meta/catalogue/`` in each world, and the page made from it."""
