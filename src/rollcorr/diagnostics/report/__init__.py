"""The report page, its figures, and the verdict on a console."""
