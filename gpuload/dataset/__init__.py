"""The result of a load: rows, columns, where they come from, and the order in which a loader gives them."""
