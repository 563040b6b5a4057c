"""What each world shows of the programs of ``suites/meta/catalogue/``, in words, and the page made of it."""
