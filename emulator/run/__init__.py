"""Program to Trace: the Program played on contended resources."""
