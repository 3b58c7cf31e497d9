"""The start and the end of programs, their options and progress bars; files that are safe to read and to write."""
