"""A night as pages, JUnit and Markdown."""
