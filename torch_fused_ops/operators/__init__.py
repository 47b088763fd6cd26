"""The operators: what each of them is (``declare``), and what follows from that."""
