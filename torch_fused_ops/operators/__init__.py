"""The operators: what each of them is (``declaration.py``), and what follows from that."""
