"""Job to Program: who does what, with no clock."""
