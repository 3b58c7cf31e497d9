"""How a program starts, ends, asks and shows progress; files that are safe to read and to write."""
