"""For applications whose tables belong to a framework: the same tables as in `sql/`."""
